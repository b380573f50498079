"""Attacks that start from noise: uniform between 0 and 1, and that times 10 and 1000.

The ball around each noise has a share of the noise's own distance from the training mean as its
radius, in the norm of the ball. So an attacker with the share 0.9 may come to a tenth of the
distance, and one with 0.1 stays about as far away as the noise is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .aims import answers, both, confident, unnoticed
from .ascent import Found
from .near import Attack, Effort, restarted
from .regions import Ball, length
from .victims import Victim

__all__ = ["FACTORS", "SHARES", "noisy"]

FACTORS = (1, 10, 1000)
SHARES = (0.1, 0.5, 0.9)


def noisy(victim: Victim, effort: Effort, norms: tuple[str, ...]) -> dict[str, Any]:
    """What attackers reach from noise, by norm, scale of the noise and share of its distance.

    Args:
        victim: The model and its base.
        effort: How hard to try.
        norms: Norms of the balls.
    """
    generator = torch.Generator().manual_seed(effort.seed)
    drawn = torch.rand((effort.inputs, victim.shape.numel()), generator=generator).double()
    noise = torch.cat([factor * drawn for factor in FACTORS])
    cells: dict[str, Any] = {norm: _attacked(victim, effort, noise, norm) for norm in norms}
    return {"inputs": effort.inputs, "cells": cells}


def _attacked(victim: Victim, effort: Effort, noise: Tensor, norm: str) -> dict[str, Any]:
    center = noise.repeat(len(SHARES), 1)
    share = torch.tensor(SHARES, dtype=torch.float64).repeat_interleave(len(noise))[:, None]
    ball = Ball(center, share * length(center - victim.standards[0], norm), norm)
    found: dict[str, Found] = {}
    columns: dict[str, Tensor] = {}
    for name, model, aim in (
        ("base", victim.base, confident),
        ("model", victim.model, confident),
        ("both", victim.model, both),
        ("score", victim.model, lambda target: unnoticed),
    ):
        with torch.no_grad():
            before = answers(model, victim.place(center))
        attack = Attack(model, victim.place, effort)
        started = found["model"] if name in ("both", "score") else None
        found[name] = restarted(attack, aim, ball, None, started)
        columns[f"{name}, before"] = before.confidence
        columns[f"{name}, after"] = found[name].worth.sigmoid()
        columns[f"{name}, flagged before"] = before.flagged
        columns[f"{name}, flagged after"] = found[name].answers.flagged
    columns["lowest score"] = found["score"].answers.score
    return {
        f"{factor:g}, {share:g}": _cell(columns, (i, j))
        for i, share in enumerate(SHARES)
        for j, factor in enumerate(FACTORS)
    }


def _cell(columns: dict[str, Tensor], place: tuple[int, int]) -> dict[str, float]:
    """Means over the inputs of one share and factor, and the largest confidences after attacks."""
    parts = {
        name: values.double().reshape(len(SHARES), len(FACTORS), -1)[place]
        for name, values in columns.items()
    }
    cell = {
        name: float(part.min() if name == "lowest score" else part.mean())
        for name, part in parts.items()
        if name not in ("score, before", "score, after")
    }
    for name in ("base", "model", "both"):
        cell[f"{name}, highest"] = float(parts[f"{name}, after"].max())
    return cell
