"""One pass over the training inputs: coordinates of every representation.

A sample of the inputs is kept on the way, by which the scales are set: see
:mod:`rgpr.extension.scales`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._network import batches
from .._network.checks import check_batch, network_dtype_device, not_finite
from .._network.guards import evaluating
from .._network.kept import Form, Kept, form_of
from .._network.layers import LayerChoice, stand_in
from .._network.loaders import inputs_and_targets, on_device
from .._network.masks import noting
from .._network.outputs import outputs_of
from .._network.processes import active, together
from .._network.representation import INPUT, Representation, parse_layer
from .._network.reservoir import Reservoir
from .._network.running import capture
from .._network.sources import check_no_pair
from .._network.trace import Trace
from ..likelihoods import Likelihood
from ..posteriors import Posterior
from ..posteriors.gaussian import Gaussian
from ..residual.collecting import Collector
from ..residual.recipes import ResidualRecipe, Strategy
from ..residual.variance import Residual
from .scales import Sample, set_onset, set_paper_scales

__all__ = ["Fitted", "Plan", "fit"]

# Training inputs that are kept to set scales, and are run through the network once more.
_PROBE = 512
# Rows for which a base is asked how many outputs it has, if its network does not say.
_LOOKED_AT = 16
# Batches between looks at their values on a GPU.
_LOOK = 64


@dataclass(frozen=True)
class Plan:
    """What is to be fitted.

    Attributes:
        posterior: The base.
        choice: Which representations are read.
        recipe: In which coordinates they are measured.
        likelihood: What the outputs stand for.
        r: Factor on the standard deviations.
        source: The module whose output stands in for the input.
    """

    posterior: Posterior
    choice: LayerChoice
    recipe: ResidualRecipe
    likelihood: Likelihood
    r: float = 1.0
    source: str | None = None

    def choose(self, x: batches.Batch, seen: Trace | None = None) -> list[Representation]:
        """The representations that are read, the input first.

        Args:
            x: Inputs.
            seen: What the posterior's ``look`` gave for them, if it was called already.
        """
        if seen is None and self.source is not None:
            seen = self.posterior.look(x)
        first, *others = self.posterior.choose_layers(self.choice, x, seen)
        if seen is not None and self.source is not None:
            network = self.posterior.network
            first, module = stand_in(seen, self.source), network.get_submodule(self.source)
            for each in others.copy():
                name, number, goes_in = parse_layer(each.name)
                # What stands in for the input is no other layer, by none of its names.
                if network.get_submodule(name) is module and number in ("", "0") and not goes_in:
                    others.remove(each)
        elif self.recipe.input.of == "raw":
            first = replace(first, channel=1)  # every entry is a unit, in the order of the input
        return [first, *others]

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
        outputs: How many outputs the base has.
        labelled: Whether any batch had targets.
    """

    layers: list[Representation]
    shape: batches.Shape
    residual: Residual
    keys: Tensor
    count: int
    outputs: int
    labelled: bool


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
    keys, *columns, y = (t.to(residual.sigma2.device) for t in probe.state[1])
    # In batches that the network is known to take.
    sample = Sample(
        plan.posterior, plan.likelihood, layers, Kept(seen.form, columns), y, seen.largest
    )
    if plan.recipe.combine == "sum":
        set_paper_scales(residual, sample)
    else:
        set_onset(residual, sample, collectors, probe.seen)
    return Fitted(
        layers, seen.shape, residual, keys, probe.seen, seen.outputs, True in seen.labelled
    )


# -- the pass ------------------------------------------------------------------------------------


def _shape_of(x: batches.Batch) -> str:
    if isinstance(x, Tensor):
        return f"({', '.join(['B', *map(str, x.shape[1:])])})"
    return str(batches.mapped(x, lambda part: ("B", *part.shape[1:])))


class _Pass:
    """The statistics of one process's share of the data.

    Attributes:
        layers: The representations; none before the first batch.
        collectors: Statistics of each.
        shape: Shape of one input.
        form: The form of a batch of inputs.
        probe: A sample of the inputs, with labels or -1.
        largest: Size of the largest batch.
        outputs: The number of the base's outputs.
        labelled: Whether batches had targets: ``True``, ``False``, or both if they differ.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.device = network_dtype_device(plan.posterior.network)[1]
        # Looking at a value means waiting for a GPU, so it is done once in a while there.
        self._waits = self.device is not None and self.device.type == "cuda"
        self.layers: list[Representation] = []
        self.collectors: list[Collector] = []
        self.shape: batches.Shape = torch.Size()
        self.form: Form = None
        self.probe = Reservoir(_PROBE)
        self.largest = self.outputs = self._unseen = self._classes = 0
        self.labelled: set[bool] = set()

    @classmethod
    def of_shards(cls, plan: Plan, shards: Sequence[dict[str, Any]]) -> _Pass:
        """The statistics of all processes together."""
        merged = cls(plan)
        for shard in shards:
            if shard["layers"]:
                merged._start(shard["layers"], shard["shape"], shard["form"])
                merged.probe.merge(shard["probe"])
                merged.largest = max(merged.largest, shard["batch"])
                merged.outputs = shard["outputs"]
                merged.labelled |= shard["labelled"]
                for collector, state in zip(merged.collectors, shard["collectors"], strict=True):
                    collector.merge(state)
        return merged

    def over(self, train_loader: Iterable[Any], progress: bool) -> dict[str, Any]:
        """Take in all batches; with several processes, give what the shards are merged by."""
        network, number = self._plan.posterior.network, 0
        look = {"values": not self._waits, "measured": self._plan.source is None}
        with evaluating(network) as modes, modes:
            for number, (batch, target) in enumerate(
                inputs_and_targets(train_loader, network, progress=progress, description="rgpr fit")
            ):
                x = on_device(batch, self.device)
                check_batch(number, x, network, self.shape or None, **look)
                like = batch if isinstance(batch, Tensor) else batches.first_part(batch)
                if len(like) == 0:
                    continue
                try:
                    classes = self._take_in(number, x, target)
                except RuntimeError as error:
                    if self.layers:
                        raise
                    raise RuntimeError(
                        f"the network cannot run on inputs of shape {_shape_of(x)}: {error}"
                    ) from error
                self.labelled.add(target is not None)
                if self._classes == 1:
                    check_no_pair(train_loader, self.outputs)
                if classes is None:
                    classes = torch.full((len(like),), -1)
                # A loader's rows are looked at where they are, while a GPU is at work.
                plain = batch is like and like.is_floating_point()
                columns = [like] if plain else Kept.columns_of(batch)
                self.probe.add(batch, *columns, classes.to(like.device))
                if self._waits and number + 1 - self._unseen >= _LOOK:
                    self._check_sums(number)
        if self.collectors:
            self._check_sums(number)
        if len(self.labelled) > 1 and self._classes > 1:
            warnings.warn(
                "some batches have targets and others have none; where there is none, the "
                "network's own predictions are taken. Yield (x, y) from all batches, or x alone",
                stacklevel=2,
            )
        if not active():
            return {}
        return {
            "layers": self.layers,
            "shape": self.shape,
            "form": self.form,
            "collectors": [collector.state for collector in self.collectors],
            "probe": self.probe.state,
            "batch": self.largest,
            "outputs": self.outputs,
            "labelled": self.labelled,
        }

    def _start(self, layers: list[Representation], shape: batches.Shape, form: Form) -> None:
        if not self.layers:
            self.layers, self.shape, self.form = layers, shape, form
            self.collectors = self._plan.collectors(len(layers))

    def _take_in(self, number: int, x: batches.Batch, target: Tensor | None) -> Tensor | None:
        """Run the network on a batch, and add its representations to the statistics.

        Returns:
            The classes of its rows, ``(B,)``, if the targets say them.
        """
        posterior, first = self._plan.posterior, not self.layers
        likelihood, network = self._plan.likelihood, posterior.network
        form = None if isinstance(x, Tensor) else form_of(x)
        if first:
            shape = x.shape[1:] if isinstance(x, Tensor) else batches.shape_of(network, x)
            free = self._plan.source is not None and form is None
            self._start(self._plan.choose(x), {} if free else shape, form)
        if form != self.form:
            before = f"and those before it {self.form}; yield batches of one form"
            raise ValueError(f"batch {number} has the parts {form} {before}")
        takes = [c.rows_of if c.needs_classes else c.take for c in self.collectors]
        mask, lengths = None, dict[str, int]()
        if first and form is not None:
            mask = batches.unmasked(network, x)
        if mask is not None:
            hidden = zip(self.layers[1:], takes[1:], strict=True)
            takes[1:] = [noting(lengths, layer.name, take) for layer, take in hidden]
        reading = capture(network, self.layers, takes, x)
        with reading, reading:
            # The network may change its input in place.
            clone = x.clone() if isinstance(x, Tensor) else batches.copied(x)
            output = network(clone) if form is None else batches.run(network, clone)
        if mask is not None:
            mask.warn_of(lengths)
        rows = len(x) if form is None else batches.rows_of(x)
        if first:
            self.outputs = self._checked_outputs(output, x)
        if target is not None:
            target = likelihood.target(target, (rows, self.outputs), number)
        if first:
            self._classes = likelihood.classes(self.outputs)
        classes = target if self._classes > 1 else None
        if any(collector.needs_classes for collector in self.collectors):
            y, count = self._classes_of(classes, output, x)
            for collector, h in zip(self.collectors, reading.found, strict=True):
                if collector.needs_classes:
                    collector.update(h, y, count)
        self.largest = max(self.largest, rows)
        # The input was looked at before.
        for layer, h in zip(self.layers[1:], reading.found[1:], strict=True):
            if not self._waits and not bool(h.isfinite().all()):
                self._refuse(layer.name, f"batch {number}")
        return classes

    def _classes_of(
        self, known: Tensor | None, output: Any, x: batches.Batch
    ) -> tuple[Tensor, int]:
        """The class of each row, its label or else the prediction, and the number of classes."""
        like = x if isinstance(x, Tensor) else batches.first_part(x)
        if known is not None:
            return known.to(like.device, non_blocking=True), self._classes
        if self._classes == 1:
            return torch.zeros(len(like), dtype=torch.long, device=like.device), 1
        outputs = outputs_of(output, x, self._plan.posterior.output)
        likelihood = self._plan.likelihood
        return likelihood.predicted(outputs), likelihood.classes(outputs.shape[1])

    def _checked_outputs(self, output: Any, x: batches.Batch) -> int:
        """The number of the base's outputs, once they are known to be what they should be."""
        posterior = self._plan.posterior
        if posterior.mean_parts() is None:  # what its network returns may be features
            outputs = self._outputs_of_few(x)
        else:
            outputs = outputs_of(output, x, posterior.output)
        self._plan.likelihood.check_outputs(outputs, lambda: self._outputs_of_few(x))
        return outputs.shape[1]

    def _outputs_of_few(self, x: batches.Batch) -> Tensor:
        """The base's outputs for a few rows, from a pass of their own."""
        posterior = self._plan.posterior
        x = batches.mapped(x, lambda part: part[:_LOOKED_AT].clone())
        with evaluating(posterior) as modes, modes:
            if posterior.mean_parts() is None:
                gaussian: Gaussian = posterior(x)
                return gaussian.mean
            return outputs_of(batches.run(posterior.network, x), x, posterior.output)

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
