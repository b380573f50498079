"""MAP: the point-estimated network itself, with no variance of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._network.batches import Batch, first_part, rows_of, run
from .._network.outputs import outputs_of
from .base import Closed, Posterior, register_posterior
from .gaussian import DiagonalGaussian, Gaussian

__all__ = ["MAP"]


def _certain(mean: Tensor) -> Gaussian:
    return DiagonalGaussian(mean, torch.zeros((), device=mean.device))


class MAP(Posterior):
    """A trained network as it is. All uncertainty then comes from the residual.

    Args:
        network: Any ``nn.Module`` that maps ``(B, ...)`` to ``(B, C)``.
    """

    kind = "map"

    def forward(self, x: Batch) -> Gaussian:
        returned = self.network(x) if isinstance(x, Tensor) else run(self.network, x)
        return _certain(outputs_of(returned, x, self.output))

    @property
    def closed(self) -> Closed | None:
        return Closed(_certain)

    def mean_parts(self) -> list[tuple[nn.Module, float]]:
        return [(self.network, 1.0)]

    @property
    def is_certain(self) -> bool:
        return True

    def covariances(self, x: Batch) -> Tensor:
        rows, device = rows_of(x), first_part(x).device
        return torch.zeros(1, rows, rows, dtype=torch.float64, device=device)


register_posterior("torch.nn.modules.module.Module", MAP)
