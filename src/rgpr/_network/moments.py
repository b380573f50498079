r"""Streaming statistics of representations: one pass, whatever the size and order of the batches.

Sums are taken of deviations from a point near the data, the mean of the first batch (for a class,
its mean so far), and kept in float64: what is subtracted is small, so the result does not depend on
how the data were cut beyond rounding. Nothing here waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._backend.arithmetic import add_moments

__all__ = ["ClassMoments", "Moments"]

# Classes up to which their sums are a product with a matrix of ones and zeros.
_FEW = 64
# Classes that are merged at a time.
_ROWS = 1024


class Moments:
    """Count, mean and sum of squared deviations of each unit, and its extremes if asked for.

    Args:
        hidden: The units are those of a hidden layer; see :func:`usual_size`.
    """

    def __init__(self, *, hidden: bool = False) -> None:
        self.count, self.hidden = 0, hidden
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

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in another's; see :attr:`state`. Merged into nothing, it is the other to the bit."""
        count = state["count"]
        if count == 0:
            return
        first = self.count == 0
        if first:
            self._start(state["near"].clone())
        if state["low"].numel():
            self.low = state["low"] if first else torch.minimum(self.low, state["low"])
            self.high = state["high"] if first else torch.maximum(self.high, state["high"])
        self.resolution = max(self.resolution, state["resolution"])
        self.count += count
        # Sums of deviations from the other's point become sums of deviations from this one's.
        delta = state["near"].double() - self._near.double()
        self._squares += state["squares"] + delta * (2 * state["sum"] + count * delta)
        self._squares.clamp_min_(0)  # what cancels may leave rounding below zero
        self._sum += state["sum"] + count * delta

    @property
    def state(self) -> dict[str, Any]:
        """All there is to know of the data seen."""
        return {
            "count": self.count,
            "near": self._near,
            "sum": self._sum,
            "squares": self._squares,
            "low": self.low,
            "high": self.high,
            "resolution": self.resolution,
        }

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
        return torch.where(std <= self.rounding(self.mean), 0.0, std)

    def rounding(self, mean: Tensor) -> Tensor:
        """By how much rounding may move each unit, for means ``(..., N)`` of the units."""
        least = usual_size(self.mean) if self.hidden else 0.0
        return 4 * self.resolution * mean.abs().clamp_min(least)


def usual_size(values: Tensor) -> float:
    """The median of the absolute values of units that are not zero; zero if there is none.

    A hidden unit is a sum of terms that may cancel, and its rounding is that of the terms. They are
    about as large as its layer's other units.
    """
    sizes = values.abs()
    sizes = sizes[sizes > 0]
    return float(sizes.median()) if len(sizes) else 0.0


class ClassMoments:
    r"""Running class means and the scatter within classes, of features ``(B, D)`` with labels.

    .. math:: \mu_c = \frac{1}{n_c} \sum_{y_n = c} h_n, \qquad
              S = \sum_n (h_n - \mu_{y_n})(h_n - \mu_{y_n})^\top

    Args:
        classes: How many there are.
        diagonal: Keep the diagonal of the scatter alone.

    Attributes:
        counts: Examples of each class, ``(C,)``.
        means: Mean of each class, ``(C, D)``; zero for one that was not seen.
        scatter: Sum of the deviations' outer products, ``(D, D)``, or of their squares, ``(D,)``.
    """

    def __init__(self, classes: int, *, diagonal: bool = False) -> None:
        self.classes, self.diagonal = classes, diagonal
        self.counts = torch.zeros(0, dtype=torch.float64)
        self.means = self.scatter = torch.zeros(0, dtype=torch.float64)
        self.resolution = 0.0

    def update(self, h: Tensor, y: Tensor) -> None:
        """Take in a batch of features and the class index of each.

        The memory that it takes beside the means is that of a few batches, however many classes
        there are.
        """
        if len(h) == 0:
            return
        coarse = torch.finfo(torch.float32).eps  # in which half precision is computed too
        self.resolution = max(self.resolution, min(coarse, torch.finfo(h.dtype).eps))
        h = h.double()
        self._start(h)
        groups, group, added_up = self._by_class(y, h)
        counts, before = added_up(h.new_ones(len(h), 1))[:, 0], self.counts[groups]
        known = (before > 0)[:, None]
        # A class is measured from its mean so far, or from that of the batch that has it first.
        near = torch.where(known, self.means[groups], added_up(h) / counts.clamp_min(1)[:, None])
        deviations = h - near[group]
        sums = added_up(deviations)
        shift = sums / (before + counts).clamp_min(1)[:, None]
        if self.diagonal:
            self.scatter += deviations.square().sum(0)
        else:
            self.scatter.addmm_(deviations.T, deviations)
        self.scatter -= self._outer(sums, shift)
        self.counts.index_add_(0, groups, counts)
        self.means.index_add_(0, groups, torch.where(known, shift, near + shift))

    def merge(self, state: Mapping[str, Any]) -> None:
        """Take in another's; see :attr:`state`. Merged into nothing, it is the other to the bit."""
        counts, means = state["counts"], state["means"]
        if counts.numel() == 0:
            return
        self._start(means)
        self.resolution = max(self.resolution, state["resolution"])
        self.scatter += state["scatter"]
        # In parts, so that many classes do not take the memory of their means several times.
        for start in range(0, self.classes, _ROWS):
            rows = slice(start, start + _ROWS)
            before, theirs = self.counts[rows], counts[rows]
            delta = means[rows] - self.means[rows]
            shift = delta * (theirs / (before + theirs).clamp_min(1))[:, None]
            self.scatter += self._outer(delta * before[:, None], shift)
            # An unknown class has a mean of zero and takes the other's as it is.
            new = torch.where((theirs > 0)[:, None], delta, 0.0)
            self.means[rows] += torch.where((before > 0)[:, None], shift, new)
        self.counts += counts

    @property
    def state(self) -> dict[str, Any]:
        """All there is to know of the data seen."""
        names = ("counts", "means", "scatter", "resolution")
        return {name: getattr(self, name) for name in names}

    def _start(self, like: Tensor) -> None:
        if self.counts.numel() == 0:
            width = like.shape[1]
            self.counts = like.new_zeros(self.classes)
            self.means = like.new_zeros(self.classes, width)
            self.scatter = like.new_zeros(width if self.diagonal else (width, width))

    def _by_class(self, y: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """The classes ``(G,)`` of a batch in groups, each row's group, and what adds up groups.

        Of many classes there are as many groups as rows, since to ask a GPU how many classes came
        would mean to wait for it. Groups without a row stand for class 0, to which they add zeros.
        """
        if self.classes <= _FEW:
            # Adding many rows to few places is what a GPU is slowest at.
            groups = torch.arange(self.classes, device=y.device)
            members = (groups[:, None] == y).to(h.dtype)
            return groups, y, members.__matmul__
        ordered, order = y.sort(stable=True)
        group = torch.zeros_like(y)
        group[order[1:]] = (ordered[1:] != ordered[:-1]).cumsum(0)
        groups = torch.zeros_like(y).scatter_(0, group, y)
        return groups, group, lambda rows: torch.zeros_like(rows).index_add_(0, group, rows)

    def _outer(self, a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(0) if self.diagonal else a.T @ b

    @property
    def total(self) -> Tensor:
        """A number that is not finite if anything that came in was not."""
        return self.scatter.sum() if self.diagonal else self.scatter.diagonal().sum()

    @property
    def covariance(self) -> Tensor:
        """Within classes, ``(D, D)`` or its diagonal ``(D,)``; zero for units that never varied."""
        covariance = self.scatter / self.counts.sum().clamp_min(1)
        variances = covariance if self.diagonal else covariance.diagonal()
        low, high = self.means.aminmax(dim=0)
        sizes = torch.maximum(-low, high)
        rounding = 4 * self.resolution * sizes.clamp_min(usual_size(sizes))
        varied = variances > rounding.square()
        return torch.where(varied if self.diagonal else varied & varied[:, None], covariance, 0.0)
