r"""What one pass through the network says about each example: all that tuning needs.

The residual's variance is linear in its scales, :math:`v = \sum_l \sigma_l^2 u_l`, so the base's
outputs and ``u`` are enough to predict with any ``sigma2``. They are small: ``2C + L`` numbers an
example, or ``2SC + L`` for Monte Carlo.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._network.checks import check_batch, check_target
from .._network.loaders import inputs, inputs_and_targets, labelled, on_device
from .._network.processes import together
from .._network.reservoir import Reservoir, row_keys
from .._network.running import network_dtype_device
from ..posteriors import Posterior
from ..posteriors.gaussian import Gaussian, symmetric_normal
from ..posteriors.links import log_softmax, probit_logits

__all__ = ["Outputs", "Parameters", "collect"]

# At most this much is kept of one set of examples; more of them are thinned evenly.
_BYTES = 1 << 30
# Numbers that are worked on at a time, so that gradients stay small too.
_CHUNK = 1 << 21
# Far beyond any variance that matters, and its square still fits.
_LARGEST = 1e100

Read = Callable[[Tensor, Callable[[Tensor], Any]], tuple[Any, Tensor]]


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
class Outputs:
    """The kept examples.

    Attributes:
        u: ``(N, L)``.
        first: The base's mean ``(N, C)``, or for Monte Carlo its samples ``(N, S, C)``.
        second: Its variance ``(N, C)``, or for Monte Carlo the residual's noise ``(N, S, C)``:
            the same for every ``sigma2``, so objectives are smooth.
        target: Class indices ``(N,)`` or values ``(N, C)``; ``None`` for outliers.
        seen: How many examples there were; ``N`` of them were kept.
        watched: How many of them had one of the keys that were watched for.
    """

    u: Tensor
    first: Tensor
    second: Tensor
    target: Tensor | None
    seen: int
    watched: int = 0

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

    def of(self, rows: slice | Tensor) -> Outputs:
        """Some of the examples."""
        target = None if self.target is None else self.target[rows]
        return Outputs(self.u[rows], self.first[rows], self.second[rows], target, self.seen)

    def chunks(self) -> Iterator[Outputs]:
        """The same examples in parts of bounded size."""
        rows = max(1, _CHUNK // max(1, self.first[:1].numel()))
        for start in range(0, len(self), rows):
            yield self.of(slice(start, start + rows))

    def variance(self, parameters: Parameters) -> Tensor:
        """``v``: ``(N, 1)``."""
        return (self.u @ parameters.sigma2)[:, None]

    def log_probabilities(self, parameters: Parameters) -> Tensor:
        """Predictive log-probabilities ``(N, C)``, by the probit or the mean over samples."""
        v = self.variance(parameters)
        if not self.sampled:
            logits = probit_logits(self.first, self.second + v)
            return log_softmax(logits / parameters.temperature)
        # The root's slope at zero is infinite, and times a zero it would be NaN.
        logits = self.first + (v + 1e-30).sqrt()[:, None] * self.second
        each = log_softmax(logits / parameters.temperature)
        return torch.logsumexp(each, 1) - math.log(each.shape[1])

    def probabilities(self, parameters: Parameters) -> Tensor:
        """All rows, without gradients."""
        with torch.no_grad():
            return torch.cat([part.log_probabilities(parameters) for part in self.chunks()]).exp()


def collect(
    read: Read,
    posterior: Posterior,
    loader: Iterable[Any],
    *,
    shape: torch.Size | None,
    link_approx: str,
    n_samples: int,
    generator: torch.Generator,
    likelihood: str | None,
    optional: bool = False,
    at_most: int | None,
    stop_after: int | None = None,
    progress: bool,
    description: str,
    watch: Tensor | None = None,
    keep_overflowed: bool = False,
) -> Outputs:
    """One pass over ``loader``, and the examples of all processes.

    Args:
        read: ``read(x, run)`` gives ``run(x)`` and ``u`` from one pass through the network.
        posterior: The base.
        loader: Yields ``(x, y)`` or, where no targets are needed, also ``x``.
        shape: Shape of one input.
        link_approx: ``"probit"`` or ``"mc"``.
        n_samples: Samples for each example with ``"mc"``.
        generator: Source of the samples.
        likelihood: What the targets are; ``None`` where none are needed.
        optional: Targets may be missing, from all batches or none.
        at_most: The most examples that are kept; ``None`` for as many as memory allows.
        stop_after: End the pass after so many examples, for generators that never do.
        progress: Show a progress bar where there is a terminal.
        description: Its label.
        watch: Keys of inputs whose appearances are counted, see
            :func:`rgpr._network.reservoir.row_keys`.
        keep_overflowed: Keep examples on which the network overflows, with outputs of zero and an
            infinite ``u``, instead of refusing them.
    """
    device = network_dtype_device(posterior.network)[1]

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        if link_approx == "mc":
            samples = posterior.sample(x, n_samples, generator)
            noise = symmetric_normal(n_samples, (len(x), samples.shape[2]), samples, generator)
            return samples.transpose(0, 1).float(), noise.transpose(0, 1).float()
        gaussian: Gaussian = posterior(x)
        return gaussian.mean.double(), gaussian.variance.clamp(max=_LARGEST)

    known = None if watch is None else watch.cpu()

    def shard() -> tuple[int, Any, int]:
        """The largest number of examples that fits memory, those kept, and how many were known."""
        batches: Iterable[tuple[Tensor, Tensor | None]]
        if likelihood is None:
            every = inputs(loader, progress=progress, description=description)
            batches = ((x, None) for x in every)
        elif optional:
            batches = inputs_and_targets(loader, progress=progress, description=description)
        else:
            batches = labelled(loader, progress=progress, description=description)
        kept: Reservoir | None = None
        watched, columns = 0, 0
        for number, (batch, target) in enumerate(batches):
            x = on_device(batch, device)
            check_batch(number, x, posterior.network, shape)
            if len(x) == 0:
                continue
            if known is not None:
                watched += int(torch.isin(row_keys(batch).cpu(), known).sum())
            (first, second), u = read(x, run)
            good = first.isfinite().flatten(1).all(1) & u[:, 0].isfinite()
            if not bool(good.all()):
                if not keep_overflowed:
                    raise ValueError(
                        f"{description}: the network overflows on batch {number}; leave out "
                        "examples that far away, where every sigma2 predicts the same"
                    )
                first = torch.where(good[:, None], first, 0.0)
                second = torch.where(good[:, None], second, 0.0)
            rows = [torch.where(good[:, None], u.clamp(max=_LARGEST), torch.inf), first, second]
            if target is not None:
                rows.append(check_target(target, first, str(likelihood), number).to(first.device))
            if kept is None:
                size = sum(t[:1].numel() * t.element_size() for t in rows)
                limit = max(1, _BYTES // size)
                kept = Reservoir(limit if at_most is None else min(limit, at_most))
                columns = len(rows)
            if len(rows) != columns:
                raise ValueError(
                    f"{description}: batch {number} {'has' if len(rows) > columns else 'lacks'} "
                    "targets, unlike those before it; yield (x, y) from all batches, or x alone"
                )
            kept.add(x, *rows)
            if stop_after is not None and kept.seen >= stop_after:
                break
        return (0, (0, ()), watched) if kept is None else (kept.size, kept.state, watched)

    shards = together(shard, device)
    everything = Reservoir(max(size for size, _, _ in shards))
    for _, state, _ in shards:
        everything.merge(state)
    if everything.seen == 0:
        raise ValueError(f"{description}: the loader gave only empty batches")
    u, first, second, *rest = everything.items
    target = rest[0] if rest else None
    return Outputs(
        u, first, second, target, everything.seen, sum(watched for _, _, watched in shards)
    )
