r"""Exact regression: hyperparameters by the marginal likelihood, then the posterior.

.. math:: \log p(y) = -\tfrac12 \|L^{-1} y\|^2 - \sum_i \log L_{ii} + \text{const}, \qquad
          L L^\top = K + \sigma^2 I.
"""

from __future__ import annotations

import torch
from gpytorch.kernels import Kernel
from torch import Tensor
from torch.nn import functional as F

from ...posteriors.gaussian_processes import GaussianProcesses
from .training_set import TrainingSet

__all__ = ["fit_exact"]

# Least variance of the noise, in units of the residuals' variance: keeps the matrix invertible.
_NOISE_FLOOR = 1e-4


def fit_exact(kernel: Kernel, data: TrainingSet, *, steps: int) -> GaussianProcesses:
    """GPs given all rows, their hyperparameters found by at most ``steps`` steps of L-BFGS."""
    points = data.points(slice(None))
    evidence = _Evidence(kernel.to(points), points, data.y)
    evidence.maximise(steps)
    with torch.no_grad():
        cholesky, weights, noise = evidence.state()
    return GaussianProcesses(
        evidence.kernel,
        points,
        cholesky,
        weights,
        None,
        scale=data.scale,
        shift=torch.zeros_like(data.scale),
        noise=data.scale.square() * noise,
    )


class _Evidence:
    """The marginal likelihood of the targets, as a function of the kernel and the noise.

    Args:
        kernel: The kernel, one for each output as its batch.
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
        """Change kernel and noise so that the targets are as likely as they can be."""
        self.optimizer = torch.optim.LBFGS(
            [self.raw_noise, *self.kernel.parameters()],
            max_iter=steps,
            line_search_fn="strong_wolfe",
        )
        with torch.enable_grad():
            self.optimizer.step(self._loss)  # type: ignore[no-untyped-call]

    def _loss(self) -> float:
        self.optimizer.zero_grad()
        cholesky, weights, _ = self.state()
        logs = cholesky.diagonal(dim1=-2, dim2=-1).log().sum()
        value = (0.5 * weights.square().sum() + logs) / len(self.points)
        value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach())
