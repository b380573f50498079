"""The largest weight of the outliers that leaves validation data calibrated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..metrics import ece, nll
from .optimize import Optimum

__all__ = ["LARGEST_WEIGHT", "METRICS", "Trial", "largest_weight"]

METRICS = {"nll": nll, "ece": ece}
# The largest weight that is looked at ("outliers are everything") unless another is given, and
# how often it is divided by the root of ten (down to "hardly there").
LARGEST_WEIGHT, _STEPS = 100.0, 13
_BISECTIONS = 5


@dataclass(frozen=True)
class Trial:
    """One weight, and the increase of the metric that its optimum has."""

    weight: float
    increase: float


def largest_weight(
    solve: Callable[[float, Optimum | None], Optimum],
    spent: Callable[[Optimum], float],
    increase: float,
    largest: float = LARGEST_WEIGHT,
) -> tuple[float, Optimum, list[Trial]]:
    """From large weights down to the first within the budget, then halfway back up a few times.

    Args:
        solve: The optimum for a weight, given one to start from.
        spent: What an optimum costs.
        increase: What it may cost.
        largest: The first weight to try.

    Returns:
        The weight, zero if none is within the budget; its optimum; and what was tried.
    """
    trials: list[Trial] = []
    nearest: Optimum | None = None

    def attempt(weight: float) -> tuple[Optimum, bool]:
        optimum = solve(weight, nearest)
        cost = spent(optimum)
        trials.append(Trial(weight, cost))
        return optimum, cost <= increase

    too_large: float | None = None
    for weight in [largest / 10 ** (step / 2) for step in range(_STEPS)]:
        optimum, within = attempt(weight)
        nearest = optimum
        if within:
            break
        too_large = weight
    else:
        optimum, within = attempt(0.0)
        return 0.0, optimum, trials
    for _ in range(_BISECTIONS if too_large is not None else 0):
        assert too_large is not None
        middle = (weight * too_large) ** 0.5
        candidate, within = attempt(middle)
        if within:
            weight, optimum = middle, candidate
        else:
            too_large = middle
    return weight, optimum, trials
