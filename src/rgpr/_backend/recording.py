"""Calls that are recorded once and replayed, on devices that can do that.

Launching a kernel from Python takes longer than most of our kernels run. A recording holds the
kernels of one call with the addresses of the memory that they read and write, and one launch
replays all of them. So its inputs are copied into memory of its own, and its answers are copied out
of it. It sees values that change in place. If a tensor lies elsewhere than before, the call is
recorded again.

A file ``recording`` in the folder of a device type (:mod:`rgpr._backend.cuda.recording`) knows how
its devices record. Everywhere else, and wherever a call does more than torch operations on plain
tensors, the call is made as it is.

Nothing is recorded unless the environment variable ``RGPR_RECORD`` is 1 when this library is
imported. There are two reasons to ask first. While one thread records, CUDA refuses some of what
other threads may ask of the GPU, and what they allocate or free can end the recording, so a
recording can disturb them. And before torch 2.15 other libraries may free memory that cuBLAS keeps
for a recording. Recordings stay a choice until they were tried with those versions.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .arithmetic import within_transform

__all__ = [
    "MOST",
    "MOST_MADE",
    "Places",
    "Recorder",
    "Recording",
    "RecordingError",
    "Recordings",
    "Sizes",
    "may_record",
    "out_of_memory",
    "recorder_of",
]

# So many sizes of a batch are recorded for one model. Each keeps memory for its inputs and for all
# that its kernels write.
MOST = 8
# Recordings that became invalid are made again, but for one model not more often than this: whoever
# changes a model at every call would wait for recordings alone.
MOST_MADE = 64
# The sizes that came lately, among which those that come again are looked for.
_REMEMBERED = 64
# Whether anything is recorded at all.
_enabled = os.environ.get("RGPR_RECORD") == "1"
# torch's own check of everything global that changes what an operation does: precision of
# products, deterministic algorithms, default dtype, autocast and more.
_Modes: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_Modes = getattr(_Modes, "GlobalStateGuard", None)

Call = Callable[..., Any]


class RecordingError(RuntimeError):
    """A call was not recorded, for the reason that is the cause of this error."""


class Recorder(ABC):
    """What records on one device.

    Recordings of a device may share memory, so a thread replays while it holds the lock, and the
    device does one replay after the other. The lock is never waited for: a thread that does not get
    it makes the call as it is. So a signal handler that predicts in the middle of a replay does not
    wait for itself.
    """

    def __init__(self) -> None:
        # A thread can release this kind of lock without knowing whether it has it.
        self._lock = threading.RLock()
        # Threads that try for their turn or have it. A handler of signals that predicts in between
        # finds its thread here, and does not try.
        self._threads: set[int] = set()

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """Whether this thread may record and replay inside.

        An interrupt at any point leaves the lock free.
        """
        me = threading.get_ident()
        if me in self._threads or not self.ready():
            yield False
            return
        try:
            try:
                self._threads.add(me)
                if not self._lock.acquire(blocking=False):
                    yield False
                    return
                self.follow()
                try:
                    yield True
                finally:
                    self.leave()
            finally:
                self._release(me)
        finally:
            self._release(me)

    def _release(self, me: int) -> None:
        """Release the lock if this thread has it."""
        with suppress(RuntimeError):  # another thread has it, or none
            self._lock.release()
        self._threads.discard(me)

    @abstractmethod
    def ready(self) -> bool:
        """Whether the device can replay what this thread asks for now."""

    @abstractmethod
    def follow(self) -> None:
        """Have the work that this thread gives the device wait for the replay before."""

    @abstractmethod
    def leave(self) -> None:
        """Note where in the work of the device this thread's replays end."""

    @abstractmethod
    def pool(self) -> Any:
        """Memory that recordings of one model share. It is freed when the last of them is."""

    @abstractmethod
    def record(self, call: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
        """Record a call, with memory from the pool.

        Returns:
            A function that replays the call, and the answer of the call, in memory which every
            replay writes anew.
        """

    @abstractmethod
    def finish(self) -> None:
        """Wait for the device, because memory of recordings is about to be freed."""


@cache
def recorder_of(device: torch.device) -> Recorder | None:
    """What records on a device, or ``None`` if nothing does."""
    module = f"{__package__}.{device.type}"
    if not _enabled or _Modes is None or importlib.util.find_spec(module) is None:
        return None
    if importlib.util.find_spec(f"{module}.recording") is None:
        return None
    found: Recorder = importlib.import_module(f"{module}.recording").recorder(device)
    return found


def may_record(x: Tensor) -> bool:
    """Whether a call on this tensor is nothing but operations on plain tensors."""
    return (
        type(x) is Tensor
        and x.layout is torch.strided
        and not x.is_nested
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled(x.device.type)
        and not within_transform()
        and not torch._C._len_torch_dispatch_stack()
        and not torch.are_deterministic_algorithms_enabled()
    )


class Recording:
    """One recorded call.

    Args:
        recorder: What records; this thread has its turn.
        call: The call.
        inputs: Its arguments, in memory that belongs to the recording.
        pool: The memory for everything else.

    Attributes:
        inputs: The same. They are written before a replay.
        answers: What the call returned. A replay writes it anew.
        replay: Replays the call.

    Raises:
        RecordingError: The recorder failed; its error is the cause.
    """

    def __init__(self, recorder: Recorder, call: Call, inputs: Sequence[Tensor], pool: Any) -> None:
        self._modes = _Modes()
        self.inputs = tuple(inputs)
        with torch.inference_mode(False), torch.no_grad():
            try:
                self.replay, self.answers = recorder.record(lambda: call(*self.inputs), pool)
            except RuntimeError as error:
                raise RecordingError(*error.args) from error

    @property
    def valid(self) -> bool:
        """Whether operations still do what they did when they were recorded."""
        return bool(self._modes.check())

    def copies(self) -> Any:
        """The answers in memory of their own."""
        answers = self.answers
        return (
            answers.clone()
            if isinstance(answers, Tensor)
            else type(answers)([answer.clone() for answer in answers])
        )


def buffers_like(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies for a recording, which lie in memory as the tensors do, without gaps."""
    with torch.inference_mode(False), torch.no_grad():
        return tuple(torch.empty_like(tensor).copy_(tensor) for tensor in tensors)


class Places:
    """Where some tensors lie in memory: ``tensor.data`` can be replaced, and the tensor stays."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._addresses = self._now()

    def _now(self) -> list[int]:
        return [*map(Tensor.data_ptr, self._tensors)]

    @property
    def same(self) -> bool:
        return self._now() == self._addresses


class Sizes:
    """Which sizes of a batch come again, of those that came lately.

    Args:
        first: So many calls of a size are made as they are.
    """

    def __init__(self, first: int) -> None:
        self._first = first
        self._counts: dict[Any, int] = {}

    def wanted(self, size: Any, kept: int, made: int) -> bool:
        """Count a call of this size, and return whether to record it now.

        Args:
            size: The size.
            kept: How many sizes are recorded.
            made: How many recordings were made in all.
        """
        if kept >= MOST or made >= MOST_MADE:
            return False
        count = self._counts.pop(size, 0) + 1
        self._counts[size] = count
        if len(self._counts) > _REMEMBERED:
            # A service whose batches differ in size sees most sizes once.
            self._counts.pop(next(iter(list(self._counts))), None)
        return count > self._first

    def forget(self, size: Any) -> None:
        """Count the calls of this size from the beginning."""
        self._counts.pop(size, None)


class Recordings:
    """A call of one tensor, recorded for the first sizes that come twice.

    Args:
        tensors: All other tensors that the call reads. They must stay the same objects.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = list(tensors)
        self._devices = {tensor.device for tensor in tensors}
        self._places: Places | None = None
        self._pool: Any = None
        self._by_size: dict[Any, Recording] = {}
        self._sizes, self._made = Sizes(first=1), 0

    def __call__(self, call: Call, x: Tensor) -> Any:
        """What ``call(x)`` returns, in memory of its own."""
        recorder = recorder_of(x.device)
        if recorder is None or not may_record(x) or self._devices - {x.device}:
            return call(x)
        size = (x.shape, x.stride(), x.dtype)
        known = size in self._by_size
        if not known and not self._sizes.wanted(size, len(self._by_size), self._made):
            return call(x)
        with recorder.turn() as mine:
            if not mine:
                return call(x)
            # Another thread may have recorded this size since the look above.
            made = self._by_size.get(size)
            if made is None or not made.valid or self._places is None or not self._places.same:
                made = self._record(recorder, size, call, x)
            if made is None:
                return call(x)
            made.inputs[0].copy_(x)
            made.replay()
            return made.copies()

    def _record(self, recorder: Recorder, size: Any, call: Call, x: Tensor) -> Recording | None:
        if self._places is not None and not self._places.same:
            recorder.finish()
            self._by_size, self._places = {}, None
        if self._made >= MOST_MADE:
            return None
        try:
            if self._places is None:
                self._places, self._pool = Places(self._tensors), recorder.pool()
            made = Recording(recorder, call, buffers_like([x]), self._pool)
        except RuntimeError as error:
            # Memory may suffice later. Whatever else went wrong would go wrong again.
            self._by_size.pop(size, None)
            self._sizes.forget(size)
            if not out_of_memory(error):
                self._made = MOST_MADE
                warn_once(error)
            return None
        self._made += 1
        self._by_size[size] = made
        return made


def out_of_memory(error: BaseException | None) -> bool:
    """Whether memory did not suffice: the end of a failed recording may raise a second error."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def warn_once(error: Exception) -> None:
    """Say why a call could not be recorded. It is made as it is from now on."""
    if isinstance(error, RecordingError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    said = str(error).partition("\n")[0]
    warnings.warn(
        f"predictions could not be recorded as a CUDA graph ({type(error).__name__}: {said}); they "
        "run without one, which takes longer for small batches",
        stacklevel=2,
    )
