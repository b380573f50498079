"""Recordings as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
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
        # Libraries keep memory for each stream, which recordings then share.
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
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
        # Other threads may go on with whatever they do.
        with torch.cuda.graph(graph, pool, self._stream, capture_error_mode="thread_local"):
            answers = call()
        return graph.replay, answers

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)


def recorder(device: torch.device) -> CudaRecorder:
    """What records on this GPU."""
    return CudaRecorder(device)
