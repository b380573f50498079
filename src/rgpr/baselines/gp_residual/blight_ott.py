"""Blight and Ott (1975): a polynomial, and an RBF kernel on its inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import torch
from gpytorch.kernels import Kernel
from torch import Tensor, nn

from ..._network.loaders import labelled
from ..._network.sources import as_batches, check_read_again
from ...posteriors.gaussian_processes import regression_targets
from .base import GPResidual
from .kernels import rbf

__all__ = ["BlightOtt"]


class BlightOtt(GPResidual):
    """Polynomial regression with a GP for its residual; it brings its own mean."""

    @classmethod
    def kernel(cls, inputs: int, outputs: int) -> Kernel:
        return rbf(range(inputs), outputs)

    @classmethod
    def fit(  # type: ignore[override]  # there is no network to be given
        cls,
        train_loader: Iterable[Any],
        likelihood: str = "regression",
        *,
        degree: int = 3,
        progress: bool = True,
        **options: Any,
    ) -> Self:
        """Fit the polynomial by least squares, then the GPs to its residuals.

        Args:
            train_loader: Yields ``(x, y)`` with targets ``(B,)`` or ``(B, C)``; read twice.
            likelihood: ``"regression"``.
            degree: The degree of the polynomial, which has powers of each input and no products.
            progress: Show a progress bar where there is a terminal.
            **options: As for :meth:`GPResidual.fit`.

        Raises:
            ValueError: Classification, or a negative degree.
        """
        if likelihood != "regression":
            raise ValueError(
                f"likelihood={likelihood!r}; a polynomial fitted by least squares is for "
                "regression. Use GPDSCS or RIO for classification"
            )
        if degree < 0:
            raise ValueError(f"degree = {degree} must be at least 0")
        check_read_again(train_loader, "BlightOtt.fit")
        train_loader = as_batches(train_loader)
        pairs = list(labelled(train_loader, progress=progress, description="polynomial"))
        x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        if not x.is_floating_point():
            raise TypeError(f"inputs have dtype {x.dtype}; use x.float()")
        polynomial = _Polynomial(x.flatten(1), regression_targets(y.to(x.device), len(x)), degree)
        return super().fit(polynomial, train_loader, likelihood, progress=progress, **options)


class _Polynomial(nn.Module):
    """Powers of the standardised inputs, weighted by least squares."""

    mean: Tensor
    scale: Tensor
    coefficients: Tensor

    def __init__(self, x: Tensor, y: Tensor, degree: int) -> None:
        super().__init__()
        self.degree = degree
        std = x.std(0, correction=0)
        self.register_buffer("mean", x.mean(0))
        self.register_buffer("scale", torch.where(std > 0, std, 1.0))
        # The solution of least norm, as constant inputs make columns that depend on others.
        solution = torch.linalg.pinv(self._powers(x)) @ y
        self.register_buffer("coefficients", solution.to(x.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self._powers(x.flatten(1)) @ self.coefficients.double()).to(x.dtype)

    def _powers(self, x: Tensor) -> Tensor:
        z = (x.double() - self.mean) / self.scale
        ones = z.new_ones(len(z), 1)
        return torch.cat([ones, *(z**power for power in range(1, self.degree + 1))], dim=1)
