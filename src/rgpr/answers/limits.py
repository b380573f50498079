"""Inputs so far away that numbers overflow, and inputs with NaN: what each row gets.

``u`` is float64 and no float32 value overflows it, but the network may overflow on the way. Where
the input itself is plainly far away, what overflowed counts as infinite, and the row gets the
limit: the uniform distribution, an infinite variance, an infinite score. A network that gives NaN
near its data is broken, and its NaN is shown, not covered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..posteriors.gaussian import Gaussian

__all__ = ["at_limit", "far", "finite_outputs", "known", "set_limit"]


def far(dtype: torch.dtype) -> float:
    """The ``u`` of the input beyond which a network that overflows was plainly driven too far.

    A mean of |z|^3 / 3 of 1e12 is some ten thousand standard deviations in every coordinate. Half
    precision overflows far earlier; there it is 1e3, fourteen of them.
    """
    return 1e12 if torch.finfo(dtype).max > 1e30 else 1e3


def known(u: Tensor, dtype: torch.dtype) -> Tensor:
    """``u`` ``(B, L)`` with infinity where a far-away input made a layer overflow.

    A row whose input holds a NaN is NaN throughout.
    """
    first = u[:, :1]
    overflowed = torch.where((first > far(dtype)) & u.isnan(), torch.inf, u)
    return torch.where(first.isnan(), torch.nan, overflowed)


def at_limit(u: Tensor, v: Tensor, good: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows to answer with the limit, ``(B,)``.

    Args:
        u: As the pass through the network gave it, ``(B, L)``.
        v: The residual's variance, ``(B,)``.
        good: Rows whose outputs are finite, ``(B,)``.
        dtype: Dtype of the input.
    """
    first = u[:, 0]
    broken = ~good | ~_finite(u).all(1)
    # Not isinf or isfinite, which ONNX knows for float32 alone: beyond it all would be infinite.
    infinite, boundless = first.abs() == torch.inf, v.abs() == torch.inf
    return infinite | (good & boundless) | (broken & (first > far(dtype)))


def finite_outputs(gaussian: Gaussian) -> Tensor:
    """Rows whose outputs are finite, ``(B,)``."""
    return _finite(gaussian.mean).all(1) & _finite(gaussian.variance).all(1)


def _finite(values: Tensor) -> Tensor:
    return values.abs() < torch.inf


def set_limit(probabilities: Tensor, limit: Tensor) -> Tensor:
    """The uniform distribution in rows at the limit."""
    return torch.where(limit[:, None], 1 / probabilities.shape[1], probabilities)
