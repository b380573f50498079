"""Recordings as CUDA graphs.

While a thread captures a graph, CUDA refuses some of what other threads ask of the GPU, and what
they do with memory can end the capture. So a capture is short and does not run the network, and
nothing is captured unless a user asks for it; see :mod:`rgpr._backend.recording`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..recording import Recorder

__all__ = ["CudaRecorder", "recorder"]

# A call runs so often before it is recorded: compilers and libraries set up what may not be set up
# while a stream records.
_WARM = 3


class CudaRecorder(Recorder):
    """Records on one GPU, in a stream of its own and into one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device, self._index = torch.device("cuda", index), index
        # Torch hands out the streams of a priority in turn, again and again. Users seldom ask for
        # this priority, so their streams are seldom ours.
        self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        self._last = -1
        self._end = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def ready(self) -> bool:
        return torch.cuda.current_device() == self._index and not (
            torch.cuda.is_current_stream_capturing()
        )

    def follow(self) -> None:
        # The current stream is looked up as a number first, because that is fast.
        number = torch._C._cuda_getCurrentRawStream(self._index)
        if number != self._last:
            torch.cuda.current_stream(self._device).wait_event(self._end)
            self._last = number

    def leave(self) -> None:
        self._end.record()

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def record(self, call: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM):
                call()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # A capture that fails may leave its stream current, so the outer block sets the caller's
        # back. The mode has CUDA refuse less of what other threads do meanwhile.
        with (
            torch.cuda.stream(current),
            _own_workspace(),
            torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local"),
        ):
            answers = call()
        return graph.replay, answers

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)


@contextmanager
def _own_workspace() -> Iterator[None]:
    """Have cuBLAS take its workspace from the pool of the graph that is captured inside.

    A workspace from before may be freed while the graph still writes to it, by whoever clears them
    all. One that lies in the pool stays as long as the graph.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


def recorder(device: torch.device) -> CudaRecorder:
    """What records on this GPU."""
    return CudaRecorder(device)
