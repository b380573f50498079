"""Sums of deviations and of their squares over the rows of a batch."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arithmetic import register
from .layout import PROGRAMS, dense, parts_of, unit_at

__all__ = ["add_moments"]


@register("cuda")
def add_moments(h: Tensor, near: Tensor, total: Tensor, squares: Tensor) -> None:
    """See :func:`rgpr._backend.arithmetic.add_moments`."""
    h, channels = dense(h, near)
    rows, n = len(h), near.numel()
    if rows:
        columns = 64 if n >= 64 * PROGRAMS else 32
        with torch.cuda.device_of(h):
            _add_moments[(parts_of(n, columns),)](
                h, near, total, squares, rows, n, channels, channels > 1, 32, columns
            )


@triton.jit
def _add_moments(
    h, near, total, squares, rows, n, channels,
    CHANNELS_LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = j < n
    unit = unit_at(j, n, channels, CHANNELS_LAST)
    center = tl.load(near + unit, inside, 0)
    first = tl.zeros([ROWS, COLUMNS], tl.float64)
    second = tl.zeros([ROWS, COLUMNS], tl.float64)
    for start in range(0, rows, ROWS):
        i = start + tl.arange(0, ROWS).to(tl.int64)
        both = (i < rows)[:, None] & inside[None, :]
        value = tl.load(h + i[:, None] * n + j[None, :], both, 0).to(center.dtype)
        deviation = value.to(tl.float64) - center[None, :].to(tl.float64)
        deviation = tl.where(both, deviation, 0)
        first += deviation
        second += deviation * deviation
    # The sum over rows stands behind the loop, so that threads wait for each other only once.
    tl.store(total + unit, tl.load(total + unit, inside, 0) + tl.sum(first, 0), inside)
    tl.store(squares + unit, tl.load(squares + unit, inside, 0) + tl.sum(second, 0), inside)
