r"""Upper bounds on the spectral norms of matrices and convolutions.

A convolution's norm is at most the least of several numbers. Each of them is valid for every size
of the image, every zero padding and every stride:

- Schur's test, :math:`\sqrt{\max_o \sum |w| \cdot \max_i \sum |w|}`;
- the norm of the kernel as a matrix ``(O, I K)``, times the root of how many windows share a pixel;
- the norm of the kernel as a matrix ``(O K, I)``, times the root of its number of taps ``K``;
- for small kernels, the largest norm of the Fourier symbol
  :math:`\hat w(\omega) = \sum_k w_k e^{i \omega k}` on a grid, plus what the symbol can change
  between two points of the grid. Zero padding compresses the convolution on the infinite grid, so
  its norm is not larger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Windows", "convolution_norm", "least_norm", "matrix_norm"]

# Fourier symbols are formed for kernels of at most so many numbers, on a grid of this side.
_SYMBOL, _GRID = 64 * 64 * 9, 32


@dataclass(frozen=True)
class Windows:
    """Where a convolution or a pooling looks.

    Attributes:
        kernel: Side of a window, one number or one for each dimension.
        stride: Step from one window to the next, likewise.
        dilation: Step from one tap to the next inside a window, likewise.
        dimensions: Number of dimensions of the image.
    """

    kernel: Any
    stride: Any
    dilation: Any
    dimensions: int

    def sharing(self) -> int:
        """Returns the largest number of windows that hold one pixel."""
        sides = zip(*map(self._each, (self.kernel, self.stride, self.dilation)), strict=True)
        return math.prod(math.ceil(k / s) if d == 1 else k for k, s, d in sides)

    def _each(self, value: Any) -> tuple[int, ...]:
        given = tuple(value) if isinstance(value, Sequence) else (int(value),)
        return given * self.dimensions if len(given) == 1 else given


def matrix_norm(matrices: Tensor) -> float:
    """Returns the largest spectral norm of matrices ``(..., M, N)``.

    The eigenvalues of the smaller product with the transpose are ten times faster to compute than
    the singular values. Squaring costs digits of the small singular values alone, and only the
    largest is needed.
    """
    if not matrices.numel():
        return 0.0
    wide = matrices.shape[-1] > matrices.shape[-2]
    gram = matrices @ matrices.mH if wide else matrices.mH @ matrices
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(gram)[..., -1].max())))


def least_norm(matrix: Tensor) -> float:
    """Returns a number that no bound of the norm of this matrix is below.

    The mean square of the singular values is the squared Frobenius norm over their number. The
    number is also below every bound of a convolution whose kernel this matrix is.
    """
    return float(matrix.norm()) / math.sqrt(max(1, min(matrix.shape)))


def convolution_norm(weight: Tensor, groups: int, windows: Windows, *, quick: bool) -> float:
    """Returns a bound on the norm of a convolution with zero padding.

    Args:
        weight: Kernel ``(O, I / groups, ...)`` in float64.
        groups: Number of groups of channels.
        windows: The convolution's windows.
        quick: Return a number that the bound is not below, without decomposing a matrix.
    """
    parts = weight.chunk(groups)
    if quick:
        return max(least_norm(part.flatten(1)) for part in parts)
    return max(_group_norm(part, windows.sharing()) for part in parts)


def _group_norm(weight: Tensor, sharing: int) -> float:
    outputs, inputs = weight.shape[:2]
    flat = weight.flatten(2)
    taps = flat.shape[2]
    bounds = [
        _schur(weight),
        matrix_norm(weight.flatten(1)) * math.sqrt(sharing),
        matrix_norm(flat.transpose(1, 2).reshape(outputs * taps, inputs)) * math.sqrt(taps),
    ]
    if weight.dim() <= 4 and weight.numel() <= _SYMBOL:
        bounds.append(_symbol(weight))
    return min(bounds)


def _schur(weight: Tensor) -> float:
    size = weight.abs()
    rows, columns = size.flatten(1).sum(1).max(), size.transpose(0, 1).flatten(1).sum(1).max()
    return math.sqrt(float(rows) * float(columns))


def _symbol(weight: Tensor) -> float:
    """Returns the symbol's largest norm on the grid, plus its steepest slope times half a step."""
    outputs, inputs, *kernel = weight.shape
    positions = torch.cartesian_prod(*[torch.arange(k).double() - (k - 1) / 2 for k in kernel])
    positions = positions.reshape(-1, len(kernel)).to(weight.device)
    taps = weight.flatten(2).permute(2, 0, 1)  # (K, O, I)
    steps = torch.arange(_GRID, device=weight.device).double() * (2 * math.pi / _GRID)
    # A real kernel's symbol at minus a frequency is its conjugate, so half of the grid is enough.
    ranges = [steps[: _GRID // 2 + 1]] + [steps] * (len(kernel) - 1)
    grid = torch.cartesian_prod(*ranges).reshape(-1, len(kernel))
    phase = torch.exp(1j * (grid @ positions.T))  # (G, K)
    symbol = (phase @ taps.flatten(1).to(phase.dtype)).reshape(-1, outputs, inputs)
    largest = matrix_norm(symbol)
    norms = torch.stack([taps.new_tensor(matrix_norm(tap)) for tap in taps])
    # No frequency is further than half a step from the grid in each direction.
    slope = float((norms * positions.abs().sum(1)).sum())
    return largest + slope * math.pi / _GRID
