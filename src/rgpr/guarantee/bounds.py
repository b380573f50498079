r"""How far apart two probit logits can be at a distance: the two bounds behind a certificate.

Let :math:`\rho = \|z\|` be the distance of an input from the training mean in standardised units,
``N`` its number of entries and ``c`` the offsets of its kernel. By Hoelder and the triangle
inequality :math:`u_0 \ge \frac{1}{3N} (N^{-1/6} \rho - \|c\|_3)_+^3` (:class:`InputKernel`).
Whatever the residual, there are weights and a start with
:math:`v / s \ge (g_0 u_0 + g_L u_L - \kappa)_+`, where ``L`` is the head's own input
(:meth:`rgpr.residual.variance.Residual.guaranteed`). So no two probit logits are further apart than

.. math:: D = \frac{\text{gap of the means}}{T \sqrt{1 + (g_0 u_0 + g_L u_L - \kappa)_+}}.

**Lipschitz** (:class:`LipschitzBound`): the means satisfy :math:`\|m\| \le \|m_0\| + K \rho`, so
their gap is at most :math:`\sqrt2 (\|m_0\| + K \rho)`. The head's own variance is left out.

**Head** (:class:`HeadBound`): let ``t`` be how far the head's input is beyond the offsets of its
kernel. Then the gap is at most :math:`G_0 + G_1 t` and :math:`u_L \ge \frac13 t^3`
(:mod:`rgpr.guarantee.head`), so

.. math:: D^2 \le \max_{t \ge 0} \frac{(G_0 + G_1 t)^2}{A + B t^3}, \qquad
          A = 1 + g_0 u_0 - \kappa, \quad B = \tfrac13 g_L,

wherever :math:`A > 0`, since :math:`1 + (y)_+ \ge 1 + y`. The maximum falls as :math:`u_0` grows.
It lies where :math:`\frac32 B t^2 (G_0 + G_1 t) = G_1 (A + B t^3)`. Inserting one equation into the
other gives :math:`\frac32 B D^2 t^2 = G_1 (G_0 + G_1 t)`, a quadratic equation for ``t``, and
:math:`A = (G_0 + G_1 t)(G_0 + \frac13 G_1 t) / D^2`. So a wanted ``D`` gives ``t``, then
``A``, then the :math:`u_0` from which on ``D`` is not exceeded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

__all__ = ["FURTHEST", "SLACK", "GapBound", "HeadBound", "InputKernel", "LipschitzBound"]

# A radius beyond this distance counts as none.
FURTHEST = 1e30
# Covers the roundings of the bounds themselves.
SLACK = 1 + 1e-6


@dataclass(frozen=True)
class InputKernel:
    """The variance that the input alone guarantees at a distance.

    Attributes:
        entries: ``N``, the number of entries of one input.
        weight: ``g_0``, the weight of the input's ``u_0`` in the variance.
        start: ``kappa``, what is taken off the variance.
        offset: The 3-norm of the offsets of the input's kernel.
    """

    entries: int
    weight: float
    start: float
    offset: float

    def at(self, distance: float) -> float:
        """Returns the least ``g_0 u_0 - kappa`` at this distance; it may be negative."""
        beyond = max(0.0, distance * self.shrink - self.offset)
        return self.weight * beyond * beyond * beyond / (3 * self.entries) - self.start

    def distance(self, value: float) -> float:
        """Returns the smallest distance from which on :meth:`at` is at least this value."""
        if value + self.start <= 0:
            return 0.0
        beyond = math.cbrt(3 * self.entries * (value + self.start) / self.weight)
        return (beyond + self.offset) / self.shrink

    @property
    def shrink(self) -> float:
        """The least ratio of a vector's 3-norm to its Euclidean norm."""
        return float(self.entries ** (-1 / 6))


class GapBound:
    """How far apart two logits can be at a distance or further.

    A subclass gives one of the two methods. Both fall as their argument grows, so the other one is
    the inverse, and bisection finds it.
    """

    kernel: InputKernel

    def gap(self, distance: float) -> float:
        """Returns the largest ``D`` at this distance or beyond; infinite if none is known."""
        return _crossing(lambda gap: self.radius(gap) <= distance)

    def radius(self, gap: float) -> float:
        """Returns the distance beyond which no ``D`` exceeds ``gap``; infinite if there is none."""
        return _crossing(lambda distance: self.gap(distance) <= gap)


@dataclass(frozen=True)
class LipschitzBound(GapBound):
    """The bound from the growth of the outputs: ``start + slope * distance`` over the root.

    Attributes:
        kernel: The variance that the input guarantees.
        slope: Growth of the gap for each standardised unit, divided by the temperature.
        start: The gap at the mean of the training inputs, divided by the temperature.
    """

    kernel: InputKernel
    slope: float
    start: float

    def gap(self, distance: float) -> float:
        distance = max(distance, self._peak)
        reach = self.start + self.slope * distance
        if math.isinf(reach):
            return reach  # a variance that is all but zero has its peak at no finite distance
        return reach / math.sqrt(1 + max(0.0, self.kernel.at(distance)))

    @cached_property
    def _peak(self) -> float:
        """The distance at which the quotient is largest.

        Before the variance sets in, at ``kernel.distance(0)``, the quotient rises. Beyond that, its
        derivative in ``s = distance * shrink - offset`` has the sign of a number that falls as
        ``s`` grows. So the quotient rises up to one point, if at all, and falls beyond it.
        """
        return max(self.kernel.distance(0.0), _crossing(self._falls))

    def _falls(self, distance: float) -> bool:
        """Whether the derivative of the quotient is negative at this distance."""
        kernel = self.kernel
        a = kernel.weight / (3 * kernel.entries)
        s = distance * kernel.shrink - kernel.offset
        slope = self.slope / kernel.shrink
        tail = self.start + slope * kernel.offset
        rise = slope * (1 - kernel.start)
        return s >= 0 and rise <= 0.5 * slope * a * s * s * s + 1.5 * a * s * s * tail


@dataclass(frozen=True)
class HeadBound(GapBound):
    """The bound from the head's own input: the gap is at most ``G_0 + G_1 t``.

    Attributes:
        kernel: The variance that the input guarantees.
        slope: ``G_1``, divided by the temperature.
        start: ``G_0``, including the part of the offsets, divided by the temperature.
        weight: ``g_L``, the weight of the head's input in the variance.
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
        found = self.kernel.distance(A - 1) * SLACK
        return found if found <= FURTHEST else math.inf


def _crossing(holds: Callable[[float], bool]) -> float:
    """Returns the smallest number from which on a statement holds, by bisection.

    It returns zero or infinity if that number is below or beyond the range that is searched.

    Args:
        holds: The statement. If it holds for a number, it must hold for every larger number.
    """
    low, high = 1 / FURTHEST, FURTHEST
    if not holds(high):
        return math.inf
    if holds(low):
        return 0.0
    while low * (1 + 1e-14) < high:
        middle = math.sqrt(low) * math.sqrt(high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
