"""The mean of each channel over positions."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arithmetic import register
from ..precision import at_least_float32
from .layout import in_order, parts_of, power_of_two

__all__ = ["pooled"]

# One program adds up this many numbers at a time. The smaller number is for few positions.
_TILE, _SMALL_TILE = 2048, 512
# With channels last and fewer positions than this, torch itself takes the mean as fast.
_FEW = 128


@register("cuda")
def pooled(h: Tensor) -> Tensor:
    """See :func:`rgpr._backend.arithmetic.pooled`."""
    dtype = at_least_float32(h.dtype)
    h, channels_last = in_order(h)
    rows, channels, n = len(h), h.shape[1], h.shape[2:].numel()
    if channels_last and n < _FEW:
        return h.mean(tuple(range(2, h.dim())), dtype=dtype)
    out = torch.empty(rows, channels, dtype=dtype, device=h.device)
    if out.numel():
        # A tile is wide along the dimension whose numbers lie side by side in memory. Of channels
        # it takes 128 bytes, which one load brings.
        if channels_last:
            wide, tile = (64 if h.element_size() == 2 else 32), _TILE if n >= 512 else _SMALL_TILE
        else:
            wide, tile = min(256, power_of_two(max(1, n))), _TILE
        blocks = parts_of(channels, wide if channels_last else tile // wide)
        with torch.cuda.device_of(h):
            _pooled[(rows * blocks,)](
                h, out, n, channels, blocks, channels_last, tile // wide, wide,
                num_warps=8 if channels_last else 4,
            )  # fmt: skip
    return out


@triton.jit
def _pooled(
    h, out, n, channels, blocks,
    CHANNELS_LAST: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # Neighbouring programs read neighbouring rows. They start at the end of the tensor because the
    # network wrote it last, so it is still in the L2 cache.
    last = tl.num_programs(0) - 1 - tl.program_id(0)
    row, block = (last // blocks).to(tl.int64), last % blocks
    h += row * n * channels
    tall, wide = tl.arange(0, TALL), tl.arange(0, WIDE)
    total = tl.zeros([TALL, WIDE], out.dtype.element_ty)
    if CHANNELS_LAST:
        channel = block * WIDE + wide
        for start in range(0, n, TALL):
            position = start + tall
            both = (position < n)[:, None] & (channel < channels)[None, :]
            place = position[:, None] * channels + channel[None, :]
            total += tl.load(h + place, both, 0).to(total.dtype)
        mean = tl.sum(total, 0) / n
    else:
        channel = block * TALL + tall
        for start in range(0, n, WIDE):
            position = start + wide
            both = (channel < channels)[:, None] & (position < n)[None, :]
            total += tl.load(h + channel[:, None] * n + position[None, :], both, 0).to(total.dtype)
        mean = tl.sum(total, 1) / n
    tl.store(out + row * channels + channel, mean, channel < channels)
