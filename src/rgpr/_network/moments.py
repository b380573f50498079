r"""Streaming statistics of representations: one pass, whatever the size and order of the batches.

Sums are taken of deviations from a point near the data, the mean of the first batch (for a class,
of the first that has it), and kept in float64: what is subtracted in the end is small, so the
result does not depend on how the data were cut beyond rounding. Nothing here waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._backend.arithmetic import add_moments

__all__ = ["ClassMoments", "Moments"]

# Classes up to which their sums are a product with a matrix of ones and zeros.
_FEW = 64


class Moments:
    """Count, mean and sum of squared deviations of each unit, and its extremes if asked for."""

    def __init__(self) -> None:
        self.count = 0
        self.low = self.high = torch.zeros(0)
        self.resolution = 0.0
        self._near = torch.zeros(0)
        self._sum = self._squares = torch.zeros(0, dtype=torch.float64)

    def update(self, h: Tensor, *, extremes: bool = False) -> None:
        """Take in a batch of shape ``(B, ...)``; every entry of one example is a unit.

        Args:
            h: The batch.
            extremes: Keep the smallest and largest values too.
        """
        if len(h) == 0:
            return
        if self.count == 0:
            self._start(h.mean(0, dtype=torch.promote_types(h.dtype, torch.float32)).flatten())
        dtype = self._near.dtype
        if extremes:
            low, high = torch.aminmax(h.flatten(1).to(dtype), dim=0)
            self.low = torch.minimum(self.low, low) if self.count else low
            self.high = torch.maximum(self.high, high) if self.count else high
        self.resolution = max(self.resolution, torch.finfo(dtype).eps)
        self.count += len(h)
        add_moments(h, self._near, self._sum, self._squares)

    def merge(self, state: dict[str, Any]) -> None:
        """Take in another's; see :attr:`state`."""
        if state["count"] == 0:
            return
        if self.count == 0:
            self._start(state["mean"])
        if state["low"].numel():
            first = self.count == 0
            self.low = state["low"] if first else torch.minimum(self.low, state["low"])
            self.high = state["high"] if first else torch.maximum(self.high, state["high"])
        self.resolution = max(self.resolution, state["resolution"])
        self.count += state["count"]
        delta = state["mean"] - self._near
        self._sum += state["count"] * delta
        self._squares += state["squares"] + state["count"] * delta.square()

    @property
    def state(self) -> dict[str, Any]:
        """All there is to know of the data seen."""
        names = ("count", "mean", "squares", "low", "high", "resolution")
        return {name: getattr(self, name) for name in names}

    def _start(self, near: Tensor) -> None:
        self._near = near
        self._sum = torch.zeros_like(near, dtype=torch.float64)
        self._squares = torch.zeros_like(self._sum)

    @property
    def mean(self) -> Tensor:
        """Of each unit, ``(N,)`` in float64."""
        return self._near.double() + self._sum / max(self.count, 1)

    @property
    def squares(self) -> Tensor:
        """Sum of the squared deviations from the mean, ``(N,)``."""
        return (self._squares - self._sum.square() / max(self.count, 1)).clamp_min(0)

    @property
    def total(self) -> Tensor:
        """A number that is not finite if anything that came in was not."""
        return self._squares.sum()

    @property
    def std(self) -> Tensor:
        """Population standard deviation of each unit; zero for one that never varied."""
        std = (self.squares / max(self.count, 1)).sqrt()
        return torch.where(std <= 4 * self.resolution * self.mean.abs(), 0.0, std)


class ClassMoments:
    r"""Running class means and the scatter within classes, of features ``(B, D)`` with labels.

    .. math:: \mu_c = \frac{1}{n_c} \sum_{y_n = c} h_n, \qquad
              S = \sum_n (h_n - \mu_{y_n})(h_n - \mu_{y_n})^\top

    Args:
        classes: How many there are.
        diagonal: Keep the diagonal of the scatter alone.

    Attributes:
        counts: Examples of each class, ``(C,)``.
    """

    def __init__(self, classes: int, *, diagonal: bool = False) -> None:
        self.classes, self.diagonal = classes, diagonal
        self.counts = torch.zeros(0, dtype=torch.float64)
        self.resolution = 0.0
        self._near = self._sums = self._scatter = torch.zeros(0, dtype=torch.float64)

    def update(self, h: Tensor, y: Tensor) -> None:
        """Take in a batch of features and the class index of each."""
        if len(h) == 0:
            return
        coarse = torch.finfo(torch.float32).eps  # in which half precision is computed too
        self.resolution = max(self.resolution, min(coarse, torch.finfo(h.dtype).eps))
        h = h.double()
        by_class = self._sums_by_class(y, h)
        counts = by_class(h.new_ones(len(h), 1))[:, 0]
        self._welcome(counts, by_class(h) / counts.clamp_min(1)[:, None])
        deviations = h - self._near[y]
        self.counts += counts
        self._sums += by_class(deviations)
        if self.diagonal:
            self._scatter += deviations.square().sum(0)
        else:
            self._scatter.addmm_(deviations.T, deviations)

    def merge(self, state: dict[str, Any]) -> None:
        """Take in another's; see :attr:`state`."""
        if state["counts"].numel() == 0:
            return
        self.resolution = max(self.resolution, state["resolution"])
        self._welcome(state["counts"], state["means"])
        delta = state["means"] - self._near
        weighted = delta * state["counts"][:, None]
        self.counts += state["counts"]
        self._sums += weighted
        self._scatter += state["scatter"] + self._outer(delta, weighted)

    @property
    def state(self) -> dict[str, Any]:
        """All there is to know of the data seen."""
        names = ("counts", "means", "scatter", "resolution")
        return {name: getattr(self, name) for name in names}

    def _welcome(self, counts: Tensor, means: Tensor) -> None:
        """A class is measured from where it was first seen."""
        if self.counts.numel() == 0:
            width = means.shape[1]
            self._near, self._sums = torch.zeros_like(means), torch.zeros_like(means)
            self.counts = means.new_zeros(self.classes)
            self._scatter = means.new_zeros(width if self.diagonal else (width, width))
        new = (self.counts == 0) & (counts > 0)
        self._near = torch.where(new[:, None], means, self._near)

    def _sums_by_class(self, y: Tensor, like: Tensor) -> Callable[[Tensor], Tensor]:
        """What adds up the rows ``(B, D)`` of each class, ``(C, D)``."""
        if self.classes <= _FEW:
            # Adding many rows to few places is what a GPU is slowest at.
            members = (torch.arange(self.classes, device=y.device)[:, None] == y).to(like.dtype)
            return members.__matmul__
        return lambda h: h.new_zeros(self.classes, h.shape[1]).index_add_(0, y, h)

    def _outer(self, a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(0) if self.diagonal else a.T @ b

    @property
    def means(self) -> Tensor:
        """Mean of each class, ``(C, D)``; zero for one that was not seen."""
        counts = self.counts[:, None]
        return torch.where(counts > 0, self._near + self._sums / counts.clamp_min(1), 0.0)

    @property
    def scatter(self) -> Tensor:
        """Sum of the deviations' outer products, ``(D, D)``, or of their squares, ``(D,)``."""
        weighted = self._sums / self.counts.clamp_min(1)[:, None]
        return self._scatter - self._outer(self._sums, weighted)

    @property
    def total(self) -> Tensor:
        """A number that is not finite if anything that came in was not."""
        return self._scatter.sum() if self.diagonal else self._scatter.diagonal().sum()

    @property
    def covariance(self) -> Tensor:
        """Within classes, ``(D, D)`` or its diagonal ``(D,)``; zero for units that never varied."""
        covariance = self.scatter / self.counts.sum().clamp_min(1)
        variances = covariance if self.diagonal else covariance.diagonal()
        rounding = 4 * self.resolution * self.means.abs().amax(0)
        varied = variances > rounding.square()
        return torch.where(varied if self.diagonal else varied & varied[:, None], covariance, 0.0)
