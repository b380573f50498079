r"""The distance of :math:`h/\|h\|` to the :math:`k`-th nearest of the training data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..._backend.precision import full_precision
from ..._network.guards import evaluating
from .base import Detector, register_detector

__all__ = ["KNN"]


@register_detector("knn")
class KNN(Detector):
    r"""Distance to the :math:`k`-th nearest training example, by Sun et al. (2022).

    Penultimate features are scaled to length one. The search is exact.

    Ours, and not pytorch-ood's, because that searches on the CPU, through scikit-learn; the
    features are on the device, where a matrix product and a top-k find the neighbours.

    Args:
        network: A trained classifier that returns logits.
        k: Which neighbour counts.
    """

    # Distances held at a time: 2^26 float32 numbers are 256 MiB.
    _AT_ONCE = 2**26

    def __init__(self, network: nn.Module, k: int = 50) -> None:
        super().__init__(network)
        if k < 1:
            raise ValueError(f"k = {k}; expected the number of a neighbour, 1 or more")
        self.k = k
        self.bank: Tensor | None = None

    @torch.no_grad()
    def fit(self, train_loader: Iterable[Any], *, progress: bool = True) -> Self:
        """Keep the normalised features of all training examples.

        Raises:
            ValueError: Fewer examples than ``k``.
        """
        with evaluating(self.network) as modes, modes:
            rows = [
                _normalised(self._features(x)) for x, _ in self._batches(train_loader, progress)
            ]
        bank = torch.cat(rows) if rows else torch.zeros(0)
        if len(bank) < self.k:
            raise ValueError(
                f"{len(bank)} training examples have no {self.k}-th neighbour; lower k"
            )
        self.bank = bank
        return self

    def predict_features(self, features: Tensor) -> Tensor:
        if self.bank is None:
            raise RuntimeError("this KNN detector is not fitted; call fit(train_loader)")
        bank = self.bank
        scores = []
        for z in torch.split(_normalised(features), max(1, self._AT_ONCE // len(bank))):
            with full_precision(z):
                nearest = (z @ bank.T).topk(self.k, dim=1).indices[:, -1]
            # The product loses the digits of a small distance; the difference does not.
            scores.append((z.double() - bank[nearest].double()).norm(dim=1))
        return torch.cat(scores)


def _normalised(features: Tensor) -> Tensor:
    return F.normalize(features.to(torch.promote_types(features.dtype, torch.float32)))
