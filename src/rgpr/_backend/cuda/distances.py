"""The cube of the distance of a row from the data: one program takes one row or a part of one."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arithmetic import register
from .layout import PROGRAMS, dense, parts_of, power_of_two, unit_at

__all__ = ["above", "mean_cubes", "nearest_cubes", "peak_out"]

# One program reads at most this many numbers at a time.
_BLOCK = 1024


@register("cuda")
def mean_cubes(h: Tensor, mean: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """See :func:`rgpr._backend.arithmetic.mean_cubes`."""
    h, channels = dense(h, mean)
    rows, n = len(h), mean.numel()
    if h.dtype == torch.float64:
        mean, scale = mean.double(), scale.double()
        offset = None if offset is None else offset.double()
    block = min(_BLOCK, power_of_two(max(1, n)))
    # Several programs share a row where there are too few rows to keep the GPU busy.
    parts = max(1, min(parts_of(PROGRAMS, max(1, rows)), parts_of(n, block)))
    out = torch.empty(rows, parts, dtype=torch.float64, device=h.device)
    if rows:
        with torch.cuda.device_of(h):
            _mean_cubes[rows, parts](
                h, mean, scale, mean if offset is None else offset, out, n, channels,
                offset is not None, channels > 1, block,
            )  # fmt: skip
    return out[:, 0] if parts == 1 else out.sum(1)


@triton.jit
def _mean_cubes(
    h, mean, scale, offset, out, n, channels,
    OFFSET: tl.constexpr, CHANNELS_LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(part * BLOCK, n, parts * BLOCK):
        j = start + tl.arange(0, BLOCK)
        inside = j < n
        unit = unit_at(j, n, channels, CHANNELS_LAST)
        center = tl.load(mean + unit, inside, 0)
        value = tl.load(h + row * n + j, inside, 0).to(center.dtype)
        z = tl.abs(_divided(value - center, tl.load(scale + unit, inside, 1)))
        if OFFSET:
            z = above(z, tl.load(offset + unit, inside, 0))
        z = tl.where(inside, z, 0).to(tl.float64)
        total += z * z * z
    tl.store(out + row * parts + part, tl.sum(total) / (3 * n))


@register("cuda")
def peak_out(h: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`rgpr._backend.arithmetic.peak_out`."""
    h = h.contiguous()
    rows, n = h.shape
    divided, peak = torch.empty_like(h), h.new_empty(rows, 1)
    if rows:
        with torch.cuda.device_of(h):
            _peak_out[(rows,)](h, divided, peak, n, min(_BLOCK, power_of_two(n)))
    return divided, peak


@triton.jit
def _peak_out(h, divided, peak, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full([], 0, h.dtype.element_ty)
    broken = 0
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        value = tl.load(h + row * n + j, j < n, 0)
        largest = tl.maximum(largest, tl.max(tl.abs(value)))
        broken += tl.sum((value != value).to(tl.int32))
    largest = tl.where(largest > 1, largest, 1)
    # A maximum may pass over a NaN, so NaNs are counted.
    largest = tl.where(broken > 0, float("nan"), largest)
    tl.store(peak + row, largest)
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        value = tl.load(h + row * n + j, j < n, 0)
        tl.store(divided + row * n + j, _divided(value, largest), j < n)


@register("cuda")
def nearest_cubes(
    products: Tensor, centers: Tensor, halves: Tensor, peak: Tensor | None, offset: Tensor | None
) -> Tensor:
    """See :func:`rgpr._backend.arithmetic.nearest_cubes`."""
    products = products.contiguous()
    rows, (k, n) = len(products), centers.shape
    peak = products.new_ones(rows, 1) if peak is None else peak
    out = torch.empty(rows, dtype=torch.float64, device=products.device)
    if rows:
        with torch.cuda.device_of(products):
            _nearest_cubes[(rows,)](
                products, centers, halves, peak, halves if offset is None else offset, out, n, k,
                offset is not None, min(_BLOCK, power_of_two(max(n, k))),
            )  # fmt: skip
    return out


@triton.jit
def _nearest_cubes(
    products, centers, halves, peak, offset, out, n, k,
    OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    products += row * (n + k)
    largest = tl.load(peak + row)
    best, closest = tl.full([], float("-inf"), largest.dtype), tl.full([], 0, tl.int32)
    for start in range(0, k, BLOCK):
        j = start + tl.arange(0, BLOCK)
        half = tl.load(halves + j, j < k, 0)
        closeness = tl.load(products + n + j, j < k, 0) - _divided(half, largest)
        closeness = tl.where(j < k, closeness, float("-inf"))
        value, index = tl.max(closeness, 0, return_indices=True)
        closest = tl.where(value > best, start + index, closest)
        best = tl.where(value > best, value, best)
    centers += closest.to(tl.int64) * n
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        inside = j < n
        center = _divided(tl.load(centers + j, inside, 0), largest)
        z = tl.load(products + j, inside, 0) - center
        z = tl.where(inside, z, 0).to(tl.float64)
        total += z * z
    wide = largest.to(tl.float64)
    distance = wide * tl.sqrt(tl.sum(total) / n)
    if OFFSET:
        distance = above(distance, tl.load(offset).to(tl.float64))
    cube = distance * distance * distance / 3
    tl.store(out + row, tl.where(wide < float("inf"), cube, wide))


@triton.jit
def _divided(a, b):
    """``a / b``, rounded as torch rounds it.

    A plain float32 division in Triton rounds in another way, and then a row at its offset would not
    give exactly zero.
    """
    return a / b if a.dtype == tl.float64 else tl.div_rn(a, b)


@triton.jit
def above(z, offset):
    """``(z - offset)_+``, where a NaN stays a NaN."""
    z = z - offset
    return tl.where(z < 0, 0, z)
