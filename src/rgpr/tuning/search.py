"""One search: the best parameters for an objective, and how much better they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from ..answers.examples import Parameters
from .objectives import Objective
from .optimize import Optimum, maximise
from .space import Space

__all__ = ["Found", "Trial", "optimum", "search", "value"]


@dataclass(frozen=True)
class Trial:
    """One weight of the outliers, and the increase of the metric that its optimum has."""

    weight: float
    increase: float


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
        tuned: The parameters.
        before: The objective's value at those that the model had.
        after: Its value at the tuned ones.
        now: The parameters that the model had.
        space: Where was looked.
        optimum: Where the climb ended.
        weight: The weight of the outliers, if there are any.
        trials: With a budget, the weights that were tried.
    """

    tuned: Parameters
    before: float
    after: float
    now: Parameters
    space: Space
    optimum: Optimum
    weight: float | None = None
    trials: list[Trial] = field(default_factory=list)


def search(objective: Objective, space: Space, now: Parameters, weight: float) -> Found:
    """The best parameters; those that there were if nothing is better.

    Args:
        objective: What is maximised.
        space: Where to look.
        now: The present parameters.
        weight: The weight of the outliers, for an objective that takes them.
    """
    best = optimum(objective, space, now, weight)
    before, tuned = value(objective, now, weight), space.parameters(best.z)
    after = value(objective, tuned, weight)
    if after < before:
        tuned, after = now, before
    given = weight if objective.takes_outliers else None
    return Found(tuned, before, after, now, space, best, given)


def optimum(
    objective: Objective, space: Space, now: Parameters, weight: float, *near: Tensor
) -> Optimum:
    """Climb from the usual starts, and from points that are near if there are any."""

    def function(z: Tensor) -> Iterable[Tensor]:
        return objective.parts(space.parameters(z), weight)

    starts = [*near, *space.starts(now)]
    count = len(space.typical)
    return maximise(function, starts, space.bounds, switchable=count, climbs=objective.starts)


def value(objective: Objective, parameters: Parameters, weight: float) -> float:
    """The objective's value at these parameters."""
    return sum(float(part) for part in objective.parts(parameters, weight))
