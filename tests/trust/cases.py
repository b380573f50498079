"""Random models: a network, its dtype, what is asked of it, and data to fit it on, from a seed."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import rgpr
from rgpr._network.guards import evaluating
from rgpr.posteriors import Ensemble, MCDropout, Temperature

from .architectures import Architecture, architecture

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# How the inputs look that a model is fitted on, and how often.
DATA = {
    "ordinary": 8,
    "constant features": 2,
    "duplicated features": 2,
    "duplicated rows": 2,
    "discrete": 2,
    "huge": 2,
    "tiny": 2,
    "far from zero": 2,
    "classes far apart": 2,
    "two examples": 1,
}


@dataclass(frozen=True)
class Case:
    """One random model, before it is fitted.

    Attributes:
        seed: Decided everything.
        architecture: The network.
        outputs: How many outputs it has.
        likelihood: What they stand for.
        dtype: What the network computes in.
        residual: ``"onset"`` or ``"paper"``.
        base: The kind of posterior below the residual.
        data: One of :data:`DATA`.
        scale: The spread of the inputs.
    """

    seed: int
    architecture: Architecture
    outputs: int
    likelihood: str
    dtype: torch.dtype
    residual: str
    base: str
    data: str
    scale: float

    @property
    def network(self) -> nn.Module:
        return self.architecture.network

    @property
    def classes(self) -> int:
        """The number of alternatives, of which far away each is as likely as the others."""
        return max(2, self.outputs) if self.likelihood == "classification" else 2

    def __str__(self) -> str:
        words = f"{self.architecture.words}, {self.outputs} outputs, {self.likelihood}"
        kept = f"{self.dtype}, {self.residual}, {self.base}"
        return f"{words}, {kept}, {self.data} inputs of scale {self.scale:g}"

    def inputs(self, n: int, seed: int = 0) -> Tensor:
        """Inputs ``(n, ...)`` as the model is fitted on, in its dtype."""
        generator = torch.Generator().manual_seed(1000 * self.seed + seed)
        shape = self.architecture.shape
        x = torch.randn(n, *shape, generator=generator, dtype=torch.float64)
        flat = x.flatten(1)
        half = flat.shape[1] // 2
        if self.data == "constant features":
            flat[:, :half] = 0.5
        elif self.data == "duplicated features":
            flat[:, :half] = flat[:, -1:]
        elif self.data == "duplicated rows":
            flat[:] = flat[torch.arange(n) % max(1, n // 5)]
        elif self.data == "discrete":
            flat[:] = flat.sign()
        elif self.data == "far from zero":
            flat += self._apart
        elif self.data == "classes far apart":
            centres = torch.Generator().manual_seed(self.seed)
            drawn = torch.randn(5, flat.shape[1], generator=centres, dtype=torch.float64)
            flat += self._apart * drawn[torch.arange(n) % min(5, self.classes)]
        return (self.scale * flat.view(n, *shape)).to(self.dtype)

    @property
    def _apart(self) -> float:
        """A distance in spreads: 100, and up to 10 000 where the dtype can tell them apart."""
        return 10.0 ** (2 + self.seed % 3 * (self.dtype in (torch.float32, torch.float64)))

    def targets(self, n: int) -> Tensor:
        """Targets that fit the likelihood, and belong to the inputs if these are in classes."""
        if self.data == "classes far apart" and self.likelihood == "classification":
            return torch.arange(n) % min(5, self.classes)
        generator = torch.Generator().manual_seed(self.seed)
        if self.likelihood == "classification":
            return torch.randint(self.classes, (n,), generator=generator)
        shape = (n, self.outputs)
        if self.likelihood == "multilabel":
            return torch.randint(2, shape, generator=generator)
        return torch.randn(shape, generator=generator)

    def posterior(self) -> Any:
        """The network as the base of a model."""
        network = self.network
        if self.base == "ensemble":
            others = [copy.deepcopy(network), copy.deepcopy(network)]
            for factor, other in zip((1.1, 1.2), others, strict=True):
                for parameter in other.parameters():
                    parameter.data *= factor
            return Ensemble([network, *others])
        if self.base == "temperature":
            return Temperature(network, 0.7)
        if self.base == "dropout":
            return MCDropout(network, n_samples=4)
        if self.base == "laplace":
            return self._laplace()
        return network

    def _laplace(self) -> Any:
        from laplace import Laplace
        from torch.utils.data import DataLoader, TensorDataset

        mode = self.network.training
        likelihood = "regression" if self.likelihood == "regression" else "classification"
        la = Laplace(self.network, likelihood, "last_layer", "kron")
        data = TensorDataset(self.inputs(60), self.targets(60))
        with torch.enable_grad():
            la.fit(DataLoader(data, batch_size=30))
        self.network.train(mode)
        return la

    def model(self, **options: Any) -> rgpr.RGPR:
        """A model that is fitted on :meth:`inputs`, in two batches, with or without targets."""
        options = {"residual": self.residual, "likelihood": self.likelihood, **options}
        model = rgpr.RGPR(self.posterior(), **options)
        x = self.inputs(2 if self.data == "two examples" else 60)
        cut = len(x) // 2 + 1
        batches: list[Any] = [x[:cut], x[cut:]]
        if self.seed % 2:
            y = self.targets(len(x))
            batches = [(x[:cut], y[:cut]), (x[cut:], y[cut:])]
        return model.fit(batches, progress=False)


def random_case(seed: int, **given: Any) -> Case:
    """The case of a seed.

    Args:
        seed: Decides everything that is not given.
        given: Values in place of those of the seed: ``dtype``, ``likelihood``, ``outputs``,
            ``base``, ``data``, ``residual`` or the ``kind`` of the architecture.
    """
    rng = random.Random(f"case {seed}")
    likelihoods = ["classification"] * 6 + ["regression", "multilabel"]
    likelihood = given.get("likelihood", rng.choice(likelihoods))
    outputs = rng.choices([1, 2, 3, 10, 100, 1000, 10_000], [4, 5, 8, 6, 2, 1, 0.5])[0]
    outputs = min(outputs, 12) if likelihood != "classification" else outputs
    outputs = given.get("outputs", outputs)
    drawn = architecture(seed, outputs, given.get("kind"))
    dtype = given.get("dtype", rng.choices(DTYPES, [5, 2, 1.5, 1.5])[0])
    data = given.get("data", rng.choices(list(DATA), DATA.values())[0])
    scale = {"huge": 1e10, "tiny": 1e-10}.get(data, rng.choice([1.0, 1.0, 0.01, 100.0]))
    if dtype == torch.float16:
        scale = {"huge": 100.0, "tiny": 1e-3}.get(data, 1.0)
    if not _runs(drawn, dtype):
        dtype = torch.float32
    drawn.network.to(dtype)
    bases = rng.choices(["map", "ensemble", "temperature", "dropout"], [8, 2, 1, 1])
    base = given.get("base", bases[0])
    if base == "dropout" and not _has_dropout(drawn.network):
        base = "map"
    plain = dtype == torch.float32 and data == "ordinary" and likelihood != "multilabel"
    if base == "map" and "base" not in given and plain and _laplace_can(drawn, outputs, rng):
        base = "laplace"
    residual = given.get("residual", rng.choice(["onset", "onset", "paper"]))
    return Case(seed, drawn, outputs, likelihood, dtype, residual, base, data, scale)


def _has_dropout(network: nn.Module) -> bool:
    return any(isinstance(module, nn.Dropout) for module in network.modules())


def _laplace_can(drawn: Architecture, outputs: int, rng: random.Random) -> bool:
    """A few networks get laplace-torch's last-layer approximation, where it is known to work."""
    plain = isinstance(drawn.network, nn.Sequential)
    return plain and 1 < outputs <= 10 and rng.random() < 0.3


def _runs(drawn: Architecture, dtype: torch.dtype) -> bool:
    """Whether this machine runs the network in this dtype at all."""
    network = drawn.network
    mode = [module.training for module in network.modules()]
    try:
        with torch.no_grad():
            network.to(dtype).eval()(torch.ones(2, *drawn.shape, dtype=dtype))
    except RuntimeError:
        return False
    finally:
        network.float()
        for module, training in zip(network.modules(), mode, strict=True):
            module.training = training
    return True


@contextmanager
def told(case: Any) -> Iterator[None]:
    """Errors say which case they belong to; warnings about odd data are not errors here."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except BaseException as error:
        error.add_note(str(case))
        raise


def watched(model: rgpr.RGPR, x: Tensor) -> tuple[Tensor, Tensor]:
    """The base's mean outputs, and the rows for which every number inside of it is finite."""
    good = torch.ones(len(x), dtype=torch.bool)

    def look(_: nn.Module, __: Any, out: Any) -> None:
        out = out[0] if isinstance(out, tuple) else out
        if isinstance(out, Tensor):
            good.logical_and_(out.reshape(len(x), -1).isfinite().all(1))

    posterior = model.posterior
    handles = [module.register_forward_hook(look) for module in posterior.modules()]
    with torch.no_grad(), evaluating(posterior) as modes, modes:
        gaussian = posterior(x.clone())
    for handle in handles:
        handle.remove()
    for numbers in (gaussian.mean, gaussian.variance.expand_as(gaussian.mean)):
        good &= numbers.isfinite().all(1)
    return gaussian.mean.double(), good


class Untouched:
    """What a network looks like, to be compared later: nothing may have changed."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._before = self._look()
        self._state = {name: tensor.clone() for name, tensor in network.state_dict().items()}

    def _look(self) -> list[Any]:
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        modules = [
            (module.training, *(tuple(getattr(module, kind).values()) for kind in kinds))
            for module in self._network.modules()
        ]
        parameters = [
            (p.dtype, p.requires_grad, p.grad is None, p.data_ptr())
            for p in self._network.parameters()
        ]
        return [modules, parameters]

    def check(self) -> None:
        assert self._look() == self._before, "modes, hooks or parameters changed"
        state = self._network.state_dict()
        assert state.keys() == self._state.keys()
        for name, tensor in state.items():
            same = torch.equal(tensor.nan_to_num(), self._state[name].nan_to_num())
            assert same, f"{name} changed"
