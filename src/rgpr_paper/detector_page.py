"""What the comparison with other detectors shows: tables, a picture and claims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from .comparison import PAPER_NAMES, by_set, over_seeds, stand_ins
from .detector_picture import picture
from .section import Claim, Section, Table, Text, provenance, spread
from .units import Unit

__all__ = ["page", "summary"]

SCORE = "LLL-RGPR-score"
_INTRODUCTION = (
    "Every detector on the same networks, with fixed settings and no outliers used. Means over the "
    "sets of near and of far outliers, in %; ± is the standard deviation between seeds. FPR95 is "
    "the share of outliers that pass where 95 % of the data do; FPR95 as OpenOOD counts it is the "
    "share of data refused where 95 % of the outliers are. Detectors are sorted by the sum of near "
    "and far AUROC; an arrow marks this library's. Fit is in seconds, with the pass over the "
    "training images where a detector reads them. The last column has the microseconds that an "
    "image takes beyond the network's own pass, in batches of 1000."
)
# The columns of the first table: heading, kind of outliers, metric.
_COLUMNS = (
    ("near AUROC", "near", "auroc"),
    ("far AUROC", "far", "auroc"),
    ("near FPR95", "near", "fpr95"),
    ("far FPR95", "far", "fpr95"),
    ("near FPR95, OpenOOD's", "near", "fpr95 openood"),
    ("far FPR95, OpenOOD's", "far", "fpr95 openood"),
)


def page(units: Sequence[Unit], folder: Path) -> Section:
    """The section, whose picture is written into the folder."""
    section = Section([Text(_INTRODUCTION)])
    sets = by_set(units)
    points = {}
    for name, found in sets.items():
        title = PAPER_NAMES.get(name, name)
        section.add(_about(title, found), *stand_ins(found))
        section.add(_means(title, found), _failures(title, found))
        section.add(*(_each(title, found, where) for where in ("near", "far")))
        section.claims += _claims(name, title, found)
        points[title] = {
            d: (_value(found, d, "near", "auroc"), _value(found, d, "far", "auroc"))
            for d in _measured(found)
        }
    section.blocks = [block for block in section.blocks if block is not None]
    section.add(picture(folder, points, _ours(units)))
    section.add(_settings(sets))
    section.add(*provenance(units))
    return section


def summary(units: Sequence[Unit]) -> Table:
    """For each set and each mean the score's, and that of the best detector of others."""
    rows = []
    for name, found in by_set(units).items():
        cells = []
        for _, where, metric in _COLUMNS[:4]:
            rivals = {
                d: _value(found, d, where, metric)
                for d in _measured(found)
                if d not in _ours(found)
            }
            best = (max if metric == "auroc" else min)(rivals, key=rivals.__getitem__)
            cells.append(f"{_value(found, SCORE, where, metric):.1f}; {best} {rivals[best]:.1f}")
        rows.append([PAPER_NAMES.get(name, name), *cells])
    return Table(["", *(heading for heading, _, _ in _COLUMNS[:4])], rows)


# -- what units have -----------------------------------------------------------------------------


def _measured(units: Sequence[Unit]) -> list[str]:
    """Detectors that failed in no unit, best sum of near and far AUROC first."""
    names = [d for d in units[0].result["detectors"] if over_seeds(units, "detectors", d, "near")]
    return sorted(
        names,
        key=lambda d: _value(units, d, "near", "auroc") + _value(units, d, "far", "auroc"),
        reverse=True,
    )


def _ours(units: Sequence[Unit]) -> set[str]:
    """Names of this library's own detectors."""
    return {d for u in units for d, found in u.result["detectors"].items() if found["ours"]}


def _seeds(units: Sequence[Unit], detector: str, where: str, metric: str) -> list[float]:
    found: list[float] = over_seeds(units, "detectors", detector, where, metric, "mean")
    return found


def _value(units: Sequence[Unit], detector: str, where: str, metric: str) -> float:
    """The mean over sets of outliers and seeds, in %."""
    return 100 * mean(_seeds(units, detector, where, metric))


# -- tables --------------------------------------------------------------------------------------


def _about(title: str, units: Sequence[Unit]) -> Text:
    network = spread(over_seeds(units, "network"), 1)
    training = spread(over_seeds(units, "seconds", "training images, one pass"), 1)
    accuracy = spread(over_seeds(units, "accuracy"), 2, 100)
    sizes = ", ".join(f"{count} {kind}" for kind, count in units[0].result["sizes"].items())
    seeds = ", ".join(str(unit.result["seed"]) for unit in units)
    return Text(
        f"{title}, seeds {seeds}: accuracy {accuracy} %. The network's own pass takes {network} "
        f"microseconds an image, one pass over the training images {training} seconds. Images: "
        f"{sizes}."
    )


def _named(detector: str, ours: set[str]) -> str:
    return f"→ {detector}" if detector in ours else detector


def _means(title: str, units: Sequence[Unit]) -> Table:
    ours = _ours(units)
    rows = []
    for detector in _measured(units):
        cells = [spread(_seeds(units, detector, w, m), 1, 100) for _, w, m in _COLUMNS]
        fit = spread(over_seeds(units, "detectors", detector, "fit"), 1)
        cost = spread(over_seeds(units, "detectors", detector, "microseconds"), 1)
        rows.append([_named(detector, ours), *cells, fit, cost])
    head = [title, *(heading for heading, _, _ in _COLUMNS), "fit, s", "µs per image"]
    return Table(head, rows, f"{title}: means over near and far outliers")


def _failures(title: str, units: Sequence[Unit]) -> Any:
    """The detectors that failed, with the text of their errors; nothing where none did."""
    rows = [
        [detector, str(unit.result["seed"]), found["error"]]
        for unit in units
        for detector, found in unit.result["detectors"].items()
        if "error" in found
    ]
    return Table([f"{title}: failed", "seed", "error"], rows) if rows else None


def _each(title: str, units: Sequence[Unit], where: str) -> Table:
    """AUROC, FPR95 and both precisions for each set of outliers."""
    first = _measured(units)[0]
    kinds = [k for k in units[0].result["detectors"][first][where]["auroc"] if k != "mean"]
    metrics = ("auroc", "fpr95", "aupr in", "aupr out")
    ours = _ours(units)
    rows = []
    for detector in _measured(units):
        at = partial(over_seeds, units, "detectors", detector, where)
        cells = [
            " / ".join(f"{100 * mean(at(metric, kind)):.1f}" for metric in metrics)
            for kind in kinds
        ]
        rows.append([_named(detector, ours), *cells])
    caption = (
        f"{title}, {where} outliers: AUROC / FPR95 / area under precision against recall with the "
        "data and with the outliers as what is to be found"
    )
    return Table([f"{title}, {where}", *kinds], rows, caption)


def _settings(sets: dict[str, list[Unit]]) -> Table:
    """What every detector was run with, and whose code it is."""
    rows = []
    listed = next(iter(sets.values()))[0].result["detectors"].items()
    for detector, about in sorted(listed, key=lambda pair: not pair[1]["ours"]):
        found: dict[str, list[str]] = {}
        for name, units in sets.items():
            setting = units[0].result["detectors"].get(detector, {}).get("setting")
            if setting:
                found.setdefault(setting, []).append(PAPER_NAMES.get(name, name))
        cells = (
            list(found) if len(found) < 2 else [f"{', '.join(n)}: {s}" for s, n in found.items()]
        )
        row = [detector, about["paper"], about["code"], about["reads"]]
        rows.append([*row, "; ".join(cells) or "failed"])
    head = ["detector", "paper", "code", "reads", "settings"]
    return Table(head, rows, "Settings; none was chosen on outliers")


# -- claims --------------------------------------------------------------------------------------

_BETTER: dict[str, Callable[[float, float], float]] = {
    "auroc": lambda ours, other: ours - other,
    "fpr95": lambda ours, other: other - ours,
}
_WORDS = {"auroc": "AUROC", "fpr95": "FPR95"}
# On MNIST the best detectors find nearly every outlier, and the score is to be level with them.
_SLACK = {"mnist": 0.5}
# Set, kind of outliers, metric, bound in %.
_BOUNDS = (
    ("cifar100", "near", "auroc", 78.7),
    ("cifar100", "far", "fpr95", 27.0),
    ("svhn", "all", "fpr95", 8.0),
)


def _claims(name: str, title: str, units: Sequence[Unit]) -> list[Claim]:
    if SCORE not in _measured(units):
        return []
    claims = [
        _ahead(title, units, where, metric, _SLACK.get(name, 0.0))
        for metric in _BETTER
        for where in ("near", "far")
    ]
    for of, where, metric, bound in _BOUNDS:
        if of == name:
            claims.append(_within(title, units, where, metric, bound))
    return claims


def _ahead(title: str, units: Sequence[Unit], where: str, metric: str, slack: float) -> Claim:
    """That the score leads every detector that is not this library's, or is level with them."""
    rivals = [d for d in _measured(units) if d not in _ours(units)]
    score = _value(units, SCORE, where, metric)
    lead = {d: _BETTER[metric](score, _value(units, d, where, metric)) for d in rivals}
    best = min(lead, key=lead.__getitem__)
    ahead = [d for d in sorted(lead, key=lead.__getitem__) if lead[d] < -slack]
    what = f"{title}: {_WORDS[metric]} of the score on {where} outliers is "
    statement = f"within {slack} points of the best detector's" if slack else "the best of all"
    by = ", ".join(f"{d} by {-lead[d]:.1f}" for d in ahead[:5])
    more = f" and {len(ahead) - 5} more" if len(ahead) > 5 else ""
    return Claim(
        what + statement,
        f"{score:.1f} % against {_value(units, best, where, metric):.1f} % of {best}",
        not ahead,
        f"Ahead by points: {by}{more}." if ahead else "",
        ours=True,
    )


def _within(title: str, units: Sequence[Unit], where: str, metric: str, bound: float) -> Claim:
    value = _value(units, SCORE, where, metric)
    holds = value >= bound if metric == "auroc" else value <= bound
    side = "at least" if metric == "auroc" else "at most"
    return Claim(
        f"{title}: {_WORDS[metric]} of the score on {where} outliers is {side} {bound:g} %",
        f"{value:.1f} %",
        holds,
        "" if holds else f"Short of it by {abs(value - bound):.1f} points.",
        ours=True,
    )
