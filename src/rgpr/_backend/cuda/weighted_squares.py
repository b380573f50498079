"""Weighted sums of squared products: the variance of last-layer Laplace with Kronecker factors."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arithmetic import few_rows, register
from .layout import parts_of, power_of_two
from .small_layers import PRECISION, added, split

__all__ = ["by_kernel", "fits", "of_any_rows", "weighted_squares"]

# One program multiplies ROWS rows with COLUMNS columns of the matrix, and reads STEP units at a
# time.
ROWS, COLUMNS, STEP = 32, 64, 64
# With more outputs the second product is large enough for one of its own.
_MOST_OUTPUTS = 64
# With fewer rows too few programs run at a time, and a library's products take less time.
_LEAST_ROWS = 64


@register("cuda")
def weighted_squares(rows: Tensor, matrix: Tensor, weights: Tensor) -> Tensor | None:
    """See :func:`rgpr._backend.arithmetic.weighted_squares`; ``None`` where it takes no less."""
    suits = len(rows) >= _LEAST_ROWS and few_rows(rows) and fits(rows, weights)
    return by_kernel(rows, matrix, weights) if suits else None


def fits(rows: Tensor, weights: Tensor) -> bool:
    """Whether the kernel can take these, apart from the number of rows."""
    return rows.dtype == torch.float32 and weights.shape[1] <= _MOST_OUTPUTS


def of_any_rows(rows: Tensor, matrix: Tensor, weights: Tensor) -> Tensor:
    """The answer ``(B, C)`` in float64, in a graph that may be for any number of rows."""
    if len(rows) < _LEAST_ROWS:
        return ((rows @ matrix).square() @ weights).double()
    return by_kernel(rows, matrix, weights)


def by_kernel(rows: Tensor, matrix: Tensor, weights: Tensor) -> Tensor:
    """What the kernel gives, ``(B, C)`` in float64."""
    rows, matrix = rows.contiguous(), matrix.contiguous()
    (count, n), (m, outputs) = rows.shape, weights.shape
    wide, blocks = max(16, power_of_two(outputs)), parts_of(m, COLUMNS)
    parts = torch.empty(blocks, count, outputs, dtype=torch.float32, device=rows.device)
    if count:
        with torch.cuda.device_of(rows):
            _weighted_squares[parts_of(count, ROWS), blocks](
                rows, matrix, weights, parts, count, n, m, outputs, *weights.stride(),
                wide, PRECISION, ROWS, COLUMNS, STEP,
            )  # fmt: skip
    return parts.sum(0, dtype=torch.float64)


@triton.jit
def _weighted_squares(
    rows, matrix, weights, parts, count, n, m, outputs, along_m, along_outputs,
    OUTPUTS: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    i, block = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    c, known = block * COLUMNS + tl.arange(0, COLUMNS), i < count
    z = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, n, STEP):
        j = start + tl.arange(0, STEP)
        at = rows + i.to(tl.int64)[:, None] * n + j[None, :]
        high, low = split(tl.load(at, known[:, None] & (j < n)[None, :], 0))
        at = matrix + j.to(tl.int64)[:, None] * m + c[None, :]
        first, second = split(tl.load(at, (j < n)[:, None] & (c < m)[None, :], 0))
        z = added(high, low, first, second, z, PRECISION)
    output = tl.arange(0, OUTPUTS)
    inside = (c < m)[:, None] & (output < outputs)[None, :]
    at = weights + c[:, None] * along_m + output[None, :] * along_outputs
    first, second = split(tl.load(at, inside, 0))
    high, low = split(z * z)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    total = added(high, low, first, second, total, PRECISION)
    at = parts + (block.to(tl.int64) * count + i)[:, None] * outputs + output[None, :]
    tl.store(at, total, known[:, None] & (output < outputs)[None, :])
