"""One pass over the training inputs: coordinates of every representation, and harmless scales.

The scales are set by how far data like the training data lie from it. The training inputs
themselves would be measured too near, since they made the statistics they are measured by: with a
hundred examples and a hundred units by a factor of three. So while there are few examples for each
coordinate, a sample of them is measured by statistics that leave it out, one part of the sample at
a time. Statistics are sums, so those of all but one part need no second pass over the data.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._network.capture import INPUT, capture
from .._network.checks import check_batch, check_logits, check_rows, check_target, not_finite
from .._network.layers import LayerChoice
from .._network.loaders import inputs_and_targets, on_device
from .._network.outputs import outputs_of
from .._network.processes import together
from .._network.reservoir import Reservoir
from .._network.running import evaluating, network_dtype_device
from ..posteriors import Posterior
from ..posteriors.gaussian import Gaussian
from ..residual.collecting import Collector
from ..residual.recipes import ResidualRecipe, Strategy
from ..residual.variance import Residual

__all__ = ["Fitted", "fit"]

# The paper's residual, untuned: all layers together add about this much variance at the 95 %
# quantile of the training data, where the probit then shrinks logits by 2 %.
_UNTUNED_VARIANCE = 0.1
_PAPER_PROBE = 256
# Training inputs that are kept to set scales, and are run through the network once more.
_PROBE = 512
# The onset lies at this quantile of data like the training data, and at twice the strangeness of
# the onset the variance is so many of its units. Chosen on other splits of the sets of the
# experiment `small-data`: high and steep costs no more likelihood at the data than low and flat,
# and protects better far away.
_ONSET_QUANTILE, _KAPPA = 0.98, 6.0
# With so many examples for each coordinate, the training data are measured as other data are.
_ENOUGH = 40
# Parts of the sample that are left out in turn. With two of them, half of a small data set would be
# missing, and distances from what is left would be several times too large. Each part takes the
# eigenvectors of a covariance, so layers of more than 256 units get fewer parts, down to four.
_FOLDS, _FEWEST_FOLDS, _FOLDS_TIMES_UNITS = 20, 4, 20 * 256
# A typical size below this is rounding: the representation never varied.
_LEAST = 1e-12
# Batches between looks at their values on a GPU, which has to wait for each.
_LOOK = 64


@dataclass(frozen=True)
class Fitted:
    """What a fit gives.

    Attributes:
        layers: Names of the representations, the input first.
        shape: Shape of one input.
        residual: The residual.
        keys: Keys of the sample of training inputs, see :func:`rgpr._network.reservoir.row_keys`.
        count: How many training inputs there were.
    """

    layers: list[str]
    shape: torch.Size
    residual: Residual
    keys: Tensor
    count: int


def fit(
    posterior: Posterior,
    choice: LayerChoice,
    recipe: ResidualRecipe,
    likelihood: str,
    train_loader: Iterable[Any],
    r: float,
    progress: bool,
) -> Fitted:
    """Learn a residual from training data; see :meth:`rgpr.RGPR.fit`."""
    if not 0 < r < torch.inf:
        raise ValueError(f"r = {r} must be positive and finite: it scales standard deviations")
    device = network_dtype_device(posterior.network)[1]
    shards = together(
        lambda: _pass(posterior, choice, recipe, likelihood, train_loader, progress), device
    )
    full = [shard for shard in shards if shard["layers"]]
    if sum(shard["probe"][0] for shard in full) < 2:
        raise ValueError("the loader gave fewer than two inputs; nothing can be standardised")
    layers, shape = full[0]["layers"], torch.Size(full[0]["shape"])
    collectors = [Collector(strategy, r) for strategy in _strategies(recipe, layers)]
    probe = Reservoir(_PROBE)
    for shard in full:
        probe.merge(shard["probe"])
        for collector, state in zip(collectors, shard["collectors"], strict=True):
            collector.merge(state)
    residual = Residual([collector.finish() for collector in collectors], combine=recipe.combine)
    _, (keys, x, y) = probe.state
    sample = _Sample(
        posterior,
        layers,
        likelihood,
        x.to(residual.sigma2.device),
        y.to(residual.sigma2.device),
        # In batches that the network is known to take.
        max(shard["batch"] for shard in full),
    )
    if recipe.combine == "sum":
        _set_paper_scales(residual, sample)
    else:
        _set_onset(residual, sample, collectors, probe.seen)
    return Fitted(layers, shape, residual, keys.to(residual.sigma2.device), probe.seen)


def _strategies(recipe: ResidualRecipe, layers: Sequence[str]) -> list[Strategy]:
    return [recipe.input] + [recipe.hidden] * (len(layers) - 1)


def _pass(
    posterior: Posterior,
    choice: LayerChoice,
    recipe: ResidualRecipe,
    likelihood: str,
    train_loader: Iterable[Any],
    progress: bool,
) -> dict[str, Any]:
    """The statistics of one shard."""
    network = posterior.network
    device = network_dtype_device(network)[1]
    layers: list[str] = []
    collectors: list[Collector] = []
    shape: torch.Size | None = None
    probe = Reservoir(_PROBE)
    step = _LOOK if device is not None and device.type == "cuda" else 1
    largest = number = unseen = 0
    with evaluating(network):
        for number, (batch, target) in enumerate(
            inputs_and_targets(train_loader, progress=progress, description="rgpr fit")
        ):
            x = on_device(batch, device)
            check_batch(number, x, network, shape, values=False)
            if len(x) == 0:
                continue
            if shape is None:
                layers = posterior.choose_layers(choice, x)
                collectors = [Collector(strategy) for strategy in _strategies(recipe, layers)]
                shape = x.shape[1:]
            classes = _Classes(likelihood, target, number)
            output = _take_in(posterior, layers, collectors, x, classes)
            # A loader's rows are looked at where they are, while a GPU is at work.
            probe.add(batch, batch, classes.labels_beside(batch))
            largest = max(largest, len(x))
            if probe.seen == len(x) and likelihood == "classification":
                check_logits(output)
            if number + 1 - unseen >= step:
                _check_finite(collectors, layers, unseen, number)
                unseen = number + 1
    if collectors:
        _check_finite(collectors, layers, unseen, number)
    return {
        "layers": layers,
        "shape": list(shape or ()),
        "collectors": [collector.state for collector in collectors],
        "probe": probe.state,
        "batch": largest,
    }


def _take_in(
    posterior: Posterior,
    layers: Sequence[str],
    collectors: Sequence[Collector],
    x: Tensor,
    classes_of: Callable[[Tensor], tuple[Tensor, int]],
) -> Any:
    """Run the network on a batch, add its representations to the statistics, return its output.

    Args:
        posterior: The base.
        layers: Names of the representations.
        collectors: Their statistics.
        x: The batch.
        classes_of: The class of each row and how many there are, from the network's outputs.
    """
    waiting: list[tuple[Collector, Tensor]] = []

    def consume(index: int, h: Tensor) -> None:
        check_rows(layers[index], h, x)
        collector = collectors[index]
        if collector.needs_classes:
            waiting.append((collector, collector.reduce(h)))
        else:
            collector.update(collector.reduce(h), None, 1)

    consume(0, x)
    with capture(posterior.network, layers, consume):
        output = posterior.network(x.clone())  # it may change its input in place
    if waiting:
        y, classes = classes_of(outputs_of(output, x))
        for collector, h in waiting:
            collector.update(h, y, classes)
    return output


def _check_finite(
    collectors: Sequence[Collector], layers: Sequence[str], first: int, last: int
) -> None:
    """Refuse sums that became infinite or NaN with one of these batches."""
    finite = torch.stack([collector.total for collector in collectors]).isfinite().tolist()
    if all(finite):
        return
    layer = layers[finite.index(False)]
    which = f"batch {last}" if first >= last else f"one of the batches {first} to {last}"
    if layer == INPUT:
        raise not_finite(which)
    raise ValueError(
        f"{which}: layer '{layer}' gives values that are not finite; the network overflows on its "
        "own training data"
    )


class _Classes:
    """The class of each row of a batch, given the outputs: its label, else the prediction.

    Args:
        likelihood: A regression has one class.
        target: What the loader gave.
        number: Of the batch.
    """

    def __init__(self, likelihood: str, target: Tensor | None, number: int) -> None:
        self._likelihood, self._target, self._number = likelihood, target, number
        self._known: Tensor | None = None

    def __call__(self, outputs: Tensor) -> tuple[Tensor, int]:
        if self._likelihood == "regression":
            return torch.zeros(len(outputs), dtype=torch.long, device=outputs.device), 1
        if self._target is not None and not self._target.is_floating_point():
            try:
                self._known = check_target(self._target, outputs, self._likelihood, self._number)
            except ValueError as error:
                warnings.warn(
                    f"these targets are not classes ({error}); the network's own predictions are "
                    "taken instead",
                    stacklevel=9,
                )
        classes = max(2, outputs.shape[1])
        if self._known is None:
            return _predicted(outputs), classes
        return on_device(self._known, outputs.device), classes

    def labels_beside(self, batch: Tensor) -> Tensor:
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

    posterior: Posterior
    layers: Sequence[str]
    likelihood: str
    x: Tensor
    y: Tensor
    batch: int

    def outputs_and_u(
        self, residual: Residual, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The outputs ``(N, C)`` of a regression, else nothing, and ``u`` ``(N, L)``."""

        def mean(x: Tensor) -> Tensor:
            if self.likelihood == "classification":
                self.posterior.network(x)
                return x.new_zeros(len(x), 0)
            gaussian: Gaussian = self.posterior(x)
            return gaussian.mean

        def read(x: Tensor) -> tuple[Tensor, Tensor]:
            # A network may change its input in place.
            outputs, u = residual.read(self.posterior, self.layers, x.clone(), mean)
            return outputs, torch.stack([residual.unit_variance(0, x), *u], 1)

        parts = [read(x) for x in torch.split(self.x if rows is None else self.x[rows], self.batch)]
        outputs, u = (torch.cat(column) for column in zip(*parts, strict=True))
        return outputs.double(), u

    def with_classes(self) -> _Sample:
        """The same inputs; the network's predictions take the place of labels that are missing."""
        if self.likelihood == "regression" or bool((self.y >= 0).all()):
            return self
        with evaluating(self.posterior.network):
            outputs = [
                outputs_of(self.posterior.network(x.clone()), x)
                for x in torch.split(self.x, self.batch)
            ]
        return replace(self, y=torch.where(self.y < 0, _predicted(torch.cat(outputs)), self.y))

    def collect(self, collectors: Sequence[Collector], rows: Tensor) -> list[Collector]:
        """The statistics of some of the inputs alone, collected as those of all were.

        Their classes have to be known.
        """
        found = [Collector(collector.strategy, collector.r) for collector in collectors]

        def classes_of(outputs: Tensor) -> tuple[Tensor, int]:
            if self.likelihood == "regression":
                return torch.zeros_like(y), 1
            return y, max(2, outputs.shape[1])

        with evaluating(self.posterior.network):
            for part in torch.split(rows, self.batch):
                y = self.y[part]
                _take_in(self.posterior, self.layers, found, self.x[part], classes_of)
        return found


def _set_paper_scales(residual: Residual, sample: _Sample) -> None:
    """Scales that add little at the data; see :meth:`RGPR.fit`."""
    outputs, u = sample.outputs_and_u(residual)
    residual.typical = _typical(u)
    # The first of them are as even a sample as all.
    outputs, u = outputs[:_PAPER_PROBE], u[:_PAPER_PROBE]
    variance = _UNTUNED_VARIANCE * _unit(sample.likelihood, outputs)
    at_data = u.quantile(0.95, dim=0)
    each = variance / len(sample.layers)
    residual.sigma2 = torch.where(at_data > 0, each / at_data, each)
    if sample.likelihood == "regression":
        residual.unit = torch.full_like(residual.unit, variance)


def _set_onset(
    residual: Residual, sample: _Sample, collectors: Sequence[Collector], count: int
) -> None:
    """The typical size of every ``u``, scales in these units, and where the variance sets in."""
    outputs, u = sample.outputs_and_u(residual)
    units = max(residual.at(i).joint_units for i in range(len(sample.layers)))
    if count < _ENOUGH * units:
        folds = max(_FEWEST_FOLDS, min(_FOLDS, _FOLDS_TIMES_UNITS // units))
        u = _left_out(residual, sample, collectors, u, folds, more=count > len(u))
    residual.typical = _typical(u)
    onset = residual.strangeness(u).quantile(_ONSET_QUANTILE)
    slope = _KAPPA / onset if float(onset) > 0 else torch.ones_like(onset)
    scales = torch.where(residual.typical > 0, residual.typical, 1.0)
    residual.sigma2 = slope / scales
    assert residual.onset is not None
    residual.onset = slope * onset
    if sample.likelihood == "regression":
        variance = _UNTUNED_VARIANCE * _unit("regression", outputs)
        residual.unit = torch.full_like(residual.unit, variance)


def _typical(u: Tensor) -> Tensor:
    """The median of each ``u``, or its mean where an offset makes most of them zero; ``(L,)``."""
    median = u.median(0).values
    typical = torch.where(median > 0, median, u.mean(0))
    return torch.where(typical > _LEAST, typical, 0.0)


def _left_out(
    residual: Residual,
    sample: _Sample,
    collectors: Sequence[Collector],
    u: Tensor,
    folds: int,
    *,
    more: bool,
) -> Tensor:
    """``u`` of the sample, each part of it by statistics of all training data but that part.

    Rows of a class that has no other example are left out of the result: nothing tells how far
    from its class such a row would be.

    Args:
        residual: By statistics of all training data.
        sample: Some of these data.
        collectors: The statistics.
        u: Of the sample, by the residual.
        folds: How many parts there are.
        more: Whether there are training data that are not in the sample.
    """
    found, known = torch.empty_like(u), torch.ones(len(u), dtype=torch.bool, device=u.device)
    sample = sample.with_classes()
    parts = _folds(sample.y, folds)
    own = [sample.collect(collectors, rows) for rows in parts]
    rests = [
        _all_but_each(collector, column, more)
        for collector, column in zip(collectors, zip(*own, strict=True), strict=True)
    ]
    for rows, others in zip(parts, zip(*rests, strict=True), strict=True):
        coordinates = [collector.finish() for collector in others]
        for one, of_all in zip(coordinates, residual.coordinates, strict=True):
            one.offset = of_all.offset
        found[rows] = sample.outputs_and_u(Residual(coordinates), rows)[1]
        for rest, everything in zip(others, collectors, strict=True):
            known[rows] &= _has_class(rest, everything, sample.y[rows])
    return found[known] if bool(known.any()) else found


def _folds(y: Tensor, folds: int) -> list[Tensor]:
    """Indices of the rows in parts of about one size, the rows of each class spread over them."""
    order = y.argsort(stable=True)
    folds = min(folds, len(y))
    return [order[first::folds] for first in range(folds)]


def _all_but_each(everything: Collector, parts: Sequence[Collector], more: bool) -> list[Collector]:
    """The statistics of all training data but each part of the sample.

    Args:
        everything: The statistics of all of them.
        parts: Those of every part.
        more: Whether there are training data that are not in the sample.
    """
    if more:
        rests = [copy.deepcopy(everything) for _ in parts]
        for rest, part in zip(rests, parts, strict=True):
            rest.merge(part.state, sign=-1)
        return rests
    # Sums of the parts before and after each: where one of them holds a huge value, taking it out
    # of a sum would leave no digits.
    before, after = _running(everything, parts), _running(everything, parts[::-1])[::-1]
    for rest, later in zip(before, after, strict=True):
        rest.merge(later.state)
    return before


def _running(like: Collector, parts: Sequence[Collector]) -> list[Collector]:
    """For each part the statistics of those before it."""
    found = [Collector(like.strategy, like.r)]
    for part in parts[:-1]:
        total = copy.deepcopy(found[-1])
        total.merge(part.state)
        found.append(total)
    return found


def _has_class(others: Collector, everything: Collector, y: Tensor) -> Tensor:
    """Which rows have a class that others have too, ``(B,)``."""
    if everything.classes is None or not everything.needs_classes or others.classes is None:
        return torch.ones(len(y), dtype=torch.bool, device=y.device)
    counts = others.classes.counts.to(y.device)
    return counts[y] > 0


def _unit(likelihood: str, outputs: Tensor) -> float:
    """The variance of a regression's outputs, or one."""
    if likelihood == "classification":
        return 1.0
    return float(outputs.var(0, correction=0).mean()) or 1.0
