r"""Betting against exchangeability: a martingale from p-values, and since when it grows.

If inputs are exchangeable with the references, the p-values of :mod:`rgpr.audit.monitor.ranks` are
independent and uniform. A player starts with a capital of 1 and multiplies what lies on bet ``k``
by a density :math:`f_k` of the next p-value. A density integrates to one, so the expected capital
stays 1 whatever the player did before: the capital is a martingale, never negative, and Ville's
inequality says

.. math:: P\Big(\sup_n M_n \ge \frac1\alpha\Big) \le \alpha .

**The bets** are densities of the Beta distribution, which are written with two exponents:

.. math:: f_{a,b}(p) = \frac{p^{a-1} (1-p)^{b-1}}{B(a, b)}, \qquad \int_0^1 f_{a,b}(p)\,dp = 1 .

Small p-values are strange inputs. Five bets win on too many of these, from weak drifts to strong
ones, three on too few, and one on too many at both ends.

**The jumper.** At first all of the capital sleeps, and does not bet. Before input ``t`` a part of
what sleeps wakes up and is spread evenly over the bets:

.. math:: \rho_t = 1 - \frac{r_t}{r_{t-1}}, \qquad r_t = \frac{\log 10}{\log(10 + t)} .

The shares :math:`r_t` that still sleep fall so slowly that a stream may be long and quiet, and most
of the capital is there when something happens. Capital that bets jumps at a rate ``J`` = 0.001: it
is spread evenly over the bets and sleep, so a drift may change its kind. Waking and jumping move
capital about and leave the sum as it is, so the sum stays a martingale.

**Since when.** For each bet we keep the largest sum of :math:`\log f_k(p_i)` over a run of inputs
that ends now (CUSUM), and where this run began. When the capital reaches its limit, the run of the
bet with the largest sum says where the drift began: the most likely moment, if p-values were
uniform before it and follow this bet after it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BETS", "JUMP", "Martingale", "advance", "bets", "start", "waking"]

# Exponents (a, b) of the Beta densities.
BETS = (
    (0.75, 1.0),
    (0.75, 1.5),
    (0.5, 1.0),
    (0.5, 2.0),
    (0.25, 2.0),
    (1.0, 0.75),
    (1.5, 0.75),
    (2.0, 0.5),
    (0.5, 0.5),
)
JUMP = 0.001
_WAKING = 10.0
# P-values keep this distance from 0 and 1, where densities are infinite. A p-value is nearer with
# a probability of 4e-16.
_EDGE = 2.0**-52

Array = NDArray[np.float64]


def bets(p: Array) -> Array:
    """The densities at p-values of any shape: ``(K, *p.shape)``."""
    p = np.clip(p, _EDGE, 1 - _EDGE)
    logs = np.log(p), np.log1p(-p)
    found = np.empty((len(BETS), *p.shape))
    for row, (a, b) in zip(found, BETS, strict=True):
        norm = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
        np.exp((a - 1) * logs[0] + (b - 1) * logs[1] - norm, out=row)
    return found


def waking(t: NDArray[np.int64]) -> Array:
    """Which share of what sleeps wakes up before input ``t``, counted from 1."""
    found: Array = 1 - np.log(_WAKING + t - 1) / np.log(_WAKING + t)
    return found


def start(streams: int) -> Array:
    """Where the capital of each stream lies at first, ``(1 + K, S)``: all of it sleeps."""
    shares = np.zeros((1 + len(BETS), streams))
    shares[0] = 1
    return shares


def advance(shares: Array, densities: Array, awake: Array | float) -> tuple[Array, Array]:
    """One input of each stream.

    Args:
        shares: Where the capital lies, ``(1 + K, S)``, what sleeps first; it sums to one.
        densities: Those of the bets at the p-values, ``(K, S)``.
        awake: What :func:`waking` says, ``(S,)`` or one number.

    Returns:
        Where the capital lies afterwards, and the logarithm of what it was multiplied by, ``(S,)``.
    """
    sleeping, betting = shares[0], shares[1:]
    woken = awake * sleeping
    moved = JUMP / len(shares) * betting.sum(0)
    after = np.empty_like(shares)
    np.multiply(betting, 1 - JUMP, out=after[1:])
    after[1:] += woken / len(BETS) + moved
    after[1:] *= densities
    after[0] = sleeping - woken + moved
    factor = after.sum(0)
    after /= factor
    return after, np.log(factor)


class Martingale:
    """The capital of several streams side by side, each with its limit.

    Everything is a natural logarithm but for positions, which count the inputs of a stream from 1.

    Args:
        limits: Logarithms of the capital at which each stream raises an alarm, ``(S,)``.
    """

    # Arrays that make up the state, all with the streams on the last axis.
    STATE = ("limits", "log", "peak", "shares", "count", "gains", "begun", "when", "since")

    def __init__(self, limits: Array) -> None:
        streams = len(limits)
        self.limits = np.asarray(limits, dtype=np.float64)
        self.log = np.zeros(streams)
        self.peak = np.zeros(streams)
        self.shares = start(streams)
        self.count = np.zeros(streams, dtype=np.int64)
        self.gains = np.zeros((len(BETS), streams))
        self.begun = np.ones((len(BETS), streams), dtype=np.int64)
        # Zero stands for never.
        self.when = np.zeros(streams, dtype=np.int64)
        self.since = np.zeros(streams, dtype=np.int64)

    def update(self, p: Array, streams: slice = slice(None)) -> Array:
        """Bet on p-values in their order.

        Args:
            p: ``(T, S)``.
            streams: Which streams they belong to, if not to all.

        Returns:
            The logarithm of the capital after each, ``(T, S)``.
        """
        densities = bets(p)
        logs = np.log(densities)
        path = np.empty(p.shape)
        for step in range(len(p)):
            self.count[streams] += 1
            count = self.count[streams]
            shares = self.shares[:, streams]
            shares, grown = advance(shares, densities[:, step], waking(count))
            self.shares[:, streams] = shares
            self.log[streams] += grown
            path[step] = self.log[streams]
            gains, begun = self.gains[:, streams], self.begun[:, streams]
            np.copyto(begun, count, where=gains <= 0)
            np.maximum(gains, 0, out=gains)
            gains += logs[:, step]
            self.peak[streams] = np.maximum(self.peak[streams], self.log[streams])
            if (self.log[streams] >= self.limits[streams]).any():
                self._raise(streams)
        return path

    def _raise(self, streams: slice) -> None:
        """Note where alarms were raised that were not raised before."""
        every = np.arange(len(self.limits))[streams]
        for each in every:
            if self.when[each] == 0 and self.log[each] >= self.limits[each]:
                self.when[each] = self.count[each]
                self.since[each] = self.begun[self.gains[:, each].argmax(), each]

    @property
    def state(self) -> dict[str, NDArray[Any]]:
        """All there is to keep, by name."""
        return {name: getattr(self, name) for name in self.STATE}

    @classmethod
    def of_state(cls, state: Mapping[str, NDArray[Any]]) -> Martingale:
        """The one with this state."""
        made = cls(state["limits"])
        for name in cls.STATE:
            setattr(made, name, np.array(state[name]))
        return made
