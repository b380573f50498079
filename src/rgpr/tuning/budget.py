"""The largest weight of the outliers that leaves validation data calibrated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ..answers.examples import Parameters
from ..likelihoods import LabelLikelihood
from .objectives import Objective
from .optimize import Optimum
from .options import Options
from .search import Found, Trial, optimum, value
from .space import INPUT_FLOOR, Space

__all__ = ["largest_weight", "search_within_budget"]

# How often the largest weight is divided by the root of ten (down to "hardly there"), and how often
# the step between the last two of them is halved.
_STEPS, _BISECTIONS = 13, 5


def search_within_budget(
    objective: Objective, space: Space, now: Parameters, options: Options
) -> Found:
    """The optimum for the largest weight whose cost in a validation metric is within the budget.

    Args:
        objective: What is maximised; it takes outliers.
        space: Where to look.
        now: The present parameters.
        options: The budget and the largest weight.
    """
    [(metric, increase)] = options.budgets.items()
    validation = objective.validation
    if validation is None or not isinstance(validation.likelihood, LabelLikelihood):
        raise ValueError(
            f"objective='{objective.name}' keeps no predictions of the validation examples, which "
            f"max_{metric}_increase is about; leave the budget out, or make the objective a "
            "rgpr.tuning.PerExample"
        )
    likelihood = validation.likelihood
    measure = {"nll": likelihood.nll, "ece": likelihood.ece}[metric]
    base = replace(now, temperature=torch.ones_like(now.temperature)).without_residual()
    own = measure(validation.probabilities(base), validation.labels)

    def cost(parameters: Parameters) -> float:
        return measure(validation.probabilities(parameters), validation.labels) - own

    def solve(weight: float, near: Optimum | None) -> Optimum:
        return optimum(objective, space, now, weight, *([] if near is None else [near.z]))

    weight, best, trials = largest_weight(
        solve, lambda found: cost(space.parameters(found.z)), increase, options.weight
    )
    tuned = _within(cost, increase, space, space.parameters(best.z))
    before, after = (value(objective, parameters, weight) for parameters in (now, tuned))
    return Found(tuned, before, after, now, space, best, weight, trials)


def largest_weight(
    solve: Callable[[float, Optimum | None], Optimum],
    spent: Callable[[Optimum], float],
    increase: float,
    largest: float,
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
        optimum, _ = attempt(0.0)
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


def _within(
    cost: Callable[[Parameters], float], increase: float, space: Space, tuned: Parameters
) -> Parameters:
    """The tuned parameters, or as much of them as the budget allows."""
    share, found = 1.0, tuned
    floor = torch.zeros_like(tuned.sigma2)
    floor[0] = INPUT_FLOOR / space.typical[0]
    # Towards the base's own predictions, which cost nothing; the input keeps its floor.
    while cost(found) > increase and share > 1e-15:
        share /= 2
        sigma2 = torch.maximum(share * tuned.sigma2, floor)
        warmer = tuned.temperature if space.temperature is not None else tuned.temperature**share
        found = Parameters(sigma2, warmer, tuned.noise)
    return found
