"""The operations of :mod:`rgpr._backend.arithmetic` as Triton kernels, chosen there."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .packing import COLUMNS, STEP, power_of_two
from .precision import at_least_float32

__all__ = [
    "add_moments",
    "mean_cubes",
    "nearest_cubes",
    "packed_cubes",
    "peak_out",
    "pooled",
    "probit",
    "stages",
]

# Programs that keep a large GPU busy: rows are cut where there are fewer.
_PROGRAMS = 512
# Numbers that one program adds up at a time, and where there are few in all.
_TILE, _SMALL_TILE = 2048, 512
# Of so few positions side by side, channels last, torch itself takes the mean as fast.
_FEW = 128
# Rows that one program multiplies.
_ROWS = 64
# Numbers up to this size are multiplied as they are; rows of larger ones are divided first.
_LARGE = tl.constexpr(2.0**24)
_PRECISION = "ieee" if torch.version.hip else "tf32"
# A row of so many probabilities fits the registers of one program.
MOST_CLASSES = 4096


def mean_cubes(h: Tensor, mean: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """See :func:`rgpr._backend.arithmetic.mean_cubes`."""
    h, channels = _dense(h, mean)
    rows, n = len(h), mean.numel()
    if h.dtype == torch.float64:
        mean, scale = mean.double(), scale.double()
        offset = None if offset is None else offset.double()
    block = min(1024, power_of_two(max(1, n)))
    parts = max(1, min(_parts_of(_PROGRAMS, max(1, rows)), _parts_of(n, block)))
    out = torch.empty(rows, parts, dtype=torch.float64, device=h.device)
    if rows:
        with torch.cuda.device_of(h):
            _mean_cubes[rows, parts](
                h, mean, scale, mean if offset is None else offset, out, n, channels,
                offset is not None, channels > 1, block,
            )  # fmt: skip
    return out[:, 0] if parts == 1 else out.sum(1)


def pooled(h: Tensor) -> Tensor:
    """See :func:`rgpr._backend.arithmetic.pooled`."""
    sequence, dtype = h.dim() == 3, at_least_float32(h.dtype)
    if sequence and h.shape[1] < _FEW:
        return h.mean(1, dtype=dtype)
    h, channels_last = _in_order(h)
    rows, channels, n = len(h), h.shape[1], h.shape[2:].numel()
    if sequence:  # has its channels last, whatever that is called
        channels, n, channels_last = n, channels, True
    elif channels_last and n < _FEW:
        return h.mean((2, 3), dtype=dtype)
    out = torch.empty(rows, channels, dtype=dtype, device=h.device)
    if out.numel():
        # Wide along what lies side by side in memory: 128 bytes of channels.
        if channels_last:
            wide, tile = (64 if h.element_size() == 2 else 32), _TILE if n >= 512 else _SMALL_TILE
        else:
            wide, tile = min(256, power_of_two(max(1, n))), _TILE
        blocks = _parts_of(channels, wide if channels_last else tile // wide)
        with torch.cuda.device_of(h):
            _pooled[(rows * blocks,)](
                h, out, n, channels, blocks, channels_last, tile // wide, wide,
                num_warps=8 if channels_last else 4,
            )  # fmt: skip
    return out


def peak_out(h: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`rgpr._backend.arithmetic.peak_out`."""
    h = h.contiguous()
    rows, n = h.shape
    divided, peak = torch.empty_like(h), h.new_empty(rows, 1)
    if rows:
        with torch.cuda.device_of(h):
            _peak_out[(rows,)](h, divided, peak, n, min(1024, power_of_two(n)))
    return divided, peak


def nearest_cubes(
    products: Tensor, centers: Tensor, halves: Tensor, peak: Tensor, offset: Tensor | None
) -> Tensor:
    """See :func:`rgpr._backend.arithmetic.nearest_cubes`."""
    products = products.contiguous()
    rows, (k, n) = len(products), centers.shape
    out = torch.empty(rows, dtype=torch.float64, device=products.device)
    if rows:
        with torch.cuda.device_of(products):
            _nearest_cubes[(rows,)](
                products, centers, halves, peak, halves if offset is None else offset, out, n, k,
                offset is not None, min(1024, power_of_two(max(n, k))),
            )  # fmt: skip
    return out


def packed_cubes(
    rows: list[Tensor],
    numbers: Tensor,
    table: Tensor,
    spans: Tensor,
    offsets: Tensor,
    classes: int,
    aligned: bool,
) -> Tensor:
    """See :func:`rgpr._backend.arithmetic.packed_cubes`."""
    together = torch.cat(rows, 1)
    (count, width), layers, blocks = together.shape, len(spans) - 1, len(table)
    parts = torch.empty(blocks, count, dtype=torch.float64, device=together.device)
    peaks = torch.empty(layers, count, dtype=torch.float32, device=together.device)
    out = torch.empty(count, layers, dtype=torch.float64, device=together.device)
    if count:
        with torch.cuda.device_of(together):
            _packed_squares[_parts_of(count, _ROWS), blocks](
                together, numbers, table, parts, peaks, count, width,
                classes, aligned, _PRECISION, _ROWS, COLUMNS, STEP,
                num_stages=stages(classes),
            )  # fmt: skip
            _cubed_up[_parts_of(count, 128), layers](
                parts, peaks, spans, offsets, out, count, layers, 128
            )
    return out


def add_moments(h: Tensor, near: Tensor, total: Tensor, squares: Tensor) -> None:
    """See :func:`rgpr._backend.arithmetic.add_moments`."""
    h, channels = _dense(h, near)
    rows, n = len(h), near.numel()
    if rows:
        columns = 64 if n >= 64 * _PROGRAMS else 32
        with torch.cuda.device_of(h):
            _add_moments[(_parts_of(n, columns),)](
                h, near, total, squares, rows, n, channels, channels > 1, 32, columns
            )


def probit(
    mean: Tensor,
    variance: Tensor,
    u: Tensor,
    sigma2: Tensor,
    onset: Tensor | None,
    slope: Tensor,
    typical: Tensor,
    share: float,
    temperature: Tensor,
    far: float,
) -> Tensor:
    """See :func:`rgpr._backend.arithmetic.fused_probit`."""
    rows, classes = mean.shape
    out = torch.empty_like(mean, memory_format=torch.contiguous_format)
    if rows:
        with torch.cuda.device_of(mean):
            _probit[(rows,)](
                mean.contiguous(), variance.contiguous(), u.contiguous(), sigma2,
                temperature if onset is None else onset, slope, typical, temperature, out, share,
                far, classes, u.shape[1], onset is not None, power_of_two(classes),
                power_of_two(u.shape[1]),
            )  # fmt: skip
    return out


def stages(classes: int) -> int:
    """Steps that kernels on tensor cores load ahead: what a small GPU has memory for."""
    return 3 if classes <= 32 else 2


def _parts_of(size: int, part: int) -> int:
    """How many parts cover it; Triton's own function takes as long as launching a kernel."""
    return -(-size // part)


def _dense(h: Tensor, parameters: Tensor) -> tuple[Tensor, int]:
    """The tensor without gaps, and how many channels lie side by side in it: one if in order."""
    if h.shape[1:].numel() != parameters.numel():
        raise ValueError(
            f"rows of shape {tuple(h.shape[1:])} do not fit {parameters.numel()} parameters"
        )
    h, channels_last = _in_order(h)
    return h, h.shape[1] if channels_last else 1


def _in_order(h: Tensor) -> tuple[Tensor, bool]:
    """The tensor without gaps, and whether its channels lie side by side."""
    if h.is_contiguous():
        return h, False
    if h.dim() == 4 and h.is_contiguous(memory_format=torch.channels_last):
        return h, True
    return h.contiguous(), False


@triton.jit
def _unit(j, n, channels, CHANNELS_LAST: tl.constexpr):
    """Where the unit at place ``j`` of a row has its parameters."""
    return (j % channels) * (n // channels) + j // channels if CHANNELS_LAST else j


@triton.jit
def _divided(a, b):
    """Rounded as torch does: a plain float32 division is not, and an offset is to hold exactly."""
    return a / b if a.dtype == tl.float64 else tl.div_rn(a, b)


@triton.jit
def _above(z, offset):
    """``(z - offset)_+``; a NaN stays one."""
    z = z - offset
    return tl.where(z < 0, 0, z)


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
        unit = _unit(j, n, channels, CHANNELS_LAST)
        center = tl.load(mean + unit, inside, 0)
        value = tl.load(h + row * n + j, inside, 0).to(center.dtype)
        z = tl.abs(_divided(value - center, tl.load(scale + unit, inside, 1)))
        if OFFSET:
            z = _above(z, tl.load(offset + unit, inside, 0))
        z = tl.where(inside, z, 0).to(tl.float64)
        total += z * z * z
    tl.store(out + row * parts + part, tl.sum(total) / (3 * n))


@triton.jit
def _pooled(
    h, out, n, channels, blocks,
    CHANNELS_LAST: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # Programs beside each other read what is; the end first, which the cache still has.
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
    largest = tl.where(broken > 0, float("nan"), largest)
    tl.store(peak + row, largest)
    for start in range(0, n, BLOCK):
        j = start + tl.arange(0, BLOCK)
        value = tl.load(h + row * n + j, j < n, 0)
        tl.store(divided + row * n + j, _divided(value, largest), j < n)


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
        distance = _above(distance, tl.load(offset).to(tl.float64))
    cube = distance * distance * distance / 3
    tl.store(out + row, tl.where(wide < float("inf"), cube, wide))


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
    # Some of the coordinates, and how close every center is.
    z, closeness, largest, smaller = _safe_products(
        h, known, n, padded, origin, axes, onto, CLASSES, PRECISION, ROWS, COLUMNS, STEP
    )
    c, center = first + tl.arange(0, COLUMNS), tl.arange(0, CLASSES)
    closeness -= tl.load(centers + center, center < k, 0)[None, :] * smaller
    closeness = tl.where((center < k)[None, :], closeness, float("-inf"))
    nearest = tl.minimum(tl.argmax(closeness, 1), k - 1)  # whatever it finds among NaN
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
    """Products of rows, divided first where that is needed, and :func:`_divisors` of them."""
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
    """Rows times axes, rows times centers, and what is too large for such products."""
    z = tl.zeros([ROWS, COLUMNS], tl.float32)
    closeness = tl.zeros([ROWS, CLASSES], tl.float32)
    large = tl.zeros([ROWS, STEP], tl.int32)
    for start in range(0, padded, STEP):
        value = _entries(h, start, known, n, origin, STEP)
        large = large | tl.where(tl.abs(value) <= _LARGE, 0, 1)
        high, low = _split(value * smaller)
        first, second = _some(axes, start, padded, COLUMNS, STEP)
        z = _added(high, low, first, second, z, PRECISION)
        first, second = _some(onto, start, padded, CLASSES, STEP)
        closeness = _added(high, low, first, second, closeness, PRECISION)
    return z, closeness, large


@triton.jit
def _entries(h, start, known, n, origin, STEP: tl.constexpr):
    """Some entries of rows, measured from the origin: small numbers keep their digits."""
    j = start + tl.arange(0, STEP)
    value = tl.load(h + j[None, :], known[:, None] & (j < n)[None, :], 0).to(tl.float32)
    middle = tl.load(origin + j, j < n, 0)[None, :]
    return tl.where(known[:, None], value - middle, 0)


@triton.jit
def _split(value):
    """A number rounded to TF32, eleven bits that tensor cores read, and what rounding took away."""
    high = ((value.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return high, value - high


@triton.jit
def _some(matrix, start, padded, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    """Some rows of a block of :func:`rgpr._backend.packing.in_blocks`, in both parts."""
    j, c = start + tl.arange(0, STEP), tl.arange(0, COLUMNS)
    at = matrix + c[None, :] * padded + j[:, None]
    return tl.load(at), tl.load(at + COLUMNS * padded)


@triton.jit
def _added(high, low, first, second, total, PRECISION: tl.constexpr):
    """Adds a product of two matrices in two parts each.

    Three of four: those of what rounding took away on both sides are below float32's own rounding.
    """
    total = tl.dot(low, first, total, input_precision=PRECISION)
    total = tl.dot(high, second, total, input_precision=PRECISION)
    return tl.dot(high, first, total, input_precision=PRECISION)


@triton.jit
def _divisors(h, known, n, origin, ROWS: tl.constexpr, STEP: tl.constexpr):
    """The largest entry of each row, at least one, or NaN; and what leaves none above four.

    That is one over a power of two, so that multiplying by it is exact.
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
    """One over it, exactly: a division of Triton's is not."""
    return ((254 << 23) - power_of_two.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _cubed_up(parts, peaks, spans, offsets, out, count, layers, ROWS: tl.constexpr):
    """From the blocks' mean squares to a third of the cube beyond the layer's offset."""
    i, layer = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1).to(tl.int64)
    known = i < count
    total = tl.zeros([ROWS], tl.float64)
    for block in range(tl.load(spans + layer), tl.load(spans + layer + 1)):
        total += tl.load(parts + block * count + i, known, 0)
    wide = tl.load(peaks + layer * count + i, known, 1).to(tl.float64)
    distance = _above(wide * tl.sqrt(total), tl.load(offsets + layer))
    cubes = tl.where(wide < float("inf"), distance * distance * distance / 3, wide)
    tl.store(out + i.to(tl.int64) * layers + layer, cubes, known)


@triton.jit
def _add_moments(
    h, near, total, squares, rows, n, channels,
    CHANNELS_LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = j < n
    unit = _unit(j, n, channels, CHANNELS_LAST)
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
    # Threads wait for each other here, and not at every step.
    tl.store(total + unit, tl.load(total + unit, inside, 0) + tl.sum(first, 0), inside)
    tl.store(squares + unit, tl.load(squares + unit, inside, 0) + tl.sum(second, 0), inside)


@triton.jit
def _finite(value):
    return tl.where(value - value == 0, 1, 0)


@triton.jit
def _infinite(value):
    return tl.where(tl.abs(value) == float("inf"), 1, 0)


@triton.jit
def _softmax(logits, inside):
    exponentials = tl.where(
        inside, tl.exp(logits - tl.max(tl.where(inside, logits, -float("inf")))), 0
    )
    return exponentials / tl.sum(exponentials)


@triton.jit
def _probit(
    mean, variance, u, sigma2, onset, slope, typical, temperature, out, share, far, classes,
    layers,
    ONSET: tl.constexpr, CLASSES: tl.constexpr, LAYERS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    # What each layer contributes, as Residual.contributions has it.
    layer = tl.arange(0, LAYERS)
    units = tl.load(u + row * layers + layer, layer < layers, 0)
    scales = tl.load(sigma2 + layer, layer < layers, 0)
    first = tl.load(u + row * layers)
    beyond = tl.where(first > far, 1, 0)
    known = tl.where((1 - _finite(units)) * beyond == 1, float("inf"), units)
    added = tl.where(scales > 0, known, 0) * scales
    if ONSET:  # rgpr.residual.variance.Residual.beyond
        # Equal weights of the hidden layers that count, or all of it to the input.
        varied = tl.load(typical + layer, layer < layers, 0)
        counts = ((varied > 0) & (scales > 0) & (layer > 0)).to(tl.float64)
        powers = tl.where(tl.sum(counts) > 0, counts, (layer == 0).to(tl.float64))
        powers = powers / tl.sum(powers)
        # One silent layer silences the product; a NaN stays one.
        logs = tl.where(added == 0, -float("inf"), tl.log(tl.where(added == 0, 1, added)))
        logs = tl.where(powers > 0, logs * powers, 0)
        total = tl.exp(tl.sum(logs)) + share * tl.sum(added) / layers
        v = total - tl.load(onset)
        v = tl.where(v < 0, 0, v) * tl.load(slope)
    else:
        v = tl.sum(added)
    v = tl.where(first != first, first, v)
    # Rows that get the limit, as _at_limit has it.
    column = tl.arange(0, CLASSES)
    inside = column < classes
    m = tl.load(mean + row * classes + column, inside, 0).to(tl.float64)
    s = tl.load(variance + row * classes + column, inside, 0)
    outputs = tl.min(_finite(m) * _finite(s))
    everything = outputs * tl.min(_finite(units))
    limit = _infinite(first) + outputs * _infinite(v) + (1 - everything) * beyond > 0
    v = tl.where(limit, 0, v)
    # rgpr.posteriors.links.probit and twice_probit
    heat = tl.load(temperature)
    factor = tl.full([], 0.39269908169872414, tl.float64)  # pi / 8; a literal would be a float32
    if ONSET:
        logits = m / tl.sqrt(1 + factor * s) / tl.sqrt(1 + v) / heat
    else:
        logits = m / tl.sqrt(1 + factor * (s + v)) / heat
    p = _softmax(logits, inside)
    p = tl.where(limit, 1 / classes.to(tl.float64), p)
    tl.store(out + row * classes + column, p.to(out.dtype.element_ty), inside)
