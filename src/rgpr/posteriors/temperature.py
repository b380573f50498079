r"""Temperature scaling, below any posterior.

The outputs are divided by :math:`T`, which is fitted on validation data. For a point estimate this
is the usual baseline, :math:`\mathrm{softmax}(f(x) / T)`; for a Gaussian the mean is divided by
:math:`T` and the covariance by :math:`T^2`. ``T`` minimises the validation loss of the probit
predictive.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from .._network.batches import Batch, copied
from .._network.checks import network_dtype_device
from .._network.guards import evaluating
from .._network.layers import LayerChoice
from .._network.loaders import labelled, on_device
from .._network.outputs import Output
from .._network.representation import Representation
from .._network.sources import as_batches
from .._network.trace import Trace
from ..likelihoods.classification import Classification
from .base import Posterior, as_posterior
from .gaussian import DiagonalGaussian, Gaussian, ScaledGaussian
from .links import probit

__all__ = ["Temperature"]


class Temperature(Posterior):
    """Another posterior with its outputs divided by a temperature.

    Args:
        base: A posterior, or anything that :func:`rgpr.as_posterior` takes.
        temperature: To start with; :meth:`fit` finds it.
    """

    kind = "temperature"
    base: Posterior
    temperature: Tensor

    def __init__(self, base: Any, temperature: float = 1.0) -> None:
        base = as_posterior(base)
        super().__init__(base.network)
        if not temperature > 0:
            raise ValueError(f"temperature = {temperature} must be positive")
        self.base = base
        self.likelihood = base.likelihood
        self.register_buffer("temperature", torch.tensor(float(temperature), dtype=torch.float64))

    @torch.no_grad()
    def fit(self, val_loader: Iterable[Any], *, progress: bool = True) -> Self:
        """Choose the temperature by the likelihood of validation data.

        Args:
            val_loader: Yields ``(x, y)`` with class indices ``y``.
            progress: Show a progress bar where there is a terminal.

        Returns:
            The posterior itself.
        """
        device = network_dtype_device(self.network)[1]
        data = as_batches(val_loader, self.network)
        means, variances, targets = [], [], []
        with evaluating(self.base) as modes, modes:
            for number, (x, y) in enumerate(
                labelled(data, self.network, progress=progress, description="temperature")
            ):
                gaussian: Gaussian = self.base(copied(on_device(x, device)))
                means.append(gaussian.mean.double())
                variances.append(gaussian.variance)
                classes = Classification().target(y, gaussian.mean.shape, number)
                targets.append(classes.to(gaussian.mean.device))
        mean, variance, target = torch.cat(means), torch.cat(variances), torch.cat(targets)

        def loss(log_temperature: Tensor) -> float:
            scaled = _probit(mean, variance, log_temperature.exp())
            return -float(scaled.log().gather(1, target[:, None]).mean())

        # One smooth parameter: a grid for the basin, then golden section for the digits.
        grid = torch.linspace(-3, 3, 31, dtype=torch.float64)
        best = int(torch.tensor([loss(t) for t in grid]).argmin())
        if best in (0, len(grid) - 1):
            edge = float(grid[best].exp())
            warnings.warn(
                f"the temperature ran to the edge of what was searched, {edge:.3g}; "
                "no scale of the outputs calibrates this base. A Laplace approximation with too "
                "small a prior precision does that: tune its prior precision first",
                stacklevel=2,
            )
        low, high = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
        ratio = (5**0.5 - 1) / 2
        for _ in range(40):
            left, right = high - ratio * (high - low), low + ratio * (high - low)
            low, high = (low, right) if loss(left) < loss(right) else (left, high)
        self.temperature = ((low + high) / 2).exp().to(self.temperature)
        return self

    def forward(self, x: Batch) -> Gaussian:
        return ScaledGaussian(self.base(x), 1 / self.temperature)

    def sample(self, x: Batch, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        return self.base.sample(x, n_samples, generator) / self.temperature

    def mean_parts(self) -> list[tuple[nn.Module, float]] | None:
        parts = self.base.mean_parts()
        factor = 1 / float(self.temperature)
        return None if parts is None else [(network, factor * w) for network, w in parts]

    @property
    def output(self) -> Output:
        """That of the posterior below, which is the one that runs the network."""
        return self.base.output

    @output.setter
    def output(self, which: Output) -> None:
        self.base.output = which

    def taking(self, output: Output) -> Self:
        other = copy.copy(self)
        other._modules = dict(self._modules)
        other.base = self.base.taking(output)
        return other

    @property
    def no_graph(self) -> str | None:
        return self.base.no_graph

    @property
    def is_certain(self) -> bool:
        return self.base.is_certain

    def covariances(self, x: Batch) -> Tensor:
        return self.base.covariances(x) / self.temperature.square()

    def choose_layers(
        self, choice: LayerChoice, x: Batch, seen: Trace | None = None
    ) -> list[Representation]:
        return self.base.choose_layers(choice, x, seen)

    def own_tensors(self) -> dict[str, Tensor]:
        base = {f"base.{name}": t for name, t in self.base.own_tensors().items()}
        return {"temperature": self.temperature, **base}

    def config(self) -> dict[str, Any]:
        if self.base.kind is None:
            raise TypeError(f"a {type(self.base).__name__} cannot be saved, nor can one below it")
        return {"base": self.base.kind, "config": self.base.config()}

    @classmethod
    def from_saved(
        cls, network: nn.Module, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> Self:
        own = {name.removeprefix("base."): t for name, t in tensors.items() if name[:5] == "base."}
        base = Posterior.kinds[config["base"]].from_saved(network, config["config"], own)
        return cls(base, float(tensors["temperature"]))


def _probit(mean: Tensor, variance: Tensor, temperature: Tensor) -> Tensor:
    gaussian = ScaledGaussian(DiagonalGaussian(mean, variance), 1 / temperature)
    return probit(gaussian, torch.zeros(len(mean), dtype=torch.float64, device=mean.device))
