r"""What one pass through the network says about each example: all that tuning needs.

The residual's variance is linear in its scales, :math:`v = \sum_l \sigma_l^2 u_l`, so the base's
outputs and ``u`` are enough to predict with any ``sigma2``. They are small: ``2C + L`` numbers an
example, or ``2SC + L`` for Monte Carlo.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .._network.batches import Batch, rows_of
from .._network.checks import check_batch, network_dtype_device
from .._network.loaders import inputs, inputs_and_targets, labelled, on_device
from .._network.processes import moved, together
from .._network.reservoir import Reservoir, row_keys
from .._network.sources import check_no_pair
from ..extension import Extension
from ..likelihoods import LIKELIHOODS, LabelLikelihood, Likelihood
from ..posteriors.gaussian import DiagonalGaussian, Gaussian
from ..posteriors.links import LINKS
from .probabilities import symmetric_noise

__all__ = ["Examples", "Parameters", "Shard", "Wanted", "collect", "merged"]

# At most this much is kept of one set of examples; more of them are thinned evenly.
_BYTES = 1 << 30
# Numbers that are worked on at a time, so that gradients stay small too.
_CHUNK = 1 << 21
# Far beyond any variance that matters, and its square still fits.
_LARGEST = 1e100


@dataclass(frozen=True)
class Parameters:
    """What tuning chooses.

    Attributes:
        sigma2: ``(L,)``.
        temperature: A number: outputs are divided by it before the softmax.
        noise: A number: variance of the observations in regression.
    """

    sigma2: Tensor
    temperature: Tensor
    noise: Tensor

    def without_residual(self) -> Parameters:
        """The base alone."""
        return Parameters(torch.zeros_like(self.sigma2), self.temperature, self.noise)


@dataclass(frozen=True)
class Examples:
    """The kept examples.

    Attributes:
        u: ``(N, L)``.
        first: The base's mean ``(N, C)``, or for Monte Carlo its samples ``(N, S, C)``.
        second: Its variance ``(N, C)``, or for Monte Carlo the residual's noise ``(N, S, C)``:
            the same for every ``sigma2``, so objectives are smooth.
        target: Class indices ``(N,)``, labels or values ``(N, C)``; ``None`` for outliers.
        seen: How many examples there were; ``N`` of them were kept.
        watched: How many of them had one of the keys that were watched for.
        link: What makes probabilities of moments.
        likelihood: What the outputs stand for.
        keys: Keys of the inputs, ``(N,)``, see :func:`rgpr._network.reservoir.row_keys`; empty
            where nobody needs them.
    """

    u: Tensor
    first: Tensor
    second: Tensor
    target: Tensor | None
    seen: int
    watched: int = 0
    link: str = "probit"
    likelihood: Likelihood = LIKELIHOODS["classification"]
    keys: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))

    def __len__(self) -> int:
        return len(self.u)

    @property
    def labels(self) -> Tensor:
        """The targets of examples that have them."""
        assert self.target is not None
        return self.target

    @property
    def sampled(self) -> bool:
        return self.first.dim() == 3

    def of(self, rows: slice | Tensor) -> Examples:
        """Some of the examples."""
        target = None if self.target is None else self.target[rows]
        u, first, second = self.u[rows], self.first[rows], self.second[rows]
        keys = self.keys[rows] if len(self.keys) else self.keys
        return replace(self, u=u, first=first, second=second, target=target, keys=keys)

    def chunks(self) -> Iterator[Examples]:
        """The same examples in parts of bounded size."""
        rows = max(1, _CHUNK // max(1, self.first[:1].numel()))
        for start in range(0, len(self), rows):
            yield self.of(slice(start, start + rows))

    def variance(self, parameters: Parameters) -> Tensor:
        """``v``: ``(N, 1)``."""
        return (self.u @ parameters.sigma2)[:, None]

    def log_probabilities(self, parameters: Parameters) -> Tensor:
        """Predictive log-probabilities, by the link or the mean over samples.

        They are ``(N, C)`` for classes, and for several labels ``(N, C, 2)``: without and with.
        """
        v, likelihood = self.variance(parameters), self.likelihood
        assert isinstance(likelihood, LabelLikelihood)
        if not self.sampled:
            gaussian = DiagonalGaussian(self.first, self.second)
            logits = LINKS[self.link].logits(gaussian, v[:, 0], parameters.temperature)
            return likelihood.log_probabilities(logits)
        # The root's slope at zero is infinite, and times a zero it would be NaN.
        logits = self.first + (v + 1e-30).sqrt()[:, None] * self.second
        each = likelihood.log_probabilities(logits / parameters.temperature)
        return torch.logsumexp(each, 1) - math.log(each.shape[1])

    def probabilities(self, parameters: Parameters) -> Tensor:
        """All rows, without gradients."""
        with torch.no_grad():
            return torch.cat([part.log_probabilities(parameters) for part in self.chunks()]).exp()


@dataclass(frozen=True)
class Wanted:
    """What is wanted of a set of examples.

    Attributes:
        description: Label of the progress bar and of errors.
        progress: Show a progress bar where there is a terminal.
        targets: ``"needed"``, ``"optional"`` (in all batches or in none) or ``"none"``.
        at_most: The most examples that are kept; ``None`` for as many as memory allows.
        stop_after: End the pass after so many examples, for generators that never do.
        link: What makes probabilities of moments.
        n_samples: Keep so many samples of each example, for Monte Carlo, instead of moments.
        generator: Source of the samples.
        watch: Keys of inputs whose appearances are counted, see
            :func:`rgpr._network.reservoir.row_keys`.
        keep_overflowed: Keep examples on which the network overflows, with outputs of zero and an
            infinite ``u``, instead of refusing them.
    """

    description: str
    progress: bool
    targets: str = "needed"
    at_most: int | None = None
    stop_after: int | None = None
    link: str = "probit"
    n_samples: int | None = None
    generator: torch.Generator | None = None
    watch: Tensor | None = None
    keep_overflowed: bool = False

    def batches(
        self, loader: Iterable[Any], network: nn.Module
    ) -> Iterator[tuple[Batch, Tensor | None]]:
        """Inputs and targets of every batch, for this network."""
        bar: Any = {"progress": self.progress, "description": self.description}
        if self.targets == "none":
            return ((x, None) for x in inputs(loader, network, **bar))
        if self.targets == "optional":
            return inputs_and_targets(loader, network, **bar)
        return ((x, target) for x, target in labelled(loader, network, **bar))


def collect(extension: Extension, loader: Iterable[Any], wanted: Wanted) -> Examples:
    """One pass over ``loader``, and the examples of all processes.

    Args:
        extension: The base and its residual.
        loader: Yields ``(x, y)`` or, where no targets are needed, also ``x``.
        wanted: What is kept.
    """
    return merged(Shard(extension, wanted), loader)


def merged(shard: Shard, loader: Iterable[Any] | None) -> Examples:
    """The examples that a shard has and those of a loader, of all processes.

    Args:
        shard: What was read before.
        loader: More data, or ``None``.
    """

    def read() -> dict[str, Any]:
        if loader is not None:
            shard.read(loader)
        return shard.state()

    every = Shard(shard.extension, shard.wanted)
    for state in together(read, shard.device):
        every.merge(state)
    return every.examples()


class Shard:
    """The examples that one process sees; those of several can be merged.

    Args:
        extension: The base and its residual.
        wanted: What is kept.

    Attributes:
        extension: The base and its residual.
        wanted: What is kept.
        device: Where the network is.
        kept: The examples; ``None`` before the first batch.
    """

    def __init__(self, extension: Extension, wanted: Wanted) -> None:
        self.extension, self.wanted = extension, wanted
        self.device = network_dtype_device(extension.posterior.network)[1]
        self.kept: Reservoir | None = None
        self._watch = None if wanted.watch is None else wanted.watch.cpu()
        self._watched = self._columns = self._number = self._outputs = 0

    def read(self, loader: Iterable[Any]) -> None:
        """Take in the batches of a loader."""
        extension, stop_after = self.extension, self.wanted.stop_after
        for batch, target in self.wanted.batches(loader, extension.posterior.network):
            self.update(batch, target)
            if self.kept is None:
                continue
            classes = extension.likelihood.classes(self._outputs)
            if self.wanted.targets == "optional" and classes == 1:
                check_no_pair(loader, self._outputs)
            if stop_after is not None and self.kept.seen >= stop_after:
                break

    def update(self, batch: Batch, target: Tensor | None) -> None:
        """Take in a batch."""
        extension, number = self.extension, self._number
        x, network = on_device(batch, self.device), extension.posterior.network
        measured = extension.source is None
        check_batch(number, x, network, extension.input_shape, measured=measured)
        self._number += 1
        if rows_of(x) == 0:
            return
        rows = self._rows(number, x, target)
        self._outputs = rows[1].shape[-1]
        self._keep(number, x, rows)
        if self._watch is not None:
            self._watched += int(torch.isin(row_keys(batch).cpu(), self._watch).sum())

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in the examples of another; see :meth:`state`."""
        kept = moved(state["kept"], self.device)
        if kept is None:
            return
        if self.kept is None:
            self.kept, self._columns = Reservoir(kept["size"]), len(kept["rows"]) - 1
        if len(kept["rows"]) - 1 != self._columns:
            raise ValueError(
                f"{self.wanted.description}: some of the examples have targets and others have "
                "none; give targets for all of them, or for none"
            )
        self.kept.merge(kept)
        self._watched += state["watched"]

    def state(self, history: bool = False) -> dict[str, Any]:
        """All there is to know of the examples: tensors and what JSON can hold.

        Args:
            history: Include the keys of all rows seen, so that copies among later rows are
                recognised.
        """
        kept = self.kept
        state = None if kept is None else kept.state_and_history if history else kept.state
        return {"kept": state, "watched": self._watched}

    def examples(self) -> Examples:
        """The examples that were kept.

        Raises:
            ValueError: There are none.
        """
        if self.kept is None:
            raise ValueError(f"{self.wanted.description}: there are only empty batches")
        keys, u, first, second, *rest = self.kept.state["rows"]
        about = (self.kept.seen, self._watched, self.wanted.link, self.extension.likelihood)
        return Examples(u, first, second, rest[0] if rest else None, *about, keys)

    def _run(self, x: Batch) -> tuple[Tensor, Tensor]:
        """What is kept of the base's answer; see :class:`Examples`."""
        posterior, n_samples = self.extension.posterior, self.wanted.n_samples
        if n_samples is None:
            gaussian: Gaussian = posterior(x)
            return gaussian.mean.double(), gaussian.variance.clamp(max=_LARGEST)
        generator = self.wanted.generator
        samples = posterior.sample(x, n_samples, generator)
        noise = symmetric_noise(self.extension.likelihood, samples, generator)
        return samples.transpose(0, 1).float(), noise.transpose(0, 1).float()

    def _rows(self, number: int, x: Batch, target: Tensor | None) -> list[Tensor]:
        reading = self.extension.read(x, self._run)
        (first, second), u = reading.output, reading.u
        good = first.isfinite().flatten(1).all(1) & u[:, 0].isfinite()
        if not bool(good.all()):
            if not self.wanted.keep_overflowed:
                raise ValueError(
                    f"{self.wanted.description}: the network overflows on batch {number}; leave "
                    "out examples that far away, where every sigma2 predicts the same"
                )
            first = torch.where(good[:, None], first, 0.0)
            second = torch.where(good[:, None], second, 0.0)
        rows = [torch.where(good[:, None], u.clamp(max=_LARGEST), torch.inf), first, second]
        if target is not None:
            shape = (len(first), first.shape[-1])
            checked = self.extension.likelihood.target(target, shape, number)
            rows.append(checked.to(first.device))
        return rows

    def _keep(self, number: int, x: Batch, rows: list[Tensor]) -> None:
        if self.kept is None:
            size = sum(t[:1].numel() * t.element_size() for t in rows)
            limit, at_most = max(1, _BYTES // size), self.wanted.at_most
            self.kept = Reservoir(limit if at_most is None else min(limit, at_most))
            self._columns = len(rows)
        if len(rows) != self._columns:
            raise ValueError(
                f"{self.wanted.description}: batch {number} "
                f"{'has' if len(rows) > self._columns else 'lacks'} targets, unlike those before "
                "it; yield (x, y) from all batches, or x alone"
            )
        self.kept.add(x, *rows)
