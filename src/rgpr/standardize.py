r"""Streaming statistics of representations: one pass, whatever the size and order of the batches.

Each batch is reduced around its own mean and merged by the pairwise rule of Chan, Golub and
LeVeque, in float64, so the result does not depend on how the data were cut beyond rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ClassMoments", "Moments", "StableBuffers"]


class StableBuffers(nn.Module):
    """A module whose own buffers follow ``.to(device)`` but keep their dtype.

    ``model.half()`` is about the speed of the network; statistics in half precision would be
    wrong rather than fast.
    """

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        kept = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in kept.items():
            moved = self._buffers[name]
            if buffer is not None and moved is not None:
                self._buffers[name] = buffer.to(moved.device)
        return self


class Moments:
    """Running mean, sum of squared deviations, smallest and largest value of each unit."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(0, dtype=torch.float64)
        self.squares = torch.zeros(0, dtype=torch.float64)
        self.low = self.high = torch.zeros(0)
        self.resolution = 0.0

    def update(self, h: Tensor, *, extremes: bool = False) -> None:
        """Take in a batch of shape ``(B, ...)``; every entry of one example is a unit.

        Args:
            h: The batch.
            extremes: Keep the smallest and largest values too.
        """
        h = h.flatten(1)
        if len(h) == 0:
            return
        h = h.to(torch.promote_types(h.dtype, torch.float32))
        if extremes:
            low, high = torch.aminmax(h, dim=0)
            self.low = torch.minimum(self.low, low) if self.count else low
            self.high = torch.maximum(self.high, high) if self.count else high
        mean = h.mean(0, dtype=torch.float64)
        # Deviations from the rounded mean, corrected for its rounding: no float64 copy of h.
        deviation = h - mean.to(h.dtype)
        drift = deviation.mean(0, dtype=torch.float64)
        squares = torch.linalg.vector_norm(deviation, dim=0, dtype=torch.float64).square()
        squares = (squares - len(h) * drift.square()).clamp_min(0)
        self.resolution = max(self.resolution, torch.finfo(h.dtype).eps)
        self._merge(len(h), mean, squares)

    def merge(self, state: dict[str, Any]) -> None:
        """Take in another's; see :attr:`state`."""
        if state["count"] == 0:
            return
        if state["low"].numel():
            first = self.count == 0
            self.low = state["low"] if first else torch.minimum(self.low, state["low"])
            self.high = state["high"] if first else torch.maximum(self.high, state["high"])
        self.resolution = max(self.resolution, state["resolution"])
        self._merge(state["count"], state["mean"], state["squares"])

    @property
    def state(self) -> dict[str, Any]:
        """All there is to know of the data seen."""
        names = ("count", "mean", "squares", "low", "high", "resolution")
        return {name: getattr(self, name) for name in names}

    def _merge(self, count: int, mean: Tensor, squares: Tensor) -> None:
        if self.count == 0:
            self.count, self.mean, self.squares = count, mean, squares
            return
        total = self.count + count
        delta = mean - self.mean
        self.mean = self.mean + delta * (count / total)
        self.squares = self.squares + squares + delta.square() * (self.count * count / total)
        self.count = total

    @property
    def std(self) -> Tensor:
        """Population standard deviation of each unit; zero for one that never varied."""
        std = (self.squares / max(self.count, 1)).sqrt()
        return torch.where(std <= 4 * self.resolution * self.mean.abs(), 0.0, std)


class ClassMoments:
    r"""Running class means and the scatter within classes, of features ``(B, D)`` with labels.

    .. math:: \mu_c = \frac{1}{n_c} \sum_{y_n = c} h_n, \qquad
              S = \sum_n (h_n - \mu_{y_n})(h_n - \mu_{y_n})^\top

    Attributes:
        counts: Examples of each class, ``(C,)``.
        means: Mean of each class, ``(C, D)``; zero for one that was not seen.
        scatter: Sum of the outer products of the deviations, ``(D, D)``; of their squares,
            ``(D,)``, if only the diagonal is kept.
    """

    def __init__(self, classes: int, *, diagonal: bool = False) -> None:
        self.classes, self.diagonal = classes, diagonal
        self.counts = torch.zeros(0, dtype=torch.float64)
        self.means = torch.zeros(0, dtype=torch.float64)
        self.scatter = torch.zeros(0, dtype=torch.float64)

    def update(self, h: Tensor, y: Tensor) -> None:
        """Take in a batch of features and the class index of each."""
        h = h.double()
        if self.counts.numel() == 0:
            self.counts = h.new_zeros(self.classes)
            self.means = h.new_zeros(self.classes, h.shape[1])
            self.scatter = h.new_zeros(h.shape[1:] if self.diagonal else 2 * h.shape[1:])
        # Of thousands of classes a batch holds a few.
        present, index, counts = torch.unique(y, return_inverse=True, return_counts=True)
        means = h.new_zeros(len(present), h.shape[1]).index_add_(0, index, h)
        means = means / counts[:, None]
        deviations = h - means[index]
        inner = deviations.square().sum(0) if self.diagonal else deviations.T @ deviations
        self._merge(present, counts.double(), means, inner)

    def merge(self, state: dict[str, Any]) -> None:
        """Take in another's; see :attr:`state`."""
        if state["counts"].numel() == 0:
            return
        if self.counts.numel() == 0:
            self.counts, self.means, self.scatter = (
                state[name].clone() for name in ("counts", "means", "scatter")
            )
            return
        present = state["counts"].nonzero()[:, 0]
        self._merge(present, state["counts"][present], state["means"][present], state["scatter"])

    @property
    def state(self) -> dict[str, Any]:
        """All there is to know of the data seen."""
        return {"counts": self.counts, "means": self.means, "scatter": self.scatter}

    def _merge(self, present: Tensor, counts: Tensor, means: Tensor, scatter: Tensor) -> None:
        before = self.counts[present]
        delta = means - self.means[present]
        share = (counts / (before + counts))[:, None]
        weighted = delta * share * before[:, None]
        between = (delta * weighted).sum(0) if self.diagonal else delta.T @ weighted
        self.scatter += scatter + between
        self.means[present] += delta * share
        self.counts[present] += counts

    @property
    def covariance(self) -> Tensor:
        """Within classes, ``(D, D)`` or its diagonal ``(D,)``."""
        return self.scatter / self.counts.sum().clamp_min(1)
