"""Modules whose buffers keep their dtype when the network is cast to another one."""

from __future__ import annotations

from torch import nn

__all__ = ["StableBuffers"]


class StableBuffers(nn.Module):
    """A module whose own buffers follow ``.to(device)`` but keep their dtype.

    ``model.half()`` makes the network faster. Statistics in half precision would not be faster,
    but wrong.
    """

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        kept = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in kept.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None:
                self._buffers[name] = buffer.to(moved.device)
        return self
