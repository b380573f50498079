"""Statistics of training inputs, from one pass over them; those of several passes can be merged."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._network import batches
from .._network.checks import check_batch, network_dtype_device, not_finite
from .._network.guards import evaluating
from .._network.kept import Form, Kept, form_of
from .._network.loaders import inputs_and_targets, on_device
from .._network.masks import noting
from .._network.outputs import outputs_of
from .._network.processes import moved
from .._network.representation import INPUT, Representation, names_of
from .._network.reservoir import Reservoir
from .._network.running import capture
from .._network.sources import check_no_pair
from ..posteriors.gaussian import Gaussian
from ..residual.collecting import Collector
from .plan import Plan

__all__ = ["PROBE", "Statistics"]

# Training inputs that are kept to set scales, and are run through the network once more.
PROBE = 512
# Rows for which a base is asked how many outputs it has, if its network does not say.
_LOOKED_AT = 16
# Batches between looks at their values on a GPU.
_LOOK = 64


def _shape_of(x: batches.Batch) -> str:
    if isinstance(x, Tensor):
        return f"({', '.join(['B', *map(str, x.shape[1:])])})"
    return str(batches.mapped(x, lambda part: ("B", *part.shape[1:])))


class Statistics:
    """The statistics of some training inputs.

    Args:
        plan: What they are for.

    Attributes:
        plan: What they are for.
        device: Where the network is.
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
        self.plan = plan
        self.device = network_dtype_device(plan.posterior.network)[1]
        # Looking at a value means waiting for a GPU, so it is done once in a while there.
        self._waits = self.device is not None and self.device.type == "cuda"
        self.layers: list[Representation] = []
        self.collectors: list[Collector] = []
        self.shape: batches.Shape = torch.Size()
        self.form: Form = None
        self.probe = Reservoir(PROBE)
        self.largest = self.outputs = self._unseen = self._classes = self._number = 0
        self.labelled: set[bool] = set()
        self._whole = True

    def read(self, train_loader: Iterable[Any], progress: bool) -> None:
        """Take in all batches of a loader."""
        network = self.plan.posterior.network
        with evaluating(network) as modes, modes:
            for batch, target in inputs_and_targets(
                train_loader, network, progress=progress, description="rgpr fit"
            ):
                self.update(batch, target)
                if self._classes == 1:
                    check_no_pair(train_loader, self.outputs)

    def finish(self) -> None:
        """Refuse sums that are not finite, and warn where only some batches have targets."""
        self._check_whole()
        self.check_sums()
        if len(self.labelled) > 1 and self._classes > 1:
            warnings.warn(
                "some batches have targets and others have none; where there is none, the "
                "network's own predictions are taken. Yield (x, y) from all batches, or x alone",
                stacklevel=2,
            )

    def update(self, batch: batches.Batch, target: Tensor | None) -> None:
        """Take in a batch; the network is in evaluation mode already."""
        self._check_whole()
        network, number = self.plan.posterior.network, self._number
        x = on_device(batch, self.device)
        look = {"values": not self._waits, "measured": self.plan.source is None}
        check_batch(number, x, network, self.shape or None, **look)
        self._number += 1
        like = batch if isinstance(batch, Tensor) else batches.first_part(batch)
        if len(like) == 0:
            return
        if target is not None and self.outputs:  # before anything of the batch is added
            target = self._checked_target(number, target, len(like))
        self._whole = False
        try:
            classes = self._take_in(number, x, target)
        except RuntimeError as error:
            if self.layers or isinstance(error, torch.OutOfMemoryError):
                raise
            raise RuntimeError(
                f"the network cannot run on inputs of shape {_shape_of(x)}: {error}"
            ) from error
        self.labelled.add(target is not None)
        if classes is None:
            classes = torch.full((len(like),), -1)
        # A loader's rows are looked at where they are, while a GPU is at work.
        plain = batch is like and like.is_floating_point()
        columns = [like] if plain else Kept.columns_of(batch)
        self.probe.add(batch, *columns, classes.to(like.device))
        self._whole = True
        if self._waits and self._number - self._unseen >= _LOOK:
            self.check_sums()

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in the statistics of other inputs; see :meth:`state`.

        Raises:
            ValueError: They are of other layers, or of inputs of another shape or form.
        """
        self._check_whole()
        if not state["layers"]:
            return
        layers = [Representation(*each) for each in state["layers"]]
        shape = batches.shape_from_json(state["shape"])
        if self.layers:
            for what, ours, theirs in (
                ("reads the layers", names_of(self.layers), names_of(layers)),
                ("reads the layers by the axes", self.layers, layers),
                ("has inputs of shape", self.shape, shape),
                ("has inputs with the parts", self.form, state["form"]),
                ("has a number of outputs of", self.outputs, state["outputs"]),
            ):
                if ours != theirs:
                    raise ValueError(
                        f"one of the states {what} {ours}, and the other {theirs}; merge states of "
                        "the same kind of data, for the same model"
                    )
        self._whole = False
        if not self.layers:
            self._start(layers, shape, state["form"])
        self.probe.merge(state["probe"])
        self.largest = max(self.largest, state["largest"])
        self.outputs, self._classes = state["outputs"], state["classes"]
        self.labelled |= set(state["labelled"])
        for collector, theirs in zip(self.collectors, state["collectors"], strict=True):
            collector.merge(moved(theirs, self.device))
        self._whole = True

    def state(self, history: bool = False) -> dict[str, Any]:
        """All there is to know of the inputs: tensors and what JSON can hold.

        Args:
            history: Include the keys of all inputs seen, so that copies among later ones are
                recognised.
        """
        self._check_whole()
        self.check_sums()
        fields = [field.name for field in dataclasses.fields(Representation) if field.init]
        return {
            "layers": [[getattr(layer, name) for name in fields] for layer in self.layers],
            "shape": batches.shape_to_json(self.shape),
            "form": self.form,
            "collectors": [collector.state(history) for collector in self.collectors],
            "probe": self.probe.state_and_history if history else self.probe.state,
            "largest": self.largest,
            "outputs": self.outputs,
            "classes": self._classes,
            "labelled": sorted(self.labelled),
        }

    def _check_whole(self) -> None:
        if not self._whole:
            raise RuntimeError(
                "a batch failed half-way, and some of its sums are in and others are not; begin "
                "again with a new state, or load the last one that was saved"
            )

    def _start(self, layers: list[Representation], shape: batches.Shape, form: Form) -> None:
        self.layers, self.shape, self.form = layers, shape, form
        self.collectors = self.plan.collectors(len(layers))

    def _take_in(self, number: int, x: batches.Batch, target: Tensor | None) -> Tensor | None:
        """Run the network on a batch, and add its representations to the statistics.

        Returns:
            The classes of its rows, ``(B,)``, if the targets say them.
        """
        network, first = self.plan.posterior.network, not self.layers
        form = None if isinstance(x, Tensor) else form_of(x)
        if first:
            shape = x.shape[1:] if isinstance(x, Tensor) else batches.shape_of(network, x)
            free = self.plan.source is not None and form is None
            self._start(self.plan.choose(x), {} if free else shape, form)
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
            self._classes = self.plan.likelihood.classes(self.outputs)
            if target is not None:
                target = self._checked_target(number, target, rows)
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

    def _checked_target(self, number: int, target: Tensor, rows: int) -> Tensor:
        return self.plan.likelihood.target(target, (rows, self.outputs), number)

    def _classes_of(
        self, known: Tensor | None, output: Any, x: batches.Batch
    ) -> tuple[Tensor, int]:
        """The class of each row, its label or else the prediction, and the number of classes."""
        like = x if isinstance(x, Tensor) else batches.first_part(x)
        if known is not None:
            return known.to(like.device, non_blocking=True), self._classes
        if self._classes == 1:
            return torch.zeros(len(like), dtype=torch.long, device=like.device), 1
        outputs = outputs_of(output, x, self.plan.posterior.output)
        likelihood = self.plan.likelihood
        return likelihood.predicted(outputs), likelihood.classes(outputs.shape[1])

    def _checked_outputs(self, output: Any, x: batches.Batch) -> int:
        """The number of the base's outputs, once they are known to be what they should be."""
        posterior = self.plan.posterior
        if posterior.mean_parts() is None:  # what its network returns may be features
            outputs = self._outputs_of_few(x)
        else:
            outputs = outputs_of(output, x, posterior.output)
        self.plan.likelihood.check_outputs(outputs, lambda: self._outputs_of_few(x))
        return outputs.shape[1]

    def _outputs_of_few(self, x: batches.Batch) -> Tensor:
        """The base's outputs for a few rows, from a pass of their own."""
        posterior = self.plan.posterior
        x = batches.mapped(x, lambda part: part[:_LOOKED_AT].clone())
        with evaluating(posterior) as modes, modes:
            if posterior.mean_parts() is None:
                gaussian: Gaussian = posterior(x)
                return gaussian.mean
            return outputs_of(batches.run(posterior.network, x), x, posterior.output)

    def check_sums(self) -> None:
        """Refuse sums that became infinite or NaN since the last look."""
        first, last = self._unseen, self._number - 1
        if not self.collectors or last < first:
            return
        finite = torch.stack([c.total for c in self.collectors]).isfinite().tolist()
        which = f"batch {last}" if first >= last else f"one of the batches {first} to {last}"
        for layer, good in zip(self.layers, finite, strict=True):
            if not good:
                self._refuse(layer.name, which)
        self._unseen = self._number  # sums that were refused are looked at again, and refused

    def _refuse(self, layer: str, which: str) -> None:
        if layer == INPUT:
            raise not_finite(which)
        raise ValueError(
            f"{which}: layer '{layer}' gives values that are not finite; the network overflows on "
            "its own training data"
        )
