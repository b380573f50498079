"""MAP: the point-estimated network itself, with no variance of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._network.outputs import outputs_of
from .base import Posterior, register_posterior
from .gaussian import DiagonalGaussian, Gaussian

__all__ = ["MAP"]


class MAP(Posterior):
    """A trained network as it is. All uncertainty then comes from the residual.

    Args:
        network: Any ``nn.Module`` that maps ``(B, ...)`` to ``(B, C)``.
    """

    kind = "map"

    def forward(self, x: Tensor) -> Gaussian:
        mean = outputs_of(self.network(x), x)
        return DiagonalGaussian(mean, torch.zeros((), device=mean.device))

    def mean_parts(self) -> list[tuple[nn.Module, float]]:
        return [(self.network, 1.0)]

    @property
    def is_certain(self) -> bool:
        return True

    def covariances(self, x: Tensor) -> Tensor:
        return torch.zeros(1, len(x), len(x), dtype=torch.float64, device=x.device)


register_posterior("torch.nn.modules.module.Module", MAP)
