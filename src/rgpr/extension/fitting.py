"""One pass over the training inputs: coordinates of every representation, and harmless scales.

The scales are set by how far data like the training data lie from it, as a sample of the training
inputs shows. While there are few examples for each coordinate, every input of the sample is
measured by statistics that leave it out, see :mod:`rgpr.residual.leave_one_out`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._network.checks import (
    check_batch,
    check_logits,
    check_target,
    network_dtype_device,
    not_finite,
)
from .._network.layers import LayerChoice
from .._network.loaders import inputs_and_targets, on_device
from .._network.outputs import outputs_of
from .._network.processes import active, together
from .._network.representation import INPUT, Representation
from .._network.reservoir import Reservoir
from .._network.running import capture, evaluating
from ..posteriors import Posterior
from ..posteriors.gaussian import Gaussian
from ..residual.collecting import Collector
from ..residual.recipes import ResidualRecipe, Strategy
from ..residual.variance import AT_TWICE_THE_ONSET, Residual

__all__ = ["Fitted", "Plan", "fit"]

# The paper's residual, untuned: all layers together add about this much variance at the 95 %
# quantile of the training data, where the probit then shrinks logits by 2 %.
_UNTUNED_VARIANCE = 0.1
_PAPER_PROBE = 256
# Training inputs that are kept to set scales, and are run through the network once more.
_PROBE = 512
# The onset lies at this quantile of data like the training data.
_ONSET_QUANTILE = 0.98
# With so many examples for each coordinate, the training data are measured as other data are.
_ENOUGH = 40
# A typical size below this is rounding: the representation never varied.
_LEAST = 1e-12
# Batches between looks at their values on a GPU.
_LOOK = 64


@dataclass(frozen=True)
class Plan:
    """What is to be fitted.

    Attributes:
        posterior: The base.
        choice: Which representations are read.
        recipe: In which coordinates they are measured.
        likelihood: ``"classification"`` or ``"regression"``.
        r: Factor on the standard deviations.
    """

    posterior: Posterior
    choice: LayerChoice
    recipe: ResidualRecipe
    likelihood: str
    r: float = 1.0

    def choose(self, x: Tensor) -> list[Representation]:
        """The representations that are read, the input first."""
        found = self.posterior.choose_layers(self.choice, x)
        # Where every entry is a unit, no order of the axes is better than the one in memory.
        return [
            replace(each, channel=1, token=None) if strategy.of == "raw" else each
            for each, strategy in zip(found, self._strategies(len(found)), strict=True)
        ]

    def collectors(self, layers: int) -> list[Collector]:
        """Statistics of so many representations, with nothing in them yet."""
        return [Collector(strategy, self.r) for strategy in self._strategies(layers)]

    def _strategies(self, layers: int) -> list[Strategy]:
        return [self.recipe.input] + [self.recipe.hidden] * (layers - 1)


@dataclass(frozen=True)
class Fitted:
    """What a fit gives.

    Attributes:
        layers: The representations, the input first.
        shape: Shape of one input.
        residual: The residual.
        keys: Keys of the sample of training inputs, see :func:`rgpr._network.reservoir.row_keys`.
        count: How many training inputs there were.
    """

    layers: list[Representation]
    shape: torch.Size
    residual: Residual
    keys: Tensor
    count: int


def fit(plan: Plan, train_loader: Iterable[Any], progress: bool) -> Fitted:
    """Learn a residual from training data; see :meth:`rgpr.RGPR.fit`."""
    if not 0 < plan.r < torch.inf:
        raise ValueError(f"r = {plan.r} must be positive and finite: it scales standard deviations")
    seen = _Pass(plan)
    shards = together(lambda: seen.over(train_loader, progress), seen.device)
    if len(shards) > 1:
        seen = _Pass.of_shards(plan, shards)
    if seen.probe.seen < 2:
        raise ValueError("the loader gave fewer than two inputs; nothing can be standardised")
    layers, collectors, probe = seen.layers, seen.collectors, seen.probe
    residual = Residual([c.finish() for c in collectors], combine=plan.recipe.combine)
    _, (keys, x, y) = probe.state
    x, y, keys = (t.to(residual.sigma2.device) for t in (x, y, keys))
    # In batches that the network is known to take.
    sample = _Sample(plan, layers, x, y, seen.largest)
    if plan.recipe.combine == "sum":
        _set_paper_scales(residual, sample)
    else:
        _set_onset(residual, sample, collectors, probe.seen)
    return Fitted(layers, seen.shape, residual, keys, probe.seen)


# -- the pass ------------------------------------------------------------------------------------


class _Pass:
    """The statistics of one process's share of the data.

    Attributes:
        layers: The representations; none before the first batch.
        collectors: Statistics of each.
        shape: Shape of one input.
        probe: A sample of the inputs, with labels or -1.
        largest: Size of the largest batch.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.device = network_dtype_device(plan.posterior.network)[1]
        # Looking at a value means waiting for a GPU, so it is done once in a while there.
        self._waits = self.device is not None and self.device.type == "cuda"
        self.layers: list[Representation] = []
        self.collectors: list[Collector] = []
        self.shape = torch.Size()
        self.probe = Reservoir(_PROBE)
        self.largest = self._unseen = 0

    @classmethod
    def of_shards(cls, plan: Plan, shards: Sequence[dict[str, Any]]) -> _Pass:
        """The statistics of all processes together."""
        merged = cls(plan)
        for shard in shards:
            if shard["layers"]:
                merged._start(shard["layers"], torch.Size(shard["shape"]))
                merged.probe.merge(shard["probe"])
                merged.largest = max(merged.largest, shard["batch"])
                for collector, state in zip(merged.collectors, shard["collectors"], strict=True):
                    collector.merge(state)
        return merged

    def over(self, train_loader: Iterable[Any], progress: bool) -> dict[str, Any]:
        """Take in all batches; with several processes, give what the shards are merged by."""
        network, number = self._plan.posterior.network, 0
        with evaluating(network):
            for number, (batch, target) in enumerate(
                inputs_and_targets(train_loader, progress=progress, description="rgpr fit")
            ):
                x = on_device(batch, self.device)
                check_batch(number, x, network, self.shape or None, values=not self._waits)
                if len(x) == 0:
                    continue
                labels = _Labels(self._plan.likelihood, target, number)
                self._take_in(number, x, labels)
                # A loader's rows are looked at where they are, while a GPU is at work.
                self.probe.add(batch, batch, labels.beside(batch))
                if self._waits and number + 1 - self._unseen >= _LOOK:
                    self._check_sums(number)
        if self.collectors:
            self._check_sums(number)
        if not active():
            return {}
        return {
            "layers": self.layers,
            "shape": list(self.shape),
            "collectors": [collector.state for collector in self.collectors],
            "probe": self.probe.state,
            "batch": self.largest,
        }

    def _start(self, layers: list[Representation], shape: torch.Size) -> None:
        if not self.layers:
            self.layers, self.shape = layers, shape
            self.collectors = self._plan.collectors(len(layers))

    def _take_in(self, number: int, x: Tensor, labels: _Labels) -> None:
        """Run the network on a batch, and add its representations to the statistics."""
        posterior, first = self._plan.posterior, not self.layers
        if first:
            self._start(self._plan.choose(x), x.shape[1:])
        takes = [collector.take for collector in self.collectors]
        with capture(posterior.network, self.layers, takes, x) as found:
            output = posterior.network(x.clone())  # it may change its input in place
        if first and self._plan.likelihood == "classification":
            check_logits(output)
        if any(collector.needs_classes for collector in self.collectors):
            y, classes = labels.of(outputs_of(output, x))
            for collector, h in zip(self.collectors, found, strict=True):
                if collector.needs_classes:
                    collector.update(h, y, classes)
        self.largest = max(self.largest, len(x))
        # The input was looked at before.
        for layer, h in zip(self.layers[1:], found[1:], strict=True):
            if not self._waits and not bool(h.isfinite().all()):
                self._refuse(layer.name, f"batch {number}")

    def _check_sums(self, last: int) -> None:
        """Refuse sums that became infinite or NaN since the last look."""
        first, self._unseen = self._unseen, last + 1
        finite = torch.stack([c.total for c in self.collectors]).isfinite().tolist()
        which = f"batch {last}" if first >= last else f"one of the batches {first} to {last}"
        for layer, good in zip(self.layers, finite, strict=True):
            if not good:
                self._refuse(layer.name, which)

    def _refuse(self, layer: str, which: str) -> None:
        if layer == INPUT:
            raise not_finite(which)
        raise ValueError(
            f"{which}: layer '{layer}' gives values that are not finite; the network overflows on "
            "its own training data"
        )


class _Labels:
    """The class of each row of a batch, given the outputs: its label, else the prediction.

    Args:
        likelihood: A regression has one class.
        target: What the loader gave.
        number: The number of the batch, for errors.
    """

    def __init__(self, likelihood: str, target: Tensor | None, number: int) -> None:
        self._likelihood, self._target, self._number = likelihood, target, number
        self._known: Tensor | None = None

    def of(self, outputs: Tensor) -> tuple[Tensor, int]:
        """The class of each row, and how many classes there are."""
        if self._likelihood == "regression":
            return torch.zeros(len(outputs), dtype=torch.long, device=outputs.device), 1
        if self._target is not None and not self._target.is_floating_point():
            try:
                self._known = check_target(self._target, outputs, self._likelihood, self._number)
            except ValueError as error:
                warnings.warn(
                    f"these targets are not classes ({error}); the network's own predictions are "
                    "taken instead",
                    stacklevel=10,
                )
        classes = max(2, outputs.shape[1])
        if self._known is None:
            return _predicted(outputs), classes
        return self._known.to(outputs.device, non_blocking=True), classes

    def beside(self, batch: Tensor) -> Tensor:
        """The labels that were used, where the batch is; -1 for predictions."""
        if self._known is None:
            return torch.full((len(batch),), -1, device=batch.device)
        return self._known.to(batch.device)


def _predicted(outputs: Tensor) -> Tensor:
    return outputs.argmax(1) if outputs.shape[1] > 1 else (outputs[:, 0] > 0).long()


# -- scales --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sample:
    """Training inputs, their labels or -1, and how to run the network on them."""

    plan: Plan
    layers: Sequence[Representation]
    x: Tensor
    y: Tensor
    batch: int

    def outputs_and_u(self, residual: Residual) -> tuple[Tensor, Tensor]:
        """The outputs ``(N, C)`` and ``u`` ``(N, L)``, by the statistics of all data."""
        outputs, _, columns = self._run([c.unit_variance for c in residual.coordinates])
        return outputs, torch.stack(columns, 1)

    def outputs_and_u_without_each(
        self, residual: Residual, collectors: Sequence[Collector]
    ) -> tuple[Tensor, Tensor]:
        """The same with each input measured by the statistics of all others.

        Rows of a class that has no other example are left out of ``u``: nothing tells how far from
        its class such a row would be.
        """
        without = [collector.without_each() for collector in collectors]
        outputs, y, found = self._run([c.rows_of for c in collectors])
        columns, counted = [], torch.ones_like(y, dtype=torch.bool)
        every: list[Any] = list(residual.coordinates)
        for collector, measure, coordinates, rows in zip(
            collectors, without, every, found, strict=True
        ):
            own = y if collector.needs_classes else torch.zeros_like(y)
            columns.append(measure(rows, own, coordinates.offset))
            counted = counted & measure.counted(own)
        u = torch.stack(columns, 1)
        return outputs, u[counted] if bool(counted.any()) else u

    def _run(self, takes: Sequence[Any]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Outputs, classes, and what was taken from each representation."""
        posterior, regression = self.plan.posterior, self.plan.likelihood == "regression"
        parts = []
        with evaluating(posterior):
            for x in torch.split(self.x, self.batch):
                with capture(posterior.network, self.layers, takes, x) as found:
                    if regression:
                        gaussian: Gaussian = posterior(x.clone())
                        outputs = gaussian.mean
                    else:
                        outputs = outputs_of(posterior.network(x.clone()), x)
                parts.append((outputs, *found))
        outputs, *columns = (torch.cat(column) for column in zip(*parts, strict=True))
        predicted = torch.zeros_like(self.y) if regression else _predicted(outputs)
        return outputs.double(), torch.where(self.y < 0, predicted, self.y), columns


def _set_paper_scales(residual: Residual, sample: _Sample) -> None:
    """Scales that add little at the data; see :meth:`rgpr.RGPR.fit`."""
    outputs, u = sample.outputs_and_u(residual)
    residual.typical = _typical(u)
    # The first of them are as even a sample as all.
    outputs, u = outputs[:_PAPER_PROBE], u[:_PAPER_PROBE]
    variance = _UNTUNED_VARIANCE * _unit(sample.plan.likelihood, outputs)
    at_data = u.quantile(0.95, dim=0)
    each = variance / len(sample.layers)
    residual.sigma2 = torch.where(at_data > 0, each / at_data, each)
    if sample.plan.likelihood == "regression":
        residual.unit = torch.full_like(residual.unit, variance)


def _set_onset(
    residual: Residual, sample: _Sample, collectors: Sequence[Collector], count: int
) -> None:
    """The typical size of every ``u``, scales in these units, and where the variance sets in."""
    every: list[Any] = list(residual.coordinates)
    units = max(coordinates.joint_units for coordinates in every)
    if count < _ENOUGH * units:
        outputs, u = sample.outputs_and_u_without_each(residual, collectors)
    else:
        outputs, u = sample.outputs_and_u(residual)
    residual.typical = _typical(u)
    onset = residual.strangeness(u).quantile(_ONSET_QUANTILE)
    slope = AT_TWICE_THE_ONSET / onset if float(onset) > 0 else torch.ones_like(onset)
    scales = torch.where(residual.typical > 0, residual.typical, 1.0)
    residual.sigma2 = slope / scales
    assert residual.onset is not None
    residual.onset = slope * onset
    if sample.plan.likelihood == "regression":
        variance = _UNTUNED_VARIANCE * _unit("regression", outputs)
        residual.unit = torch.full_like(residual.unit, variance)


def _typical(u: Tensor) -> Tensor:
    """The median of each ``u``, or its mean where an offset makes most of them zero; ``(L,)``."""
    median = u.median(0).values
    typical = torch.where(median > 0, median, u.mean(0))
    return torch.where(typical > _LEAST, typical, 0.0)


def _unit(likelihood: str, outputs: Tensor) -> float:
    """The variance of a regression's outputs, or one."""
    if likelihood == "classification":
        return 1.0
    return float(outputs.var(0, correction=0).mean()) or 1.0
