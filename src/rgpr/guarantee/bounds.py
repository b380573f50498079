"""How far apart two logits can be at a distance: the two bounds behind a certificate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

__all__ = ["HeadBound", "InputKernel", "LipschitzBound"]


_FURTHEST = 1e30
# Roundings of the bounds themselves.
_SLACK = 1 + 1e-6


@dataclass(frozen=True)
class InputKernel:
    """The variance that the input alone guarantees at a distance.

    Attributes:
        entries: ``N``.
        weight: ``g_0``.
        start: ``kappa``.
        offset: The 3-norm of the offsets.
    """

    entries: int
    weight: float
    start: float
    offset: float

    def at(self, distance: float) -> float:
        """``g_0 u_0 - kappa``, at least, at this distance; it may be negative."""
        beyond = max(0.0, distance * self.shrink - self.offset)
        return self.weight * beyond * beyond * beyond / (3 * self.entries) - self.start

    def distance(self, value: float) -> float:
        """The smallest distance from which on :meth:`at` is at least this value."""
        if value + self.start <= 0:
            return 0.0
        beyond = math.cbrt(3 * self.entries * (value + self.start) / self.weight)
        return (beyond + self.offset) / self.shrink

    @property
    def shrink(self) -> float:
        """What is left of the Euclidean length, at the least, in the 3-norm."""
        return float(self.entries ** (-1 / 6))


class _Bound:
    """How far apart two logits can be at a distance or further.

    A subclass gives one of the two methods. The other is its inverse, which is found by halving:
    both fall with what they are given.
    """

    kernel: InputKernel

    def gap(self, distance: float) -> float:
        """The largest ``D`` at this distance or any larger one; infinite if none is known."""
        return _crossing(lambda gap: self.radius(gap) <= distance)

    def radius(self, gap: float) -> float:
        """The distance beyond which no ``D`` exceeds ``gap``; infinite if there is none."""
        return _crossing(lambda distance: self.gap(distance) <= gap)


@dataclass(frozen=True)
class LipschitzBound(_Bound):
    """From the growth of the outputs: ``(start + slope * distance)`` over the root.

    Attributes:
        kernel: The input's.
        slope: Growth of the gap for each standardised unit, divided by the temperature.
        start: The gap at the mean of the training inputs, divided by the temperature.
    """

    kernel: InputKernel
    slope: float
    start: float

    def gap(self, distance: float) -> float:
        distance = max(distance, self._peak)
        reach = self.start + self.slope * distance
        # At no finite distance does a variance that is all but zero reach its peak.
        return (
            reach / math.sqrt(1 + max(0.0, self.kernel.at(distance))) if reach < math.inf else reach
        )

    @cached_property
    def _peak(self) -> float:
        """Where the quotient is largest.

        Before the variance sets in, at ``kernel.distance(0)``, the quotient rises. From there on
        its derivative in ``s = distance * shrink - offset`` has the sign of a number that falls
        with ``s``, so the quotient rises up to one point, if at all, and falls beyond it.
        """
        kernel = self.kernel
        a = kernel.weight / (3 * kernel.entries)
        slope = self.slope / kernel.shrink
        tail = self.start + slope * kernel.offset

        def falls(distance: float) -> bool:
            s = distance * kernel.shrink - kernel.offset
            rise = slope * (1 - kernel.start)
            return s >= 0 and rise <= 0.5 * slope * a * s * s * s + 1.5 * a * s * s * tail

        return max(kernel.distance(0.0), _crossing(falls))


@dataclass(frozen=True)
class HeadBound(_Bound):
    """From the head's own input: the gap grows by ``slope`` with its distance from an anchor.

    Attributes:
        kernel: The input's.
        slope: ``G_1``, divided by the temperature.
        start: ``G_0`` at the last layer's offset, divided by the temperature.
        weight: ``g_L``.
    """

    kernel: InputKernel
    slope: float
    start: float
    weight: float

    def radius(self, gap: float) -> float:
        G0, G1 = self.start, self.slope
        a = self.weight / 2 * gap * gap
        t = (G1 * G1 + math.sqrt(G1 * G1 * G1 * G1 + 4 * a * G0 * G1)) / (2 * a)
        A = (G0 + G1 * t) / gap * (G0 + G1 * t / 3) / gap
        found = self.kernel.distance(A - 1) * _SLACK
        return found if found <= _FURTHEST else math.inf


def _crossing(holds: Callable[[float], bool]) -> float:
    """The smallest number from which on a statement holds; zero or infinity beyond the range.

    Args:
        holds: Holds of all numbers beyond one of which it holds.
    """
    low, high = 1 / _FURTHEST, _FURTHEST
    if not holds(high):
        return math.inf
    if holds(low):
        return 0.0
    while low * (1 + 1e-14) < high:
        middle = math.sqrt(low) * math.sqrt(high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
