r"""The residual's arithmetic, reading each representation once.

Seven small operations carry all of it. On a GPU, outside of autograd and ``torch.compile``, each
is a Triton kernel (:mod:`rgpr._backend.triton_kernels`); everywhere else it is plain torch, which
``torch.compile`` and exporters fuse by themselves, and nothing is packed. Some of them stay kernels
in the graph of :meth:`rgpr.RGPR.compile` (:mod:`rgpr._backend.graph_operators`). Inputs may be
float32, bfloat16, float16 or float64, contiguous or channels-last; cubes are summed in float64,
which no float32 value can overflow.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .precision import at_least_float32

__all__ = [
    "add_moments",
    "few_rows",
    "from_nearest",
    "fused_probit",
    "in_graph",
    "kernels_in_graphs",
    "kernels_take",
    "mean_cubes",
    "nearest_cubes",
    "packed_cubes",
    "peak_out",
    "pooled",
]

# Numbers that a CPU works on at a time: what fits its cache need not go through memory again.
_CACHED = 1 << 19
# Rows up to which small layers are taken together.
_FEW_ROWS = 1024


def mean_cubes(h: Tensor, mean: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    r""":math:`\frac{1}{3N} \sum_i (|h_i - \mu_i| / s_i - c_i)_+^3`, ``(B,)`` in float64.

    Args:
        h: ``(B, ...)`` with ``N`` entries in a row.
        mean: ``(N,)``, in the dtype to compute in.
        scale: ``(N,)``.
        offset: ``(N,)``, or ``None`` for zeros.
    """
    kernels = _kernels(h)
    if kernels is not None:
        return kernels.mean_cubes(h, mean, scale, offset)  # type: ignore[no-any-return]
    shape = h.shape[1:]
    mean, scale = mean.view(shape), scale.view(shape)
    offset = None if offset is None else offset.view(shape)
    if h.device.type != "cpu" or torch.compiler.is_compiling():
        return _cubed(_distances(h, mean, scale, offset))

    def on_cpu(rows: Tensor) -> Tensor:
        # Looking at a value costs nothing here, and float32 is twice as fast: only rows that
        # overflow need more. No matrix product: its threads would keep the others waiting.
        plain = _distances(rows, mean, scale, offset).pow_(3).flatten(1).mean(1).double() / 3
        finite = plain.isfinite()
        if bool(finite.all()):
            return plain
        return torch.where(finite, plain, _cubed(_distances(rows, mean, scale, offset)))

    size = max(1, _CACHED // max(1, h[:1].numel()))
    if len(h) <= size:
        return on_cpu(h)
    return torch.cat([on_cpu(part) for part in torch.split(h, size)])


def pooled(h: Tensor) -> Tensor:
    """Means over positions, ``(B, C)``, in at least float32.

    Args:
        h: Images ``(B, C, ...)``, or sequences ``(B, T, C)``.
    """
    kernels = _kernels(h) or _operators(h)
    if kernels is not None:
        return kernels.pooled(h)  # type: ignore[no-any-return]
    positions = 1 if h.dim() == 3 else tuple(range(2, h.dim()))
    return h.mean(positions, dtype=at_least_float32(h.dtype))


def peak_out(h: Tensor) -> tuple[Tensor, Tensor]:
    """Rows divided by their largest entry, or by one if that is smaller; and that number.

    Args:
        h: ``(B, N)``.

    Returns:
        ``(B, N)``, and ``(B, 1)``, which is infinite or NaN where the row holds such a value.
    """
    kernels = _kernels(h)
    if kernels is not None:
        return kernels.peak_out(h)  # type: ignore[no-any-return]
    peak = h.detach().abs().amax(1, keepdim=True).clamp_min(1)
    return h / peak, peak


def nearest_cubes(
    products: Tensor, centers: Tensor, halves: Tensor, peak: Tensor | None, offset: Tensor | None
) -> Tensor:
    r""":math:`\frac13 (\rho - c)_+^3`, ``(B,)`` in float64, of the distance to the nearest center.

    :math:`\rho` is the root of the mean squared coordinate of the deviation. It is a minimum over
    the centers, so it has no jump where another center becomes the nearest.

    Args:
        products: ``(B, N + K)``: rows in the coordinates of the centers, and their products with
            the centers, both divided by ``peak``.
        centers: ``(K, N)``.
        halves: ``(K,)``: half of each center's squared length.
        peak: ``(B, 1)``, see :func:`peak_out`. Where it is not finite, it is the answer. ``None``
            for ones.
        offset: :math:`c`, one number, or ``None`` for zero.
    """
    kernels = _kernels(products)
    if kernels is not None and peak is not None:
        found: Tensor = kernels.nearest_cubes(products, centers, halves, peak, offset)
        return found
    squared = from_nearest(products, centers, halves, peak).double().square().mean(1)
    wide = None if peak is None else peak[:, 0].double()
    if offset is None:
        cubes = squared.pow(1.5) / 3
        return cubes if wide is None else torch.where(wide.isfinite(), wide**3 * cubes, wide)
    # The root's slope at zero is infinite; far below the offset the sliver changes nothing.
    distance = (squared + 1e-300).sqrt()
    distance = distance if wide is None else wide * distance
    cubes = (distance - offset).clamp_min(0).pow(3) / 3
    return cubes if wide is None else torch.where(wide.isfinite(), cubes, wide)


def from_nearest(products: Tensor, centers: Tensor, halves: Tensor, peak: Tensor | None) -> Tensor:
    """Deviations from the nearest center, divided by ``peak``: ``(B, N)``; the same arguments."""
    rows, closeness = products.tensor_split([centers.shape[1]], dim=1)
    if len(centers) > 1:
        centers = centers[(closeness - (halves if peak is None else halves / peak)).argmax(1)]
    return rows - (centers if peak is None else centers / peak)


def kernels_take(x: Tensor) -> bool:
    """Whether kernels for few rows are to be used with ``x``."""
    if in_graph(x):
        return _thread.few_rows
    # In this order: graphs that others trace must not depend on how many rows there are.
    return not torch.is_grad_enabled() and _kernels(x) is not None and few_rows(x)


def few_rows(x: Tensor) -> bool:
    """Of many rows each layer keeps a GPU busy, and they had better not wait in its memory."""
    return len(x) <= _FEW_ROWS


def packed_cubes(rows: Sequence[Tensor], *arguments: Any) -> Tensor:
    """:func:`nearest_cubes` of ``L`` representations at once, ``(B, L)`` in float64.

    Only a kernel does this, see :func:`kernels_take`.

    Args:
        rows: Of each representation ``(B, N)`` in float32, not yet in the coordinates of the
            centers.
        arguments: Those of :class:`rgpr._backend.packing.Packed`.
    """
    # Whether kernels can be used was found when the pass began, whatever other threads do since.
    kernels = _operators(rows[0]) or _triton(rows[0].device)
    found: Tensor = kernels.packed_cubes(rows, *arguments)
    return found


def fused_probit(
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
) -> Tensor | None:
    """All that follows a pass through the network, as one kernel; ``None`` where there is none.

    Gives, up to rounding, what :meth:`rgpr.RGPR.forward` computes otherwise by forty small
    operations, whose launches take longer than their work.

    Args:
        mean: ``(B, C)``, in the dtype of the answer.
        variance: ``(B, C)`` in float64, the base's.
        u: ``(B, L)`` in float64.
        sigma2: ``(L,)`` in float64.
        onset: One number in float64, or ``None`` for the sum over the layers; see
            :class:`rgpr.residual.variance.Residual`, also for the next two.
        slope: One number in float64.
        typical: ``(L,)`` in float64.
        share: Weight of the arithmetic mean beside the geometric one.
        temperature: One number in float64.
        far: The ``u`` of the input beyond which a network may overflow.
    """
    kernels = _kernels(u, mean, variance)
    if kernels is None or not 1 < mean.shape[1] <= kernels.MOST_CLASSES:
        return None
    found: Tensor = kernels.probit(
        mean, variance, u, sigma2, onset, slope, typical, share, temperature, far
    )
    return found


def add_moments(h: Tensor, near: Tensor, total: Tensor, squares: Tensor) -> None:
    """Add the deviations of a batch from ``near``, and their squares, to sums over the rows.

    Args:
        h: ``(B, ...)`` with ``N`` entries in a row.
        near: ``(N,)``, in the dtype to compute in.
        total: ``(N,)`` in float64.
        squares: ``(N,)`` in float64.
    """
    kernels = _kernels(h)
    if kernels is not None:
        kernels.add_moments(h, near, total, squares)
        return
    # The mean from h itself: the rounding of a deviation may be large next to it.
    total += h.sum(0, dtype=torch.float64).flatten() - len(h) * near.double()
    deviation = h - near.view(h.shape[1:])
    norm = torch.linalg.vector_norm(deviation, dim=0, dtype=torch.float64)
    squares += norm.square_().flatten()


def _distances(h: Tensor, mean: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    """``(|h - mean| / scale - offset)_+`` in memory of its own."""
    z = (h - mean).div_(scale).abs_()
    return z if offset is None else z.sub_(offset).clamp_min_(0)


def _cubed(distance: Tensor) -> Tensor:
    """A third of the mean of cubes over all but the first dimension, in float64."""
    return distance.double().pow(3).flatten(1).mean(1) / 3


def _kernels(*tensors: Tensor) -> Any:
    """The module of Triton kernels where they can take these tensors, else ``None``."""
    if not _on_gpu(tensors[0]) or torch.compiler.is_compiling():
        return None
    # Derivatives, of whatever kind, are torch's own.
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    if forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    return _triton(tensors[0].device)


class _Thread(threading.local):
    """What graphs that this thread traces call: the module of operators, or nothing.

    Of a graph for any number of rows it must not look at how many there are.
    """

    operators: Any = None
    few_rows = False


_thread = _Thread()


@contextmanager
def kernels_in_graphs(x: Tensor) -> Iterator[bool]:
    """Graphs that are traced inside call kernels as they are, if there are any: whether they do.

    For graphs that stay on this machine and need no gradients. Code that torch.compile makes of a
    mean over positions, together with the layer before it, may take twice as long as both apart.
    """
    if torch.is_grad_enabled() or not _on_gpu(x) or _triton(x.device) is None:
        yield False
        return
    from . import graph_operators as operators

    _thread.operators, _thread.few_rows = operators, few_rows(x)
    try:
        yield True
    finally:
        _thread.operators = None


def _operators(h: Tensor) -> Any:
    """The kernels as operators of a graph that this thread traces just now, else ``None``."""
    return _thread.operators if torch.compiler.is_compiling() and _on_gpu(h) else None


def in_graph(x: Tensor) -> bool:
    """Whether such a graph is traced, where values are not known."""
    return _operators(x) is not None


def _on_gpu(h: Tensor) -> bool:
    return h.is_cuda


@cache
def _triton(device: torch.device) -> Any:
    """The module with the kernels if they work on this device, tried once."""
    try:
        from . import triton_kernels

        one = torch.ones(1, 1, device=device)
        triton_kernels.mean_cubes(one, one[0], one[0], None)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # no triton, no compiler, an old GPU: all that fails in many ways
        warnings.warn(
            f"Triton kernels do not work here ({type(error).__name__}: {error}); plain torch is "
            "used, which is slower on a GPU",
            stacklevel=5,
        )
        return None
    return triton_kernels
