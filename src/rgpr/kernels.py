r"""The double-sided cubic spline (DSCS) kernel and the ReLU features it is the limit of.

Infinitely many ReLU features that start at ``c`` and point to the right have the covariance

.. math:: \hat k^1(x, x'; c, \sigma^2) = \tfrac{\sigma^2}{6}\, m^2 (3 M - m),
          \quad m = \min(x, x') - c > 0,\; M = \max(x, x') - c,

and zero where ``m <= 0``. This equals the expanded polynomial of the paper, without its
cancellation: every factor is non-negative. Features on both sides of the origin add up to the
one-dimensional DSCS kernel, and the mean over dimensions to the kernel in many dimensions.

All functions are pure, take any floating dtype and device, broadcast, and are differentiable in
``x``, ``y`` and ``variance``. Half precision is computed in float32 and rounded once at the end.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

__all__ = ["cubic_spline", "dscs", "dscs_diag", "dscs_gram", "relu_features"]

# Entries of the largest temporary that `dscs_gram` makes. On a CPU it should fit the cache (six
# times faster than 16 MiB blocks), elsewhere it should be large enough to keep the device busy.
_GRAM_BLOCK = {"cpu": 1 << 19}
_GRAM_BLOCK_ELSEWHERE = 1 << 24


def cubic_spline(
    x: Tensor, y: Tensor, *, c_min: float | Tensor = 0.0, variance: float | Tensor = 1.0
) -> Tensor:
    """One-sided cubic spline kernel in one dimension, elementwise.

    Args:
        x: Any shape.
        y: Any shape that broadcasts with ``x``.
        c_min: Where the first ReLU feature starts; zero to its left.
        variance: The kernel's scale, sigma squared.

    Returns:
        The kernel's values, in the broadcast shape.

    Raises:
        TypeError: ``x`` or ``y`` is not a floating-point tensor.

    >>> cubic_spline(torch.tensor([-1.0, 1.0, 3.0]), torch.tensor(2.0))
    tensor([0.0000, 0.8333, 4.6667])
    """
    x, y, dtype = _common(x, y)
    a, b = x - c_min, y - c_min
    m = torch.minimum(a, b)
    k = torch.where(m > 0, m * m * (3 * torch.maximum(a, b) - m) / 6, 0.0)
    return (variance * k).to(dtype)


def dscs(
    x: Tensor, y: Tensor, *, variance: float | Tensor = 1.0, offset: float | Tensor = 0.0
) -> Tensor:
    """Double-sided cubic spline kernel: the mean over the last dimension.

    Args:
        x: ``(..., N)``, finite.
        y: ``(..., N)``, finite; leading dimensions broadcast.
        variance: The kernel's scale, sigma squared; broadcasts with the result.
        offset: Distance from the origin at which the features start, non-negative; a number or
            a tensor that broadcasts with ``(..., N)``. Zero is the paper's kernel.

    Returns:
        ``(...)``.

    Raises:
        TypeError: ``x`` or ``y`` is not a floating-point tensor.
        ValueError: The last dimensions differ, or ``offset`` is a negative number.

    >>> dscs(torch.tensor([1.0, -2.0]), torch.tensor([3.0, -2.0]))
    tensor(2.)
    """
    x, y, dtype = _common(x, y)
    _check_features(x, y)
    _check_offset(offset)
    return (variance * _dscs(x, y, offset)).to(dtype)


def dscs_diag(
    x: Tensor,
    *,
    variance: float | Tensor = 1.0,
    offset: float | Tensor = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``k(x, x)``, the variance of the process at ``x``: the mean of ``(|x_i| - offset)^3 / 3``.

    The largest coordinate is taken out before cubing and put back in float64, so with
    ``dtype=torch.float64`` float32 inputs up to the largest float32 give a finite answer, where
    plain cubing overflows from about 7e12.

    Args:
        x: ``(..., N)``.
        variance: The kernel's scale, sigma squared; broadcasts with the result.
        offset: As in :func:`dscs`.
        dtype: The dtype of the answer; that of ``x`` by default.

    Returns:
        ``(...)``; infinite for an infinite coordinate.

    Raises:
        TypeError: ``x`` is not a floating-point tensor.
        ValueError: ``offset`` is a negative number.

    >>> dscs_diag(torch.tensor([[1.0, -2.0], [3e30, 0.0]]), dtype=torch.float64)
    tensor([1.5000e+00, 4.5000e+90], dtype=torch.float64)
    """
    x, _, own = _common(x, x)
    _check_features(x, x)
    _check_offset(offset)
    distance = x.abs()
    if isinstance(offset, Tensor) or offset > 0:
        distance = (distance - offset).clamp_min(0)
    return (variance * mean_cube_(distance) / 3).to(dtype or own)


def dscs_gram(
    X: Tensor,
    Y: Tensor | None = None,
    *,
    variance: float | Tensor = 1.0,
    offset: float | Tensor = 0.0,
) -> Tensor:
    """The kernel matrix of two sets of points, in bounded extra memory.

    Computed in blocks, so beside the answer only a few temporaries exist at a time, each of at
    most half a million numbers (16 million on a GPU) whatever ``n``, ``m`` and ``N``; gradients
    compute their block anew.

    Args:
        X: ``(..., n, N)``.
        Y: ``(..., m, N)``, or ``None`` for ``X`` itself.
        variance: The kernel's scale, sigma squared; a number or ``(...)``.
        offset: As in :func:`dscs`: a number or ``(N,)``.

    Returns:
        ``(..., n, m)``.

    Raises:
        TypeError: ``X`` or ``Y`` is not a floating-point tensor.
        ValueError: The last dimensions differ, a set is not a matrix, or ``offset`` is negative.

    >>> dscs_gram(torch.tensor([[1.0], [-1.0], [2.0]]))
    tensor([[0.3333, 0.0000, 0.8333],
            [0.0000, 0.3333, 0.0000],
            [0.8333, 0.0000, 2.6667]])
    """
    X, Y, dtype = _common(X, X if Y is None else Y)
    _check_offset(offset)
    for name, points in (("X", X), ("Y", Y)):
        if points.dim() < 2:
            raise ValueError(
                f"{name} has shape {tuple(points.shape)}; expected (..., points, N). "
                "For single points use dscs."
            )
    _check_features(X, Y)
    (n, N), m = X.shape[-2:], Y.shape[-2]
    batch = torch.broadcast_shapes(X.shape[:-2], Y.shape[:-2])  # type: ignore[no-untyped-call]
    X = X.expand(*batch, n, N).reshape(batch.numel(), n, N)
    Y = Y.expand(*batch, m, N).reshape(batch.numel(), m, N)
    size = _GRAM_BLOCK.get(X.device.type, _GRAM_BLOCK_ELSEWHERE)
    side = max(1, math.isqrt(size // N))
    needs_grad = torch.is_grad_enabled() and (X.requires_grad or Y.requires_grad)
    gram = _gram_with_grad if needs_grad else _gram
    grams = [gram(x, y, offset, side) for x, y in zip(X, Y, strict=True)]
    k = torch.stack(grams).reshape(*batch, n, m) if grams else X.new_zeros(*batch, n, m)
    if isinstance(variance, Tensor):
        variance = variance[..., None, None]
    return (variance * k).to(dtype)


def relu_features(x: Tensor, k: int, *, c_max: float) -> Tensor:
    r"""The finite construction behind the kernel: ``k`` ReLU features, half on each side.

    Feature ``i`` of a side is :math:`\sqrt{c_\max / (k/2)}\,\max(0, \pm x - c_i)` with
    ``k / 2`` starts ``c_i`` spread evenly over ``[0, c_max]``. The factor is the prior standard
    deviation of the weights, so ``relu_features(x) @ relu_features(y)`` is the covariance of the
    Bayesian linear model, and converges to ``dscs`` at rate ``1 / k`` wherever
    ``|x|, |y| <= c_max``. For every finite ``k`` it grows only quadratically beyond ``c_max``.

    Args:
        x: Any shape.
        k: Number of features, even.
        c_max: Where the last feature starts.

    Returns:
        ``(..., k)``: first the features that point right, then those that point left.

    Raises:
        TypeError: ``x`` is not a floating-point tensor.
        ValueError: ``k`` is odd or below 2, or ``c_max`` is not positive.

    >>> relu_features(torch.tensor(1.0), 4, c_max=2.0)
    tensor([1., 0., 0., 0.])
    """
    x, _, dtype = _common(x, x)
    if k < 2 or k % 2:
        raise ValueError(f"k = {k} features cannot be shared by two sides; use an even k >= 2")
    if not c_max > 0:
        raise ValueError(f"c_max = {c_max} must be positive: features start in [0, c_max]")
    starts = torch.linspace(0, c_max, k // 2, dtype=x.dtype, device=x.device)
    sided = torch.cat([x[..., None] - starts, -x[..., None] - starts], dim=-1)
    return (math.sqrt(c_max / (k // 2)) * sided.clamp_min(0)).to(dtype)


def mean_cube_(distance: Tensor) -> Tensor:
    """The mean of cubes over the last dimension, in float64; uses up its non-negative argument.

    In place, since memory is what this costs: for most networks it is the whole of the residual.
    """
    # A constant for autograd: the value does not depend on it.
    peak = distance.detach().amax(-1, keepdim=True)
    # Zero and infinity divide to nan; scale those rows by one instead.
    peak = torch.where((peak > 0) & (peak < torch.inf), peak, 1.0)
    cubes = distance.div_(peak).pow_(3).mean(-1)
    return peak.squeeze(-1).double() ** 3 * cubes.double()


def _dscs(x: Tensor, y: Tensor, offset: float | Tensor) -> Tensor:
    """Kernel with unit variance. With both sides' ``m`` in one expression no mask is needed."""
    # Distances beyond the offset, with the side as their sign.
    x = x.sign() * (x.abs() - offset).clamp_min(0)
    y = y.sign() * (y.abs() - offset).clamp_min(0)
    # In place, since the temporaries are what this costs: ten times faster than without.
    m = torch.minimum(x, y).clamp_min_(0).sub_(torch.maximum(x, y).clamp_max_(0))
    # 3 M - m = 3 (M + m) - 4 m, without cancellation since M >= m.
    k = (x.abs() + y.abs()).mul_(3).sub_(m, alpha=4).mul_(m).mul_(m)
    return k.mean(-1) / 6


def _gram(x: Tensor, y: Tensor, offset: float | Tensor, side: int) -> Tensor:
    """Unit-variance kernel matrix, block by block into the answer's own memory."""
    k = x.new_empty(len(x), len(y))
    for i in range(0, len(x), side):
        for j in range(0, len(y), side):
            k[i : i + side, j : j + side] = _dscs(
                x[i : i + side, None], y[None, j : j + side], offset
            )
    return k


def _gram_with_grad(x: Tensor, y: Tensor, offset: float | Tensor, side: int) -> Tensor:
    """The same for autograd, which keeps every block's inputs and computes the rest anew."""
    return torch.cat(
        [
            torch.cat(
                [
                    checkpoint(_dscs, rows[:, None], columns[None], offset, use_reentrant=False)
                    for columns in torch.split(y, side)
                ],
                dim=1,
            )
            for rows in torch.split(x, side)
        ]
    )


def _common(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, torch.dtype]:
    """Both tensors in one computing dtype (at least float32), and the dtype to answer in."""
    for t in (x, y):
        if not isinstance(t, Tensor) or not t.is_floating_point():
            kind = t.dtype if isinstance(t, Tensor) else type(t).__name__
            raise TypeError(f"the kernel takes floating-point tensors, not {kind}; use x.float()")
    dtype = torch.promote_types(x.dtype, y.dtype)
    compute = torch.promote_types(dtype, torch.float32)
    return x.to(compute), y.to(compute), dtype


def _check_features(x: Tensor, y: Tensor) -> None:
    if x.dim() == 0 or y.dim() == 0 or x.shape[-1] != y.shape[-1] or x.shape[-1] == 0:
        raise ValueError(
            f"shapes {tuple(x.shape)} and {tuple(y.shape)} must end in the same number of "
            "features, at least one"
        )


def _check_offset(offset: float | Tensor) -> None:
    # A tensor's values are not looked at: that would wait for the GPU at every call.
    if not isinstance(offset, Tensor) and not offset >= 0:
        raise ValueError(f"offset = {offset} must be at least 0: a distance from the origin")
