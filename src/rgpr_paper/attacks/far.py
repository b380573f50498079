r"""Attacks that must stay at a distance from the training data, and beyond the certified radius.

Rows are inputs in standard deviations around the training mean, and the region is everything at
least a distance :math:`\rho` from it. Attacks start in four kinds of directions:

- ``scaled``: test inputs, scaled up;
- ``random``: normal noise;
- ``gradient``: that in which the base's log-odds grow most far away, from test inputs scaled up
  ten-thousandfold;
- ``silent``: test inputs, moved along those directions in which the first layer changes least, so
  that hidden layers notice little of it.

A second round starts at every distance from the best directions of all distances: a direction that
works far out, which is the gradient's direction at infinity, is tried everywhere. Half of the
attacks begin with small steps, so that a good start is not left at once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from rgpr.model import RGPR

from .aims import Aim, answers, both, confident, log_odds, unnoticed
from .ascent import Found, Schedule, ascend
from .near import Effort
from .regions import Outside, length
from .victims import Victim

__all__ = ["EPS", "KINDS", "beyond", "far", "silent_directions"]

KINDS = ("scaled", "random", "gradient", "silent")
EPS = 0.05
# The cast of an input to float32 may bring it nearer by its rounding.
_ROUNDING = 1 + 1e-6
_SCALED_UP = 1e4
_BEYOND = (1.0, 1.5, 10.0, 1000.0)


def silent_directions(victim: Victim, count: int) -> Tensor:
    """Unit directions in which the first layer changes least, in standardised units.

    Returns:
        ``(count, N)`` in float64: eigenvectors of the smallest eigenvalues of the squared change.
    """
    network = victim.data.network
    first = next(m for m in network.modules() if isinstance(m, nn.Linear | nn.Conv2d))
    _, scale = victim.standards
    basis = victim.place(torch.diag(scale))
    with torch.no_grad():
        changes = (first(basis) - first(torch.zeros_like(basis[:1]))).flatten(1).double()
    vectors: Tensor = torch.linalg.eigh(changes @ changes.T).eigenvectors
    return vectors[:, :count].T.contiguous()


def starts(victim: Victim, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """An offset and a direction for each start, ``(4 * count, N)`` each, kind by kind."""
    x, _ = victim.right(False, count, seed)
    rows = victim.standardised(x)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(rows.shape, generator=generator, dtype=torch.float64)
    silent = silent_directions(victim, max(1, len(rows) // 2)).repeat(2, 1)
    silent = torch.cat([silent, -silent])[: len(rows)]
    zeros = torch.zeros_like(rows)
    offsets = torch.cat([zeros, zeros, zeros, rows])
    directions = torch.cat([rows, noise, _gradients(victim, rows), silent])
    return offsets, directions / length(directions, "l2")


def _gradients(victim: Victim, rows: Tensor) -> Tensor:
    """Gradients of the base's log-odds of its own class, at the rows scaled up."""
    away = (_SCALED_UP * rows).requires_grad_()
    log_p = answers(victim.base, victim.from_standardised(away)).log_p
    odds = log_odds(log_p, log_p.argmax(1))
    [gradient] = torch.autograd.grad(odds.sum(), away)
    return gradient


def at_distance(offsets: Tensor, directions: Tensor, distance: Tensor) -> Tensor:
    """The points ``offset + t direction`` of this length; without the offset where it is longer."""
    along = (offsets * directions).sum(1, keepdim=True)
    left = distance.square() - offsets.square().sum(1, keepdim=True)
    t = -along + (along.square() + left).clamp_min(0).sqrt()
    return torch.where(left > 0, offsets + t * directions, distance * directions)


def far(victim: Victim, effort: Effort, distances: tuple[float, ...]) -> dict[str, Any]:
    """The best of all attacks at every distance, by kind of start.

    Args:
        victim: The model and its base.
        effort: How hard to try; inputs are those of each kind.
        distances: The distances, ascending.
    """
    offsets, directions = starts(victim, effort.inputs, effort.seed)
    count = len(offsets)
    rho = torch.tensor(distances, dtype=torch.float64).repeat_interleave(count)[:, None]
    begin = at_distance(
        offsets.repeat(len(distances), 1), directions.repeat(len(distances), 1), rho
    )
    columns: dict[str, Tensor] = {}
    for name, model, kind in (
        ("base", victim.base, confident),
        ("model", victim.model, confident),
        ("both", victim.model, both),
        ("score", victim.model, None),
    ):
        found = _rounds(victim, model, kind, begin, rho, effort)
        shape = (len(distances), len(KINDS), -1)
        value = found.worth if kind is None else found.worth.sigmoid()
        columns[name] = value.reshape(shape).amax(2)
        if kind is None:
            columns["unflagged"] = (~found.answers.flagged).reshape(shape).any(2)
    return {
        "distances": list(distances),
        "inputs": effort.inputs,
        "typical": math.sqrt(offsets.shape[1]),
        "classes": int(found.answers.log_p.shape[1]),
        **{name: _by_kind(values) for name, values in columns.items()},
    }


def _by_kind(values: Tensor) -> dict[str, list[float]]:
    return {kind: values[:, i].double().tolist() for i, kind in enumerate(KINDS)}


def _rounds(
    victim: Victim, model: RGPR, kind: Any, begin: Tensor, rho: Tensor, effort: Effort
) -> Found:
    """Two rounds: from the starts, and from the best directions of all distances."""
    region = Outside(rho * _ROUNDING)
    first = torch.where(torch.arange(len(begin)) % 2 == 0, 0.3, 0.003).double()[:, None]
    best: Found | None = None
    for number in range(2):
        with torch.no_grad():
            target = answers(model, victim.from_standardised(begin)).log_p.argmax(1)
        aim: Aim = unnoticed if kind is None else kind(target)
        schedule = Schedule(effort.steps, first, effort.seed + number)
        found = ascend(model, aim, region, begin, victim.from_standardised, schedule)
        best = found if best is None else _better(best, found)
        begin = _neighbours(best, rho)
    assert best is not None
    return best


def _neighbours(found: Found, rho: Tensor) -> Tensor:
    """For every row the best point of its kind at one of the distances, moved to its own."""
    distances = len(set(rho[:, 0].tolist()))
    rows = found.rows.reshape(distances, len(KINDS), -1, found.rows.shape[1])
    worth = found.worth.reshape(distances, len(KINDS), -1)
    chosen = worth.argmax(2)[:, :, None, None].expand(-1, -1, 1, rows.shape[3])
    best = rows.gather(2, chosen)[:, :, 0]  # (distances, kinds, N)
    # The starts of a kind take the distances in turn.
    order = torch.arange(rows.shape[2]) % distances
    own = torch.arange(distances)[:, None]
    nearby = (own + order - rows.shape[2] // 2).clamp(0, distances - 1)
    moved = best[nearby].permute(0, 2, 1, 3).reshape(found.rows.shape)
    return moved * rho / length(moved, "l2")


def _better(one: Found, other: Found) -> Found:
    """Row by row the one that is worth more."""
    chosen = other.worth > one.worth

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(chosen.reshape(-1, *[1] * (a.dim() - 1)), b, a)

    said = type(one.answers)(
        *(
            pick(getattr(one.answers, name), getattr(other.answers, name))
            for name in ("log_p", "score", "flagged")
        )
    )
    return Found(
        pick(one.rows, other.rows),
        pick(one.worth, other.worth),
        said,
        max(one.highest, other.highest),
    )


def beyond(victim: Victim, effort: Effort) -> dict[str, Any]:
    """Attacks at the certified radius and beyond it, which must not reach ``1 / C + eps``."""
    certificate = victim.model.certify(EPS)
    offsets, directions = starts(victim, effort.inputs, effort.seed)
    distances = torch.tensor(_BEYOND, dtype=torch.float64) * certificate.radius
    rho = distances.repeat_interleave(len(offsets))[:, None]
    begin = at_distance(
        offsets.repeat(len(distances), 1), directions.repeat(len(distances), 1), rho
    )
    found = _rounds(victim, victim.model, confident, begin, rho, effort)
    return {
        "radius": certificate.radius,
        "by": certificate.by,
        "limit": 1 / certificate.classes + EPS,
        "attacked": 2 * len(begin),
        "inputs seen": 2 * len(begin) * (effort.steps + 1),
        "highest": found.highest,
        "covered": bool(certificate.covers(victim.from_standardised(found.rows)).all()),
        "bound": [certificate.bound(float(d)) for d in _ladder(certificate.radius)],
        "bound at": _ladder(certificate.radius),
    }


def _ladder(radius: float) -> list[float]:
    """Distances at which the certified bound is drawn."""
    return [float(10 ** (p / 4)) for p in range(0, 4 * math.ceil(math.log10(radius)) + 5)]
