"""Projected gradient ascent, which keeps the best point that it met.

The length of a step falls geometrically over the run, so that an attack sees structure from the
size of its region down to a ten-thousandth of it. A row whose gradient vanishes or is not finite
takes a random step instead, since a flat spot must not end an attack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rgpr.model import RGPR

from .aims import Aim, Answers, answers
from .regions import Region

__all__ = ["Found", "Schedule", "ascend", "best_of"]

LEAST = 1e-4


@dataclass(frozen=True)
class Schedule:
    """How long an attack takes, and how far it steps.

    Attributes:
        steps: Number of steps.
        first: Length of the first step in units of the region, a number or ``(B, 1)``.
        seed: Seed of random steps.
    """

    steps: int
    first: float | Tensor = 0.25
    seed: int = 0

    def length(self, step: int) -> float | Tensor:
        """The length of one step in units of the region."""
        shrunk: float = LEAST ** (step / max(1, self.steps - 1))
        return self.first * shrunk


@dataclass(frozen=True)
class Found:
    """The best point of each row.

    Attributes:
        rows: ``(B, N)`` in float64; the start where no point was worth anything.
        worth: What the aim says of it, ``(B,)``; minus infinity where nothing was.
        answers: What the model says of it.
        highest: The largest confidence that any row had at any step.
    """

    rows: Tensor
    worth: Tensor
    answers: Answers
    highest: float


def ascend(
    model: RGPR,
    aim: Aim,
    region: Region,
    start: Tensor,
    place: Callable[[Tensor], Tensor],
    schedule: Schedule,
) -> Found:
    """Climb what the aim says, row by row, within the region.

    Args:
        model: The model under attack.
        aim: What to climb, and what is kept.
        region: Where rows may be.
        start: Rows ``(B, N)`` in float64, which are moved into the region first.
        place: Makes the model's inputs of rows, differentiably.
        schedule: Steps and their length.
    """
    generator = torch.Generator().manual_seed(schedule.seed)
    rows = region.nearest(start)
    best, worth = rows, torch.full((len(rows),), -torch.inf, dtype=torch.float64)
    highest = 0.0
    for step in range(schedule.steps + 1):
        rows = rows.detach().requires_grad_()
        found = answers(model, place(rows))
        climbed, value = aim(found)
        highest = max(highest, float(found.confidence.detach().nan_to_num(0.0).max()))
        better = value.detach() > worth
        worth = torch.where(better, value.detach(), worth)
        best = torch.where(better[:, None], rows.detach(), best)
        if step == schedule.steps:
            break
        # Rows do not touch each other, so one gradient of the sum is that of each.
        [gradient] = torch.autograd.grad(_finite(climbed).sum(), rows)
        drawn = torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)
        flat = ~gradient.isfinite().all(1, keepdim=True) | ~gradient.any(1, keepdim=True)
        along = region.steepest(torch.where(flat, drawn, gradient))
        with torch.no_grad():
            rows = region.nearest(rows + schedule.length(step) * region.unit * along)
    with torch.no_grad():
        return Found(best, worth, answers(model, place(best)), highest)


def best_of(found: Found, restarts: int) -> Found:
    """The best of several restarts, which are the slowest axis of the batch."""
    chosen = found.worth.reshape(restarts, -1).argmax(0)
    rows = chosen * (len(found.worth) // restarts) + torch.arange(len(chosen))
    said = found.answers
    return Found(
        found.rows[rows],
        found.worth[rows],
        Answers(said.log_p[rows], said.score[rows], said.flagged[rows]),
        found.highest,
    )


def _finite(values: Tensor) -> Tensor:
    """The values without those that are infinite or NaN, whose gradients would spoil nothing."""
    return torch.where(values.detach().isfinite(), values, 0.0)
