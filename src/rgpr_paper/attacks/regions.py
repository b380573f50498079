r"""Where an attacker may move: a ball around each input, or all that is far from the data.

Rows are flat, ``(B, N)``, and every row has a radius of its own, so that one batch holds several
radii. A region gives the nearest of its points, and the direction in which a step of length one
climbs most:

=========  =====================================  =================================================
region     nearest point                          steepest step for a gradient ``g``
=========  =====================================  =================================================
``linf``   every entry clipped                    :math:`\operatorname{sign} g`
``l2``     the deviation shortened                :math:`g / \|g\|_2`
``l1``     entries of the deviation moved towards the signs of the largest twentieth of the
           zero by the same amount (Duchi et      entries, since the single largest makes progress
           al., 2008)                             too slowly (Tramèr and Boneh, 2019)
outside    the row lengthened                     :math:`g / \|g\|_2`
=========  =====================================  =================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["NORMS", "Ball", "Outside", "Region", "length", "nearest_in_simplex_ball"]

NORMS = {"linf": torch.inf, "l2": 2.0, "l1": 1.0}
# The share of entries that a step in the 1-norm moves.
_MOVED = 0.05


def length(rows: Tensor, norm: str) -> Tensor:
    """The norm of each row, ``(B, 1)``."""
    found: Tensor = torch.linalg.vector_norm(rows, NORMS[norm], dim=1, keepdim=True)
    return found


class Region(ABC):
    """A set for each of ``B`` rows."""

    @property
    @abstractmethod
    def unit(self) -> Tensor:
        """The length that steps are measured in, ``(B, 1)``."""

    @abstractmethod
    def nearest(self, rows: Tensor) -> Tensor:
        """The point of the region that is nearest to each row in the Euclidean distance."""

    @abstractmethod
    def steepest(self, gradient: Tensor) -> Tensor:
        """The steps of length one along which the gradient climbs; zero where it is zero."""


@dataclass(frozen=True)
class Ball(Region):
    """All rows within a radius of the centre.

    Attributes:
        center: ``(B, N)``.
        radius: ``(B, 1)``.
        norm: ``"linf"``, ``"l2"`` or ``"l1"``.
    """

    center: Tensor
    radius: Tensor
    norm: str

    @property
    def unit(self) -> Tensor:
        return self.radius

    def nearest(self, rows: Tensor) -> Tensor:
        moved = rows - self.center
        if self.norm == "linf":
            moved = torch.maximum(torch.minimum(moved, self.radius), -self.radius)
        elif self.norm == "l2":
            moved = moved * (self.radius / length(moved, "l2").clamp_min(1e-300)).clamp_max(1)
        else:
            moved = nearest_in_simplex_ball(moved, self.radius)
        return self.center + moved

    def steepest(self, gradient: Tensor) -> Tensor:
        if self.norm == "linf":
            return gradient.sign()
        if self.norm == "l2":
            return _unit(gradient)
        count = max(1, round(_MOVED * gradient.shape[1]))
        largest = gradient.abs().topk(count, dim=1).indices
        chosen = torch.zeros_like(gradient).scatter(1, largest, 1.0)
        return chosen * gradient.sign() / count

    def inside(self, generator: torch.Generator) -> Tensor:
        """A random point of each ball."""
        drawn = torch.randn(self.center.shape, generator=generator, dtype=self.center.dtype)
        share = torch.rand(self.radius.shape, generator=generator, dtype=self.center.dtype)
        return self.center + share * self.radius * drawn / length(drawn, self.norm)


@dataclass(frozen=True)
class Outside(Region):
    """All rows that are at least a distance away from the origin.

    Attributes:
        distance: ``(B, 1)``, Euclidean.
    """

    distance: Tensor

    @property
    def unit(self) -> Tensor:
        return self.distance

    def nearest(self, rows: Tensor) -> Tensor:
        return rows * (self.distance / length(rows, "l2").clamp_min(1e-300)).clamp_min(1)

    def steepest(self, gradient: Tensor) -> Tensor:
        return _unit(gradient)


def nearest_in_simplex_ball(rows: Tensor, radius: Tensor) -> Tensor:
    """The nearest point to each row whose absolute values sum to at most the radius.

    Args:
        rows: ``(B, N)``.
        radius: ``(B, 1)``.
    """
    sizes = rows.abs().sort(1, descending=True).values
    count = torch.arange(1, rows.shape[1] + 1, device=rows.device)
    shift = (sizes.cumsum(1) - radius) / count
    kept = (sizes > shift).sum(1, keepdim=True).clamp_min(1)
    by = shift.gather(1, kept - 1).clamp_min(0)
    return rows.sign() * (rows.abs() - by).clamp_min(0)


def _unit(gradient: Tensor) -> Tensor:
    # The largest entry is divided out first, since squares of tiny gradients are zero.
    scaled = gradient / gradient.abs().amax(1, keepdim=True).clamp_min(1e-300)
    return scaled / length(scaled, "l2").clamp_min(1e-300)
