r"""Exact regression: maximise the marginal likelihood, then condition on all rows.

.. math:: \log p(y) = -\tfrac12 \|L^{-1} y\|^2 - \sum_i \log L_{ii} + \text{const}, \qquad
          L L^\top = K + \sigma^2 I.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from gpytorch.kernels import Kernel
from torch import Tensor
from torch.nn import functional as F

from ...posteriors.gaussian_processes import GaussianProcesses
from .training_set import TrainingSet

__all__ = ["fit_exact"]

# Smallest variance of the noise, in units of the residuals' variance. It keeps K + sigma^2 I
# invertible.
_NOISE_FLOOR = 1e-4


def fit_exact(kernel: Kernel, data: TrainingSet, *, steps: int) -> GaussianProcesses:
    """GPs conditioned on all rows.

    Args:
        kernel: A gpytorch kernel with batch shape ``(C,)``; its parameters are learned.
        data: The training set, for regression.
        steps: Largest number of L-BFGS steps that learn the kernel and the noise.
    """
    points = data.points(slice(None))
    evidence = _Evidence(kernel.to(points), points, data.y)
    evidence.maximise(steps)
    with torch.no_grad():
        cholesky, weights, noise = evidence.state()
    units = replace(data.units, noise=data.scale.square() * noise)
    return GaussianProcesses(evidence.kernel, points, cholesky, weights, None, units)


class _Evidence:
    """The marginal likelihood of the targets, as a function of the kernel and the noise.

    Args:
        kernel: A gpytorch kernel with batch shape ``(C,)``.
        points: Points ``(N, P)``.
        y: Targets ``(N, C)``.
    """

    def __init__(self, kernel: Kernel, points: Tensor, y: Tensor) -> None:
        self.kernel, self.points, self.y = kernel, points, y
        self.raw_noise = points.new_full((y.shape[1],), -2.0).requires_grad_()
        self.identity = torch.eye(len(points), dtype=points.dtype, device=points.device)
        self.optimizer: torch.optim.LBFGS

    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        """The factor ``L (C, N, N)``, the weights ``L^{-1} y (C, N)`` and the noise ``(C,)``."""
        noise = F.softplus(self.raw_noise) + _NOISE_FLOOR
        K = self.kernel(self.points).to_dense() + noise[:, None, None] * self.identity
        cholesky = torch.linalg.cholesky(K)
        targets = self.y.T[..., None]
        weights = torch.linalg.solve_triangular(cholesky, targets, upper=False).squeeze(-1)
        return cholesky, weights, noise

    def maximise(self, steps: int) -> None:
        """Learn the kernel's parameters and the noise by at most ``steps`` steps of L-BFGS."""
        self.optimizer = torch.optim.LBFGS(
            [self.raw_noise, *self.kernel.parameters()],
            max_iter=steps,
            line_search_fn="strong_wolfe",
        )
        with torch.enable_grad():
            self.optimizer.step(self._loss)  # type: ignore[no-untyped-call]

    def _loss(self) -> float:
        """The negative marginal likelihood per row, up to a constant; it also sets gradients."""
        self.optimizer.zero_grad()
        cholesky, weights, _ = self.state()
        logs = cholesky.diagonal(dim1=-2, dim2=-1).log().sum()
        value = (0.5 * weights.square().sum() + logs) / len(self.points)
        value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach())
