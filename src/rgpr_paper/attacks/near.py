"""Attacks that start from correctly classified test inputs, in balls of three norms.

Four attacks for each norm and radius: on the base's confidence in a wrong class, on the model's, on
the model's while it must not be flagged, and, from inputs that are flagged, on the score. Each has
restarts: the first from the input itself with the most probable wrong class as target, the others
from random points of the ball with the next classes. The attack that must not be flagged starts
also, with small steps, from what the attack on the model found: it must not be weaker than one that
does not look at flags. The attacker may leave the range from 0 to 1, which makes attacks stronger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rgpr.model import RGPR

from .aims import Aim, answers, both, confident, unnoticed
from .ascent import Found, Schedule, ascend, best_of
from .regions import Ball
from .victims import Victim

__all__ = ["RADII", "Attack", "Effort", "near", "restarted", "wrong_classes"]

# Radii in units of the input, whose entries lie between 0 and 1.
RADII: dict[str, dict[str, tuple[float, ...]]] = {
    "digits": {
        "linf": (0.05, 0.1, 0.2, 0.3),
        "l2": (0.25, 0.5, 1.0, 2.0),
        "l1": (1.0, 2.0, 4.0, 8.0),
    },
    "mnist": {
        "linf": (0.05, 0.1, 0.2, 0.3),
        "l2": (0.5, 1.0, 2.0, 4.0),
        "l1": (5.0, 10.0, 20.0, 40.0),
    },
}


@dataclass(frozen=True)
class Effort:
    """How hard to try.

    Attributes:
        inputs: Number of inputs to start from.
        restarts: Number of attacks from each.
        steps: Steps of each attack.
        seed: Seed of everything random.
    """

    inputs: int
    restarts: int
    steps: int
    seed: int


@dataclass(frozen=True)
class Attack:
    """A model under attack, how its inputs are made of rows, and how hard to try."""

    model: RGPR
    place: Callable[[Tensor], Tensor]
    effort: Effort


def restarted(
    attack: Attack,
    aim: Callable[[Tensor], Aim],
    ball: Ball,
    y: Tensor | None,
    found: Found | None = None,
) -> Found:
    """The best of several attacks in each ball.

    Args:
        attack: What is attacked.
        aim: Makes the aim from the target class of each row.
        ball: The balls.
        y: The right class of each row, which is no target; all classes are targets without it.
        found: Points of the balls to start from as well, with small steps.
    """
    effort, model = attack.effort, attack.model
    generator = torch.Generator().manual_seed(effort.seed)
    start = [ball.center, *(ball.inside(generator) for _ in range(effort.restarts - 1))]
    first = [torch.full_like(ball.radius, 0.25)] * effort.restarts
    with torch.no_grad():
        log_p = answers(model, attack.place(ball.center)).log_p
        target = list(wrong_classes(log_p, y, effort.restarts))
        if found is not None:
            start.append(found.rows)
            first.append(torch.full_like(ball.radius, 0.01))
            log_p = answers(model, attack.place(found.rows)).log_p
            target += list(wrong_classes(log_p, y, 1))
    count = len(start)
    every = Ball(ball.center.repeat(count, 1), ball.radius.repeat(count, 1), ball.norm)
    schedule = Schedule(effort.steps, torch.cat(first), effort.seed)
    ended = ascend(model, aim(torch.cat(target)), every, torch.cat(start), attack.place, schedule)
    return best_of(ended, count)


def wrong_classes(log_p: Tensor, y: Tensor | None, restarts: int) -> Tensor:
    """The most probable classes but the right one, ``(restarts, B)``; all count without labels."""
    if y is not None:
        log_p = log_p.scatter(1, y[:, None], -torch.inf)
    order = log_p.argsort(1, descending=True).T
    return order[torch.arange(restarts) % (len(order) - 1)]


@dataclass(frozen=True)
class _Start:
    """Inputs of one kind in all balls of one norm; radii are the slower axis of the rows."""

    victim: Victim
    effort: Effort
    x: Tensor
    y: Tensor
    norm: str
    radii: tuple[float, ...]

    def attack(self, model: RGPR, kind: str, found: Found | None = None) -> Found:
        """The best of all restarts for every radius and input, and of one from what was found."""
        count = len(self.radii)
        center = self.x.flatten(1).double().repeat(count, 1)
        radius = torch.tensor(self.radii, dtype=torch.float64).repeat_interleave(len(self.x))
        ball = Ball(center, radius[:, None], self.norm)
        aims: dict[str, Callable[[Tensor], Aim]] = {
            "confident": confident,
            "both": both,
            "unnoticed": lambda target: unnoticed,
        }
        return restarted(
            Attack(model, self.victim.place, self.effort),
            aims[kind],
            ball,
            self.y.repeat(count),
            found,
        )

    def each(self, values: Tensor) -> list[Tensor]:
        """The values of each radius."""
        return list(values.double().reshape(len(self.radii), -1))


def near(victim: Victim, effort: Effort, radii: dict[str, tuple[float, ...]]) -> dict[str, Any]:
    """What attackers reach in every norm and radius.

    Args:
        victim: The model and its base.
        effort: How hard to try.
        radii: For each norm the radii of its balls.
    """
    ordinary = victim.right(False, effort.inputs, effort.seed)
    flagged = victim.right(True, effort.inputs, effort.seed)
    cells: dict[str, Any] = {}
    for norm, sizes in radii.items():
        start = _Start(victim, effort, *ordinary, norm, sizes)
        strange = _Start(victim, effort, *flagged, norm, sizes)
        columns = {**_on_confidence(victim, start), **_on_score(victim, strange)}
        cells[norm] = {
            f"{size:g}": {name: column[place] for name, column in columns.items()}
            for place, size in enumerate(sizes)
        }
    return {
        "inputs": len(ordinary[0]),
        "flagged inputs": len(flagged[0]),
        "accuracy": victim.accuracy(),
        "threshold": victim.threshold,
        "cells": cells,
    }


@torch.no_grad()
def _on_confidence(victim: Victim, start: _Start) -> dict[str, list[float]]:
    columns: dict[str, list[float]] = {}
    found: Found | None = None
    for name, model, kind in (
        ("base", victim.base, "confident"),
        ("model", victim.model, "confident"),
        ("both", victim.model, "both"),
    ):
        with torch.enable_grad():
            found = start.attack(model, kind, found if name == "both" else None)
        sure = found.worth.sigmoid()  # log-odds of the wrong class; zero where all are flagged
        fooled = sure > 0.5
        noticed = answers(victim.model, victim.place(found.rows)).flagged
        parts = zip(*(start.each(each) for each in (sure, fooled, noticed)), strict=True)
        for wrong, is_fooled, is_flagged in parts:
            for key, value in (
                ("confidence", wrong.mean()),
                ("highest", wrong.max()),
                ("fooled", is_fooled.mean()),
                ("fooled and flagged", (is_fooled * is_flagged).mean()),
            ):
                columns.setdefault(f"{name}, {key}", []).append(float(value))
    return columns


def _on_score(victim: Victim, start: _Start) -> dict[str, list[float]]:
    if not len(start.x):
        return dict.fromkeys(("passing", "lowest score"), [float("nan")] * len(start.radii))
    found = start.attack(victim.model, "unnoticed")
    return {
        "passing": [1 - float(part.mean()) for part in start.each(found.answers.flagged)],
        "lowest score": [float(part.min()) for part in start.each(found.answers.score)],
    }
