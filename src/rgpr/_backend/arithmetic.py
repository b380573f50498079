r"""Each operation of the residual in plain torch, and how a device gets a faster version of it.

A function below that is decorated with :func:`operation` is the reference of that operation: what
it computes is the formula in its docstring, and plain torch computes it on every device. Faster
versions come from outside, through :func:`register`. When the first tensor of a device type
arrives, the module of this package that has the name of the type is imported, if there is one
(:mod:`rgpr._backend.cuda`), and registers what it has. So a new device is a new file, and nothing
here changes.

A faster version is used only where torch needs no derivatives and traces no graph. Graphs that
:meth:`rgpr.RGPR.compile` makes are an exception, see :func:`kernels_in_graphs`; ``torch.compile``
and exporters otherwise see the references, which they fuse by themselves.

Inputs may be float32, bfloat16, float16 or float64, contiguous or channels-last. Cubes are float64,
which no float32 value can overflow.

This file is long because it holds every operation beside its formula, so that there is one place to
read.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from math import isfinite, prod
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = [
    "FASTER",
    "ProbitScales",
    "add_moments",
    "all_finite",
    "can_look",
    "cubes_beyond",
    "faster",
    "few_rows",
    "from_nearest",
    "fused_probit",
    "kernels_in_graphs",
    "mean_cubes",
    "nearest",
    "nearest_cubes",
    "needs_derivatives",
    "operation",
    "packed_cubes",
    "peak_out",
    "pooled",
    "register",
    "tracing_few_rows",
    "weighted_squares",
    "within_transform",
]

P = ParamSpec("P")
T = TypeVar("T")
_Function = Callable[..., Any]

# A CPU works on blocks of this many numbers, because they fit its cache: a block that is read
# again does not come from memory a second time.
_CACHED = 1 << 19
# Whether a transform of torch.func is at work. Inside of vmap no value can be looked at.
_transforming = torch._C._are_functorch_transforms_active
# Small layers are measured together for batches of up to this many rows.
_FEW_ROWS = 1024

# The names of all operations, which are the names that `register` accepts.
_NAMES: set[str] = set()
# The registered functions by device type and name of the operation. A device type that is missing
# was not seen yet. One without any function has plain torch alone.
FASTER: dict[str, dict[str, _Function]] = {"cpu": {}}
# The same for graphs that hold kernels.
_IN_GRAPHS: dict[str, dict[str, _Function]] = {}


# -- registry --------------------------------------------------------------------------------------


def operation(reference: Callable[P, T]) -> Callable[P, T]:
    """Make a function in plain torch the reference of an operation of the same name.

    The first argument is a tensor or a list of tensors. The device of the first tensor decides
    which version runs.
    """
    name = reference.__name__
    _NAMES.add(name)

    @wraps(reference)
    def dispatched(*arguments: P.args, **named: P.kwargs) -> T:
        first: Any = arguments[0]
        kind = (first if isinstance(first, Tensor) else first[0]).device.type
        # The table is looked at here because on a CPU, where it is empty, another call would cost
        # as much as a small operation.
        if FASTER.get(kind, True):
            found = faster(name, *arguments)
            if found is not None:
                answer: T = found(*arguments, **named)
                return answer
        return reference(*arguments, **named)

    return dispatched


def register(device_type: str, *, in_graphs: bool = False) -> Callable[[T], T]:
    """Return a decorator: the function becomes the faster version of the operation of its name.

    Args:
        device_type: The ``type`` of the devices that the function is for, such as ``"cuda"``.
        in_graphs: Whether the function is for graphs that :func:`kernels_in_graphs` allows to call
            kernels, and not for calls outside of graphs.

    Raises:
        ValueError: No operation has the name of the function.
    """
    table = _IN_GRAPHS if in_graphs else FASTER

    def add(function: T) -> T:
        name: str = function.__name__  # type: ignore[attr-defined]
        if name not in _NAMES:
            raise ValueError(f"{name!r} is no operation; expected one of {sorted(_NAMES)}")
        table.setdefault(device_type, {})[name] = function  # type: ignore[assignment]
        return function

    return add


def faster(name: str, *arguments: Any) -> _Function | None:
    """Return the registered version of an operation that may take these arguments, or ``None``.

    Args:
        name: The name of the operation.
        arguments: The arguments of the operation, or only the first one.
    """
    first = arguments[0]
    device = (first if isinstance(first, Tensor) else first[0]).device
    if not FASTER.get(device.type, True):
        return None
    if torch.compiler.is_compiling():
        return _tracing.operators.get(name)
    # Registered functions have no derivatives of any kind, so torch differentiates the reference.
    if torch.is_grad_enabled() and _needs_gradients(arguments):
        return None
    if within_transform():
        return None
    return FASTER[device.type].get(name) if _works(device) else None


def _needs_gradients(arguments: Sequence[Any]) -> bool:
    """Whether one of the tensors among the arguments, or in a list among them, wants a gradient."""
    return any(
        isinstance(tensor, Tensor) and tensor.requires_grad
        for argument in arguments
        for tensor in (argument if isinstance(argument, list) else [argument])
    )


@cache
def _works(device: torch.device) -> bool:
    """Whether the functions that are registered for the type of this device work on it.

    The module that is named after the device type registers its functions when it is imported, and
    its function ``works`` tries them on the device. Functions that are registered without such a
    module are not tried.
    """
    FASTER.setdefault(device.type, {})
    module = f"{__package__}.{device.type}"
    if importlib.util.find_spec(module) is None:
        return True
    return bool(importlib.import_module(module).works(device))


# -- graphs that hold kernels ----------------------------------------------------------------------


class _Tracing(threading.local):
    """What the graph may call that this thread traces just now.

    Attributes:
        operators: The registered functions by the name of the operation. There is none unless the
            thread is inside of :func:`kernels_in_graphs`.
        few_rows: Whether the example has few rows. A graph for any number of rows must not look at
            the number itself, or it would be a graph for this number.
    """

    operators: Mapping[str, _Function] = {}
    few_rows = False


_tracing = _Tracing()


@contextmanager
def kernels_in_graphs(x: Tensor) -> Iterator[bool]:
    """Let graphs that are traced inside call kernels as they are, and yield whether they do.

    This is for graphs that stay on this machine and need no gradients. The code that
    ``torch.compile`` makes of a mean over positions together with the layer before it may take
    twice as long as the two apart.

    Args:
        x: The example with which graphs are traced.
    """
    allowed = not torch.is_grad_enabled() and _works(x.device)
    _tracing.operators = _IN_GRAPHS.get(x.device.type, {}) if allowed else {}
    _tracing.few_rows = few_rows(x)
    try:
        yield bool(_tracing.operators)
    finally:
        _tracing.operators = {}


def tracing_few_rows() -> bool:
    """Whether the graph that is traced inside of :func:`kernels_in_graphs` is for few rows."""
    return _tracing.few_rows


def few_rows(x: Tensor) -> bool:
    """Whether small layers are better measured together for this batch.

    Each layer of a large batch keeps a GPU busy by itself, and its rows would take memory while
    they wait for the end of the pass.
    """
    return len(x) <= _FEW_ROWS


# -- looking at values -----------------------------------------------------------------------------


def can_look(x: Tensor) -> bool:
    """Whether code may branch on the values of a tensor, at no cost.

    On a CPU that is so, unless a graph is traced or a transform is at work. On a GPU Python would
    have to wait for all kernels before it.
    """
    return x.device.type == "cpu" and not (torch.compiler.is_compiling() or _transforming())


def all_finite(*tensors: Tensor) -> bool:
    """Whether all entries of some tensors are finite, by one look at the sum of each.

    The answer may be no although all are, because a sum can overflow where no entry does. Callers
    then go the careful way, which is right for every entry.
    """
    return all(isfinite(tensor.sum().item()) for tensor in tensors)


def needs_derivatives(x: Tensor) -> bool:
    """Whether torch may be asked for derivatives of what is made of a tensor."""
    # Neither a graph that is traced nor a tensor inside of vmap says whether somebody will.
    return bool(torch.compiler.is_compiling() or x.requires_grad or within_transform())


def within_transform() -> bool:
    """Whether torch takes forward-mode derivatives, or one of ``torch.func`` is at work."""
    return bool(forward_ad._current_level >= 0 or _transforming())


# -- operations ------------------------------------------------------------------------------------


@operation
def mean_cubes(h: Tensor, mean: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    r""":math:`\frac{1}{3N} \sum_i (|h_i - \mu_i| / s_i - c_i)_+^3`, ``(B,)`` in float64.

    Args:
        h: The rows, ``(B, ...)`` with ``N`` entries each.
        mean: :math:`\mu`, ``(N,)``, in the dtype to compute in.
        scale: :math:`s`, ``(N,)``.
        offset: :math:`c`, ``(N,)``, or ``None`` for zeros.
    """
    shape = h.shape[1:]
    if len(shape) > 1:
        mean, scale = mean.view(shape), scale.view(shape)
        offset = None if offset is None else offset.view(shape)
    # Cubes in float32 are twice as fast. So only rows whose cubes overflow are computed again, in
    # float64.
    looks = can_look(h)
    block = max(1, _CACHED // max(1, prod(shape)))
    blocks = torch.split(h, block) if looks and len(h) > block else (h,)
    found = []
    for rows in blocks:
        z = (rows - mean).div_(scale).abs_()
        z = z if offset is None else z.sub_(offset).clamp_min_(0)
        z = z if looks else z.double()
        # This is no matrix product, because the threads of one would keep the others waiting.
        cubes = z.pow_(3).flatten(1).sum(1).double() / (3 * prod(shape))
        if looks and h.dtype != torch.float64 and not all_finite(cubes):
            again = mean_cubes(rows.double(), mean, scale, offset)
            cubes = torch.where(cubes.isfinite(), cubes, again)
        found.append(cubes)
    return found[0] if len(found) == 1 else torch.cat(found)


@operation
def pooled(h: Tensor) -> Tensor:
    """Means over positions, ``(B, C)``, in float64 for float64 and in float32 for all others.

    Args:
        h: ``(B, C, ...)``, positions last, in whatever order the axes lie in memory.
    """
    return h.mean(
        tuple(range(2, h.dim())), dtype=h.dtype if h.dtype == torch.float64 else torch.float32
    )


@operation
def peak_out(h: Tensor) -> tuple[Tensor, Tensor]:
    r""":math:`h / p` and :math:`p = \max(1, \max_i |h_i|)` of each row.

    Args:
        h: The rows, ``(B, N)``.

    Returns:
        The divided rows ``(B, N)``, and :math:`p`, ``(B, 1)``, which is infinite or NaN where the
        row holds such a value.
    """
    peak = h.detach().abs().amax(1, keepdim=True).clamp_min(1)
    return h / peak, peak


@operation
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
        halves: Half of each center's squared length, ``(K,)``.
        peak: What :func:`peak_out` divided the rows by, ``(B, 1)``, or ``None`` for ones. Where it
            is not finite, it is the answer.
        offset: :math:`c`, one number, or ``None`` for zero.
    """
    return cubes_beyond(from_nearest(products, centers, halves, peak), peak, offset)


def cubes_beyond(deviations: Tensor, peak: Tensor | None, offset: Tensor | None) -> Tensor:
    r"""The cubes of :func:`nearest_cubes`, ``(B,)`` in float64, from the deviations ``(B, N)``.

    Args:
        deviations: From the nearest center, in the coordinates of the centers, divided by ``peak``.
        peak: As for :func:`nearest_cubes`, and so is the last argument.
        offset: :math:`c`.
    """
    distance: Tensor = torch.linalg.vector_norm(deviations, dim=1, dtype=torch.float64)
    shrink = float(deviations.shape[1] ** -0.5)
    if peak is None and offset is None:
        return distance.pow(3) * (shrink**3 / 3)
    distance = distance * shrink
    wide = None if peak is None else peak[:, 0].double()
    distance = distance if wide is None else wide * distance
    distance = distance if offset is None else (distance - offset).clamp_min(0)
    cubes = distance.pow(3) / 3
    # No peak is negative, and a NaN is not below infinity.
    return cubes if wide is None else torch.where(wide < torch.inf, cubes, wide)


def from_nearest(products: Tensor, centers: Tensor, halves: Tensor, peak: Tensor | None) -> Tensor:
    """Deviations of rows from their nearest center, divided by ``peak``: ``(B, N)``.

    The arguments are those of :func:`nearest_cubes`.
    """
    rows, closeness = products.tensor_split([centers.shape[1]], dim=1)
    if len(centers) > 1:
        centers = centers.index_select(0, nearest(closeness, halves, peak))
    return rows - (centers if peak is None else centers / peak)


def nearest(closeness: Tensor, halves: Tensor, peak: Tensor | None) -> Tensor:
    r"""The number of the center that is nearest to each row, ``(B,)``.

    It has the largest :math:`z^\top c_k - \frac12 \|c_k\|^2`.

    Args:
        closeness: Products of the rows with the centers, ``(B, K)``, divided by ``peak``.
        halves: Half of each center's squared length, ``(K,)``.
        peak: ``(B, 1)``, or ``None`` for ones.
    """
    return (closeness - (halves if peak is None else halves / peak)).argmax(1)


class PackedLayers(Protocol):
    """The prototypes of several layers; :class:`rgpr._backend.small_layers.Packed` is that."""

    @property
    def layers(self) -> Mapping[int, Any]:
        """By the index of the representation, the tensors of its prototypes."""


@operation
def packed_cubes(rows: Sequence[Tensor], packed: PackedLayers) -> Tensor:
    """:func:`nearest_cubes` of ``L`` representations at once, ``(B, L)`` in float64.

    Layers are packed only for a kernel that takes all of them together. The reference takes one
    after the other.

    Args:
        rows: One ``(B, N)`` in float32 for each representation, in the order of ``packed.layers``,
            and not yet in the coordinates of the centers.
        packed: The prototypes of the representations.
    """
    columns = []
    for h, parts in zip(rows, packed.layers.values(), strict=True):
        divided, peak = peak_out(h - parts.origin)
        products = divided @ parts.onto
        columns.append(nearest_cubes(products, parts.centers, parts.halves, peak, parts.offset))
    return torch.stack(columns, 1)


@operation
def weighted_squares(rows: Tensor, matrix: Tensor, weights: Tensor) -> Tensor | None:
    r""":math:`\sum_m (h^\top q_m)^2 w_{mc}`, ``(B, C)`` in float64, or ``None``.

    In plain torch these are two products and what lies between them, and the first is needed for
    other answers, too. So the reference gives ``None``, and so does a kernel that would take no
    less time: then :mod:`rgpr.posteriors.last_layer_laplace` makes both products.

    Args:
        rows: :math:`h`, ``(B, N)``, with no entry above one in size.
        matrix: :math:`q_m` in its columns, ``(N, M)``.
        weights: :math:`w`, ``(M, C)``.
    """
    return None


@dataclass(slots=True)
class ProbitScales:
    """What :func:`fused_probit` takes from a model beside the outputs of one pass.

    Attributes:
        sigma2: The scale of each layer, ``(L,)`` in float64.
        onset: The number in float64 at which the variance sets in, or ``None`` if the variance is
            the sum over the layers. See :class:`rgpr.residual.variance.Residual`, also for the
            next two.
        slope: One number in float64.
        typical: The median ``u`` of each layer at the data, ``(L,)`` in float64.
        share: The weight of the arithmetic mean beside the geometric one.
        temperature: One number in float64, by which logits are divided.
        far: The ``u`` of the input beyond which a network may overflow.
    """

    sigma2: Tensor
    onset: Tensor | None
    slope: Tensor
    typical: Tensor
    share: float
    temperature: Tensor
    far: float


@operation
def fused_probit(mean: Tensor, variance: Tensor, u: Tensor, scales: ProbitScales) -> Tensor | None:
    """The probabilities that follow from one pass through the network, ``(B, C)``, or ``None``.

    In plain torch these are some forty small operations, whose launches take longer than their
    work on a GPU. A kernel gives the same up to rounding. The reference gives ``None``, and so does
    a kernel for rows it cannot take: then :meth:`rgpr.RGPR.forward` composes the probabilities of
    :class:`rgpr.residual.variance.Residual`, the limits of :mod:`rgpr.answers.probabilities` and
    :mod:`rgpr.posteriors.links`. These are the reference. They are not written out here because
    every other answer uses the same formulas, and because they import this module.

    Args:
        mean: The mean of the outputs, ``(B, C)``, in the dtype of the answer.
        variance: Their variance in the base, ``(B, C)`` in float64.
        u: The unit variance of each layer, ``(B, L)`` in float64.
        scales: What the model has learned.
    """
    return None


@operation
def add_moments(h: Tensor, near: Tensor, total: Tensor, squares: Tensor) -> None:
    r"""Add :math:`\sum_b (h_b - m)` to ``total`` and :math:`\sum_b (h_b - m)^2` to ``squares``.

    Args:
        h: The rows, ``(B, ...)`` with ``N`` entries each.
        near: :math:`m`, ``(N,)``, in the dtype to compute in.
        total: ``(N,)`` in float64, changed in place.
        squares: ``(N,)`` in float64, changed in place.
    """
    # The sum is taken of h itself, because the rounding of a deviation may be large beside the
    # mean deviation.
    total += h.sum(0, dtype=torch.float64).flatten() - len(h) * near.double()
    deviation = h - near.view(h.shape[1:])
    norm = torch.linalg.vector_norm(deviation, dim=0, dtype=torch.float64)
    squares += norm.square_().flatten()
