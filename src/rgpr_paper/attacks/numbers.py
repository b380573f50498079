"""Numbers that tables, picture and claims have in common, read from the units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..units import Unit
from .far import EPS, KINDS

__all__ = [
    "NORM_NAMES",
    "SET_NAMES",
    "SURE",
    "from_noise",
    "highest_at",
    "label",
    "largest_radius",
    "limit",
    "of_kind",
    "up_to",
]

NORM_NAMES = {"linf": "L-inf", "l2": "L2", "l1": "L1"}
SET_NAMES = {"digits": "digits", "mnist": "MNIST"}
# An input that is not flagged and has more than this confidence passes for an ordinary one.
SURE = 0.9


def of_kind(units: Sequence[Unit], kind: str) -> list[Unit]:
    """The units of one kind of attack, ``"near"``, ``"noise"`` or ``"far"``; digits first."""
    found = [unit for unit in units if unit.name.endswith(f"-{kind}")]
    bases = ["MAP", "LLL"]
    return sorted(found, key=lambda u: (u.result["set"], bases.index(u.result["posterior"])))


def label(unit: Unit) -> str:
    """The set and the base of a unit."""
    return f"{SET_NAMES[unit.result['set']]}, {unit.result['posterior']}"


def largest_radius(units: Sequence[Unit]) -> Iterator[tuple[str, dict[str, float]]]:
    """The cell of the largest radius for each victim and norm, with a label."""
    for unit in of_kind(units, "near"):
        for norm, cells in unit.result["cells"].items():
            radius = list(cells)[-1]
            yield f"{label(unit)}, {NORM_NAMES[norm]} {radius}", cells[radius]


def from_noise(unit: Unit) -> dict[tuple[str, str], dict[str, float]]:
    """The strongest attack of all norms, by the noise's factor and the share of its distance."""
    cells: dict[str, list[dict[str, float]]] = {}
    for by_place in unit.result["cells"].values():
        for place, cell in by_place.items():
            cells.setdefault(place, []).append(cell)
    strongest = {}
    for place, found in cells.items():
        factor, _, share = place.partition(", ")
        strongest[factor, share] = {
            name: (min if "flagged" in name or "score" in name else max)(c[name] for c in found)
            for name in found[0]
        }
        # Whatever an attack was after, an input of it that is not flagged has passed.
        strongest[factor, share]["flagged after"] = min(
            c[f"{name}, flagged after"] for c in found for name in ("model", "both", "score")
        )
    return strongest


def highest_at(unit: Unit, answer: str, kinds: Sequence[str] = KINDS) -> list[float]:
    """The largest value of an answer at each distance, over kinds of starts.

    What the attack on both reached counts for the others too: its inputs are not flagged, and the
    model is as sure of them as it says.
    """
    columns: list[Any] = [unit.result[answer][kind] for kind in kinds]
    if answer == "model":
        columns += [unit.result["both"][kind] for kind in kinds]
    elif answer == "unflagged":
        columns += [[float(value > 0) for value in unit.result["both"][kind]] for kind in kinds]
    return [max(values) for values in zip(*columns, strict=True)]


def up_to(unit: Unit, answer: str, above: float, kinds: Sequence[str] = KINDS) -> float | None:
    """The largest distance at which an attack brought an answer above a number, if any did."""
    values = highest_at(unit, answer, kinds)
    reached = [
        d for d, value in zip(unit.result["distances"], values, strict=True) if value > above
    ]
    return max(reached, default=None)


def limit(unit: Unit) -> float:
    """``1 / C + eps``, which the certificate is about."""
    return 1 / int(unit.result["classes"]) + EPS
