"""What the units of the comparison with other detectors have: names, values and gaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

from .comparison import over_seeds
from .rivals import RIVALS
from .units import Unit

__all__ = ["COLUMNS", "SCORE", "kinds", "marked", "measured", "missing", "others", "ours"]
__all__ += ["seeds_of", "value"]

SCORE = "LLL-RGPR-score"
# The means that are shown: heading, kind of outliers, metric.
COLUMNS = (
    ("near AUROC", "near", "auroc"),
    ("far AUROC", "far", "auroc"),
    ("near FPR95", "near", "fpr95"),
    ("far FPR95", "far", "fpr95"),
    ("near FPR95, OpenOOD's", "near", "fpr95 openood"),
    ("far FPR95, OpenOOD's", "far", "fpr95 openood"),
)


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


def kinds(units: Sequence[Unit], where: str) -> list[str]:
    """Names of the near or of the far sets of outliers."""
    first = units[0].result["detectors"][measured(units)[0]]
    return [kind for kind in first[where]["auroc"] if kind != "mean"]


def seeds_of(
    units: Sequence[Unit], detector: str, where: str, metric: str, kind: str = "mean"
) -> list[float]:
    """A detector's measure for each seed: the mean over near or far outliers, or one set's."""
    found: list[float] = over_seeds(units, "detectors", detector, where, metric, kind)
    return found


def value(
    units: Sequence[Unit], detector: str, where: str, metric: str, kind: str = "mean"
) -> float:
    """The mean of :func:`seeds_of`, in %."""
    return 100 * mean(seeds_of(units, detector, where, metric, kind))
