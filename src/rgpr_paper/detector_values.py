"""What the units of the comparison with other detectors have: names, values and gaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from .comparison import over_seeds
from .rivals import RIVALS
from .units import Unit

__all__ = ["SCORE", "marked", "measured", "missing", "others", "ours", "seeds_of", "value"]

SCORE = "LLL-RGPR-score"


def marked(units: Sequence[Unit]) -> list[Unit]:
    """The units, with names that say so where other code than the registry's made the numbers.

    ``GEN`` of a unit made with pytorch-ood's is called ``GEN (pytorch-ood)``, since this experiment
    now has its own. The name in the registry is kept under the key ``rival``.
    """
    return [
        replace(unit, result={**unit.result, "detectors": _marked(unit.result["detectors"])})
        for unit in units
    ]


def _marked(detectors: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, about in detectors.items():
        same = name not in RIVALS or about["code"] == RIVALS[name].code
        found[name if same else f"{name} ({about['code']})"] = {**about, "rival": name}
    return found


def measured(units: Sequence[Unit]) -> list[str]:
    """Detectors that failed in no unit, best sum of near and far AUROC first."""
    names = [d for d in units[0].result["detectors"] if over_seeds(units, "detectors", d, "near")]
    return sorted(
        names,
        key=lambda d: value(units, d, "near", "auroc") + value(units, d, "far", "auroc"),
        reverse=True,
    )


def ours(units: Sequence[Unit]) -> set[str]:
    """Names of this library's own detectors."""
    return {d for u in units for d, found in u.result["detectors"].items() if found["ours"]}


def others(units: Sequence[Unit]) -> list[str]:
    """Measured detectors that are not this library's, in the order of :func:`measured`."""
    return [d for d in measured(units) if d not in ours(units)]


def missing(units: Sequence[Unit]) -> list[str]:
    """Names of what a comparison needs and a unit lacks: the score, and every other detector.

    A detector is needed if it is registered, or if one of the units has it.
    """
    needed = {rival.name: rival.ours for rival in RIVALS.values()}
    needed |= {d["rival"]: d["ours"] for u in units for d in u.result["detectors"].values()}
    there = {units[0].result["detectors"][d]["rival"] for d in measured(units)}
    return [d for d, own in needed.items() if d not in there and (d == SCORE or not own)]


def seeds_of(units: Sequence[Unit], detector: str, where: str, metric: str) -> list[float]:
    """A detector's mean over the near or far sets of outliers, for each seed."""
    found: list[float] = over_seeds(units, "detectors", detector, where, metric, "mean")
    return found


def value(units: Sequence[Unit], detector: str, where: str, metric: str) -> float:
    """The mean over sets of outliers and seeds, in %."""
    return 100 * mean(seeds_of(units, detector, where, metric))
