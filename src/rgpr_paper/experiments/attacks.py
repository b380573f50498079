"""Ours: what an attacker with gradients does to the confidence and to the score.

Projected gradient ascent against the default residual, over the network and over last-layer
Laplace: from correctly classified test inputs and from noise in balls of three norms, and at every
distance from the training data up to beyond the certified radius. The attacker knows the model and
its gradients, the score and the references of the flag. Flags are at 5 %, calibrated on held-out
data. One seed; the networks are small (:mod:`rgpr_paper.attacks.victims`), and no attack is proof
that a stronger one does not exist.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any

from ..attacks.far import beyond, far
from ..attacks.near import RADII, Effort, near
from ..attacks.noisy import noisy
from ..attacks.page import render
from ..attacks.victims import BASES, SETS, Victim, victim
from ..context import Context
from ..experiment import Experiment, register
from ..units import Result, run_units

__all__ = ["run"]

NAME = "attacks"
# Inputs, restarts and steps of the attacks in balls, and inputs and steps of those far away. From
# noise start a third of the inputs, with half of the steps.
_EFFORTS = {"digits": (32, 2, 1000, 6, 200), "mnist": (16, 2, 200, 3, 60)}
_SMALL = (6, 2, 20, 3, 10)
_FURTHEST = 1e6


def run(context: Context) -> None:
    """A unit for each set, base and kind of attack."""
    seed = context.seeds[0]
    for name in SETS:
        effort = _SMALL if context.small else _EFFORTS[name]
        units = {
            f"{name}-{base}-{kind}": partial(make, context, (name, base), effort)
            for base in BASES
            for kind, make in _KINDS.items()
        }
        run_units(context, NAME, units, seed=seed, effort=list(effort))


@lru_cache(maxsize=2)
def _victim(context: Context, name: str, base: str) -> Victim:
    return victim(SETS[name](context, context.seeds[0]), base)


def _near(context: Context, which: tuple[str, str], effort: tuple[int, ...]) -> Result:
    attacked = _victim(context, *which)
    hard = Effort(effort[0], effort[1], effort[2], context.seeds[0])
    return _about(which, near(attacked, hard, RADII[which[0]]))


def _noisy(context: Context, which: tuple[str, str], effort: tuple[int, ...]) -> Result:
    attacked = _victim(context, *which)
    hard = Effort(max(2, effort[0] // 3), effort[1], effort[2] // 2, context.seeds[0])
    return _about(which, noisy(attacked, hard, tuple(RADII[which[0]])))


def _far(context: Context, which: tuple[str, str], effort: tuple[int, ...]) -> Result:
    attacked = _victim(context, *which)
    hard = Effort(effort[3], 2, effort[4], context.seeds[0])
    typical = math.sqrt(attacked.shape.numel())
    powers = range(0, 4 * round(math.log10(_FURTHEST)) + 1, 4 if context.small else 1)
    found = far(attacked, hard, tuple(typical * 10 ** (p / 4) for p in powers))
    found["beyond, float32"] = beyond(attacked, hard)
    found["beyond, float64"] = beyond(victim(attacked.data.double(), which[1]), hard)
    return _about(which, found)


def _about(which: tuple[str, str], found: dict[str, Any]) -> Result:
    return {"set": which[0], "posterior": which[1], **found}


_KINDS = {"near": _near, "noise": _noisy, "far": _far}


register(
    Experiment(
        name=NAME,
        title="What an attacker with gradients can and cannot do",
        place=185,
        run=run,
        render=render,
    )
)
