"""One kernel measures all small layers of a network, by products on tensor cores.

Tensor cores read a number as TF32, which has eleven bits. So every number is the sum of two that
they can read, see :func:`rgpr._backend.small_layers.in_blocks`: three products of these leave as
many digits as a product in float32 has.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arithmetic import register
from ..small_layers import COLUMNS, STEP, Packed
from .distances import above
from .layout import parts_of

__all__ = ["PRECISION", "ROWS", "added", "of_blocks", "packed_cubes", "split", "stages"]

# One program multiplies this many rows.
ROWS = 64
# With ROCm the products are those of float32, without TF32.
PRECISION = "ieee" if torch.version.hip else "tf32"
# Numbers up to this size are multiplied as they are. Rows with larger ones are divided first.
_LARGE = tl.constexpr(2.0**24)


@register("cuda")
def packed_cubes(rows: list[Tensor], packed: Packed) -> Tensor:
    """See :func:`rgpr._backend.arithmetic.packed_cubes`."""
    return of_blocks(rows, *packed.blocks)


def of_blocks(
    rows: list[Tensor],
    numbers: Tensor,
    table: Tensor,
    spans: Tensor,
    offsets: Tensor,
    classes: int,
    aligned: bool,
) -> Tensor:
    """Launch the kernels for the rows and the fields of :class:`rgpr._backend.small_layers.Blocks`.

    The fields are parameters of their own because ``torch.ops.rgpr.packed_cubes`` calls this
    function, and an operator takes no dataclass.
    """
    together = torch.cat(rows, 1)
    (count, width), layers, blocks = together.shape, len(spans) - 1, len(table)
    parts = torch.empty(blocks, count, dtype=torch.float64, device=together.device)
    peaks = torch.empty(layers, count, dtype=torch.float32, device=together.device)
    out = torch.empty(count, layers, dtype=torch.float64, device=together.device)
    if count:
        with torch.cuda.device_of(together):
            _packed_squares[parts_of(count, ROWS), blocks](
                together, numbers, table, parts, peaks, count, width,
                classes, aligned, PRECISION, ROWS, COLUMNS, STEP,
                num_stages=stages(classes),
            )  # fmt: skip
            _cubed_up[parts_of(count, 128), layers](
                parts, peaks, spans, offsets, out, count, layers, 128
            )
    return out


def stages(classes: int) -> int:
    """Return how many steps the kernel loads ahead: as many as a small GPU has memory for."""
    return 3 if classes <= 32 else 2


@triton.jit
def _packed_squares(
    rows, numbers, table, parts, peaks, count, width,
    CLASSES: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1).to(tl.int64)
    table += block * 9
    layer, place, n = tl.load(table), tl.load(table + 1), tl.load(table + 2).to(tl.int32)
    k, first = tl.load(table + 3).to(tl.int32), tl.load(table + 4).to(tl.int32)
    axes = numbers + tl.multiple_of(tl.load(table + 5), 16)
    onto = numbers + tl.multiple_of(tl.load(table + 6), 16)
    centers = numbers + tl.multiple_of(tl.load(table + 7), 16)
    origin = numbers + tl.multiple_of(tl.load(table + 8), 16)
    padded = tl.multiple_of((n + STEP - 1) // STEP * STEP, STEP)
    if ALIGNED:
        n, place = tl.multiple_of(n, 16), tl.multiple_of(place, 16)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = i < count
    h = rows + i.to(tl.int64)[:, None] * width + place
    # z holds some of the coordinates of each row, closeness how close every center is to it.
    z, closeness, largest, smaller = _safe_products(
        h, known, n, padded, origin, axes, onto, CLASSES, PRECISION, ROWS, COLUMNS, STEP
    )
    c, center = first + tl.arange(0, COLUMNS), tl.arange(0, CLASSES)
    closeness -= tl.load(centers + center, center < k, 0)[None, :] * smaller
    closeness = tl.where((center < k)[None, :], closeness, float("-inf"))
    # The index of a maximum among NaNs may be any number, and must not lead out of the memory.
    nearest = tl.minimum(tl.argmax(closeness, 1), k - 1)
    centers += CLASSES
    near = tl.load(centers + nearest[:, None] * n + c[None, :], (c < n)[None, :], 0)
    z = tl.where((c < n)[None, :], z - near * smaller, 0).to(tl.float64)
    tl.store(parts + block * count + i, tl.sum(z * z, 1) / n, known)
    if first == 0:
        peak = tl.where(largest - largest == 0, tl.reshape(_inverse(smaller), [ROWS]), largest)
        tl.store(peaks + layer * count + i, peak, known)


@triton.jit
def _safe_products(
    h, known, n, padded, origin, axes, onto, CLASSES: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The products of :func:`_products`, and what :func:`_divisors` returns.

    Rows are divided, and multiplied again, only if one of them holds a number that is too large.
    """
    one = tl.full([ROWS], 1, tl.float32)
    largest, smaller = one, one[:, None]
    z, closeness, large = _products(
        h, known, n, padded, smaller, origin, axes, onto,
        CLASSES, PRECISION, ROWS, COLUMNS, STEP,
    )  # fmt: skip
    if tl.max(tl.max(large, 1), 0) > 0:
        largest, smaller = _divisors(h, known, n, origin, ROWS, STEP)
        z, closeness, large = _products(
            h, known, n, padded, smaller, origin, axes, onto,
            CLASSES, PRECISION, ROWS, COLUMNS, STEP,
        )  # fmt: skip
    return z, closeness, largest, smaller


@triton.jit
def _products(
    h, known, n, padded, smaller, origin, axes, onto,
    CLASSES: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Rows times axes, rows times centers, and ones where an entry is too large for products."""
    z = tl.zeros([ROWS, COLUMNS], tl.float32)
    closeness = tl.zeros([ROWS, CLASSES], tl.float32)
    large = tl.zeros([ROWS, STEP], tl.int32)
    for start in range(0, padded, STEP):
        value = _entries(h, start, known, n, origin, STEP)
        large = large | tl.where(tl.abs(value) <= _LARGE, 0, 1)
        high, low = split(value * smaller)
        first, second = _some(axes, start, padded, COLUMNS, STEP)
        z = added(high, low, first, second, z, PRECISION)
        first, second = _some(onto, start, padded, CLASSES, STEP)
        closeness = added(high, low, first, second, closeness, PRECISION)
    return z, closeness, large


@triton.jit
def _entries(h, start, known, n, origin, STEP: tl.constexpr):
    """The entries of rows from ``start`` on, measured from the origin.

    The differences are small numbers, which keep their digits in a product.
    """
    j = start + tl.arange(0, STEP)
    value = tl.load(h + j[None, :], known[:, None] & (j < n)[None, :], 0).to(tl.float32)
    middle = tl.load(origin + j, j < n, 0)[None, :]
    return tl.where(known[:, None], value - middle, 0)


@triton.jit
def split(value):
    """A number rounded to TF32, and what rounding took away."""
    high = ((value.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return high, value - high


@triton.jit
def _some(matrix, start, padded, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    """The numbers of a block from the unit ``start`` on, in both parts of ``in_blocks``."""
    j, c = start + tl.arange(0, STEP), tl.arange(0, COLUMNS)
    at = matrix + c[None, :] * padded + j[:, None]
    return tl.load(at), tl.load(at + COLUMNS * padded)


@triton.jit
def added(high, low, first, second, total, PRECISION: tl.constexpr):
    """The total plus a product of two matrices that come in two parts each.

    These are three of the four products of parts. The fourth, of what rounding took away on both
    sides, is below the rounding of float32 itself.
    """
    total = tl.dot(low, first, total, input_precision=PRECISION)
    total = tl.dot(high, second, total, input_precision=PRECISION)
    return tl.dot(high, first, total, input_precision=PRECISION)


@triton.jit
def _divisors(h, known, n, origin, ROWS: tl.constexpr, STEP: tl.constexpr):
    """The largest entry of each row, and a factor that leaves no entry of the row above four.

    The largest entry is at least one, and NaN if the row holds a NaN. The factor is one over a
    power of two, so multiplying by it is exact.
    """
    sizes = tl.full([ROWS, STEP], 1, tl.float32)
    broken = tl.zeros([ROWS, STEP], tl.int32)
    for start in range(0, n, STEP):
        value = _entries(h, start, known, n, origin, STEP)
        sizes = tl.maximum(sizes, tl.abs(value))
        broken = broken | (value != value).to(tl.int32)
    largest = tl.where(tl.max(broken, 1) > 0, float("nan"), tl.max(sizes, 1))
    power = tl.minimum((largest.to(tl.int32, bitcast=True) >> 23) & 255, 253)
    return largest, ((254 - power) << 23).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _inverse(power_of_two):
    """One over a power of two, exactly; a division in Triton is not exact."""
    return ((254 << 23) - power_of_two.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _cubed_up(parts, peaks, spans, offsets, out, count, layers, ROWS: tl.constexpr):
    """Adds up the mean squares of a layer's blocks, and stores a third of the cube of the distance.

    The distance is measured from the offset of the layer.
    """
    i, layer = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1).to(tl.int64)
    known = i < count
    total = tl.zeros([ROWS], tl.float64)
    for block in range(tl.load(spans + layer), tl.load(spans + layer + 1)):
        total += tl.load(parts + block * count + i, known, 0)
    wide = tl.load(peaks + layer * count + i, known, 1).to(tl.float64)
    distance = above(wide * tl.sqrt(total), tl.load(offsets + layer))
    cubes = tl.where(wide < float("inf"), distance * distance * distance / 3, wide)
    tl.store(out + i.to(tl.int64) * layers + layer, cubes, known)
