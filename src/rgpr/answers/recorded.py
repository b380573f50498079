"""Plain calls whose small operations are recorded, where a device can record.

The network runs as it always does, with all its hooks. What comes after its pass (distances of the
input and the layers, the variance, the probabilities) are some dozens of small operations, which
take longer to launch than to run. So the first calls of a size are made as they are, and then these
operations are recorded (:mod:`rgpr._backend.recording`). Hooks put what is read of the network
where the recording reads it.

The recorded functions are those of the plain path. One thing differs: which rows are finite is
found out after the pass, so the network gets zeros for values that are not, and not for whole rows.
The answer of such a row is the same, because it does not depend on what the network gives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._backend.arithmetic import few_rows, pooled
from .._backend.consistency import Consistency
from .._backend.recording import (
    MOST_MADE,
    Places,
    Recorder,
    Recording,
    RecordingError,
    Sizes,
    buffers_like,
    may_record,
    out_of_memory,
    recorder_of,
    warn_once,
)
from .._network.checks import check_input
from .._network.guards import evaluating, in_evaluation
from .._network.running import capture, standing
from ..extension import Extension, Reading, together
from ..posteriors.base import Closed
from ..residual.coordinates import Coordinates
from ..residual.prototypes import Prototypes
from .probabilities import answer

__all__ = ["RecordedCalls"]

# So many calls of a size are made as they are.
_FIRST = 2
# Larger inputs keep a GPU busy by themselves, and their copies would take memory.
_MOST_NUMBERS = 1 << 23
# Torch takes means of so many numbers as fast as our kernel does, and writes them where it is told.
_FEW_NUMBERS = 1 << 22


class RecordedCalls:
    """The recorded calls of one model; copies of the model have none."""

    def __init__(self) -> None:
        self._parts: _Parts | None = None
        self._by_form: dict[Any, _Passage] = {}
        self._forms, self._made = Sizes(_FIRST), 0

    def __reduce__(self) -> tuple[type[RecordedCalls], tuple[()]]:
        return RecordedCalls, ()

    def anew(self) -> RecordedCalls:
        """Recorded calls without recordings, to take the place of these."""
        if self._parts is not None:
            self._parts.recorder.finish()
        return RecordedCalls()

    def __call__(self, extension: Extension, x: Any) -> Any:
        """The answer of a plain call, or ``None`` if it has to be made as it is."""
        if torch.compiler.is_compiling() or not isinstance(x, Tensor):
            return None
        recorder = recorder_of(x.device)
        if recorder is None or not may_record(x) or not self._suits(extension, x):
            return None
        form = (x.shape, x.stride(), x.dtype)
        known = form in self._by_form
        if not known and not self._forms.wanted(form, len(self._by_form), self._made):
            return None
        with recorder.turn() as mine:
            if not mine:
                return None
            return self._answer(recorder, extension, form, x)

    def _suits(self, extension: Extension, x: Tensor) -> bool:
        first = extension.representations[0]
        return (
            x.dim() > 1
            and len(x) > 0
            and few_rows(x)
            and x.numel() <= _MOST_NUMBERS
            and extension.nan == "propagate"
            and first.plain
            and first.source is None
            # Replicas of DataParallel share this object, and live for one call.
            and "_is_replica" not in vars(extension.posterior.network)
            and not nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
        )

    def _answer(self, recorder: Recorder, extension: Extension, form: Any, x: Tensor) -> Any:
        """The answer by what was recorded for this size, or is now; ``None`` if that cannot be.

        Raises:
            TypeError: ``x`` has a dtype that the network does not take.
            ValueError: ``x`` has the wrong shape or device.
        """
        parts, passage = self._parts, self._by_form.get(form)
        if parts is None or not parts.are_of(extension):
            # What has changed may change again, so the count begins anew.
            if self._by_form:
                recorder.finish()
            fresh = parts is None
            self._by_form, passage = {}, None
            self._parts = parts = _Parts(recorder, extension)
            if not fresh:
                self._forms = Sizes(_FIRST)
                self._forms.wanted(form, 0, self._made)
                return None
        if not parts.on(x.device) or not parts.look():
            return None
        if passage is not None and passage.valid:
            return passage(x)
        if self._made >= MOST_MADE:
            return None
        # Sizes are counted before anything is known of an input, so this one may not fit.
        check_input(x, extension.posterior.network, extension.input_shape)
        try:
            passage = _Passage(recorder, parts, x)
        except RuntimeError as error:
            # The plain call raises errors of the network itself, and memory may suffice later.
            self._by_form.pop(form, None)
            self._forms.forget(form)
            if isinstance(error, RecordingError) and not out_of_memory(error):
                self._made = MOST_MADE
                warn_once(error)
            return None
        self._made += 1
        self._by_form[form] = passage
        return passage.answer()


class _Parts:
    """The parts of a model that recordings were made of.

    Args:
        recorder: What records.
        extension: The parts as they are now.
    """

    def __init__(self, recorder: Recorder, extension: Extension) -> None:
        self.recorder, self.extension, self.pool = recorder, extension, recorder.pool()
        posterior, residual = extension.posterior, extension.residual
        self.closed: Closed | None = None
        # The pass runs the network alone, so the modes of its modules are all that matters.
        self.network: list[nn.Module] = list(posterior.network.modules())
        networks = set(self.network)
        every = [*posterior.modules(), *residual.modules()]
        own = [module for module in every if module not in networks]
        self._consistency = Consistency(every)
        self._hooks = [t for m in own for t in (m._forward_hooks, m._forward_pre_hooks)]
        tensors = [t for m in own for t in (*m._parameters.values(), *m._buffers.values())]
        known = [t for t in tensors if t is not None]
        self._places = Places([*known, extension.temperature])
        self._devices = {t.device for t in (*known, extension.temperature)}
        self.packed = residual.pack()

    def are_of(self, extension: Extension) -> bool:
        """Whether these are still the parts, in the same memory."""
        mine = self.extension
        return (
            mine.posterior is extension.posterior
            and mine.residual is extension.residual
            and mine.temperature is extension.temperature
            and mine.representations is extension.representations
            and mine.likelihood is extension.likelihood
            and not self._consistency.changed
            and self._places.same
            and (self.packed is None or self.packed.is_current)
        )

    def look(self) -> bool:
        """Find out what follows the pass now, and return whether it can be recorded.

        Methods and hooks may have been put in place since the last call, or taken away. A recording
        would run no hooks.
        """
        self.closed = self.extension.posterior._closed
        return self.closed is not None and not any(self._hooks)

    def on(self, device: torch.device) -> bool:
        """Whether all tensors are on this device."""
        return self._devices == {device}


class _Passage:
    """A plain call for batches of one size: the network's pass, and a recording.

    To make one runs the network once, on ``x``, and :meth:`answer` is the answer of that pass.

    Args:
        recorder: What records; this thread has its turn.
        parts: The parts of the model.
        x: A batch of the size.
    """

    def __init__(self, recorder: Recorder, parts: _Parts, x: Tensor) -> None:
        extension, closed = parts.extension, parts.closed
        assert closed is not None
        self._parts, self._posterior = parts, extension.posterior
        network, layers = extension.posterior.network, extension.representations
        [self._own] = buffers_like([x])
        packed = {} if parts.packed is None else parts.packed.layers
        self._measures = [
            _measure_of(extension.residual.at(index), index in packed)
            for index in range(len(layers))
        ]
        # One pass shows which forms all that is read has.
        head = None if closed.head is None else network.get_submodule(closed.head)
        takes: list[Any] = [measure[0] for measure in self._measures]
        reading = capture(network, layers, takes, x, head)
        with evaluating(self._posterior) as modes, modes, reading, reading:
            mean = self._posterior.point(_without_strange(x))
        self._read = buffers_like(reading.found[1:])
        self._outputs = buffers_like(_detached(closed.given(mean, reading.features)))
        puts: list[Any] = [_nothing]
        # Indices of representations that did not fit their buffers in the last pass.
        self._differs: list[int] = []
        for index, buffer in enumerate(self._read, start=1):
            coordinates, measure = extension.residual.at(index), self._measures[index][0]
            pools = isinstance(coordinates, Prototypes) and coordinates.of == "pooled"
            puts.append(partial(_put, pools, measure, buffer, partial(self._differs.append, index)))
        self._reading = standing(network, layers, puts, self._own, head)
        inputs = (self._own, *self._read, *self._outputs)
        self._after = Recording(recorder, self._leave, inputs, parts.pool)

    @property
    def valid(self) -> bool:
        """Whether operations still do what they did when they were recorded."""
        return self._after.valid

    def __call__(self, x: Tensor) -> Any:
        """The answer, or ``None`` if the network gives other forms than before."""
        self._own.copy_(x)
        clean = _without_strange(x)
        reading = self._reading.again()
        self._differs.clear()
        if in_evaluation(self._parts.network):
            with reading, reading:
                mean = self._posterior.point(clean)
        else:
            with evaluating(self._posterior) as modes, modes, reading, reading:
                mean = self._posterior.point(clean)
        for buffer, tensor in zip(self._outputs, self._given(mean), strict=True):
            if tensor.shape != buffer.shape or tensor.dtype != buffer.dtype:
                return None
            buffer.copy_(tensor)
        return None if self._differs else self.answer()

    def answer(self) -> Any:
        """The answer for the batch that the network ran on last."""
        self._after.replay()
        return self._after.copies()

    def _given(self, mean: Tensor) -> tuple[Tensor, ...]:
        """What the posterior makes its Gaussian of."""
        closed, seen = self._parts.closed, self._reading.features
        self._reading.features = []  # nothing is kept of a pass
        assert closed is not None
        return _detached(closed.given(mean, seen))

    def _leave(self, x: Tensor, *tensors: Tensor) -> Any:
        """What comes after the pass: the answer."""
        extension, packed, closed = self._parts.extension, self._parts.packed, self._parts.closed
        assert closed is not None
        count = len(self._read)
        first = extension.residual.at(0).unit_variance(x)
        columns = [first]
        for index, read in enumerate(tensors[:count], start=1):
            columns.append(self._measures[index][1](read))
        finite = first.abs() < torch.inf
        u = torch.where(finite[:, None], together(columns, packed), first[:, None])
        gaussian = closed.gaussian(*tensors[count:])
        return answer(extension, Reading(gaussian, u, x.dtype))


_Measure = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def _measure_of(coordinates: Coordinates, packed: bool) -> _Measure:
    """What is done with a representation in the pass, and what is left for after it."""
    if isinstance(coordinates, Prototypes) and (packed or coordinates.of != "raw"):
        return coordinates.rows, _itself if packed else coordinates.of_rows
    return coordinates.unit_variance, _itself


def _put(
    pools: bool,
    measure: Callable[[Tensor], Tensor],
    buffer: Tensor,
    differs: Callable[[], None],
    h: Tensor,
) -> None:
    """Write what is read of a representation where a recording reads it, if it fits there."""
    h = h.detach()
    if pools and h.dim() > 2 and h.numel() <= _FEW_NUMBERS and h.shape[:2] == buffer.shape:
        torch.mean(h, tuple(range(2, h.dim())), dtype=buffer.dtype, out=buffer)
        return
    if pools:
        measure = pooled if h.dim() > 2 else _itself
    read = measure(h)
    if read.shape == buffer.shape:
        buffer.copy_(read)
    else:
        differs()


def _without_strange(x: Tensor) -> Tensor:
    """A copy with zeros for values that are not finite, which the network may change or keep."""
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


def _detached(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same without gradients, which a network may ask for and no recorded answer has."""
    return tuple(tensor.detach() for tensor in tensors)


def _itself(column: Tensor) -> Tensor:
    return column


def _nothing(_: Tensor) -> None:
    return None
