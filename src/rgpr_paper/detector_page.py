"""What the comparison with other detectors shows: tables, a picture and claims.

Values come from :mod:`rgpr_paper.detector_values`, claims from :mod:`rgpr_paper.detector_claims`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .comparison import PAPER_NAMES, by_set, equal_to_map, over_seeds, stand_ins
from .detector_claims import claims, verdict
from .detector_picture import picture
from .detector_values import COLUMNS, SCORE, kinds, marked, measured, others, ours, seeds_of, value
from .rivals import RIVALS
from .section import Section, Table, Text, provenance, spread
from .units import Unit

__all__ = ["page", "summary"]

_INTRODUCTION = (
    "Every detector on the same networks, with the fixed settings that stand below the tables; no"
    " outlier is used to fit or to choose anything. Means over the sets of near and of far "
    "outliers, in %; ± is the standard deviation between seeds. FPR95 is the share of outliers "
    "that pass where 95 % of the data do; FPR95 as OpenOOD counts it is the share of data refused"
    " where 95 % of the outliers are. Two of OpenOOD's far sets, Textures and Places365, are not "
    "among these, so means over far sets are not those of its leaderboard. Detectors are sorted "
    "by the sum of near and far AUROC; an arrow marks this library's. Fit is in seconds, with the"
    " pass over the training images where a detector reads them. The last column has the "
    "microseconds that an image takes beyond the network's own pass, in batches of 1000."
)


def page(units: Sequence[Unit], folder: Path) -> Section:
    """The section, whose picture is written into the folder."""
    section = Section([Text(_INTRODUCTION), verdict(units)])
    units = marked(units)
    sets = by_set(units)
    points = {}
    for name, found in sets.items():
        title = PAPER_NAMES.get(name, name)
        section.add(_about(title, found), *stand_ins(found), *equal_to_map(found))
        section.add(_means(title, found), _failures(title, found))
        section.add(*(_each(title, found, where) for where in ("near", "far")))
        section.claims += claims(name, title, found)
        points[title] = {
            d: (value(found, d, "near", "auroc"), value(found, d, "far", "auroc"))
            for d in measured(found)
        }
    section.blocks = [block for block in section.blocks if block is not None]
    section.add(picture(folder, points, ours(units)))
    section.add(_settings(sets))
    section.add(*provenance(units))
    return section


def summary(units: Sequence[Unit]) -> Table:
    """For each set and each mean the score's, and that of the best detector of others."""
    rows = []
    for name, found in by_set(marked(units)).items():
        cells = []
        for _, where, metric in COLUMNS[:4]:
            rivals = {d: value(found, d, where, metric) for d in others(found)}
            best = (max if metric == "auroc" else min)(rivals, key=rivals.__getitem__)
            cells.append(f"{value(found, SCORE, where, metric):.1f}; {best} {rivals[best]:.1f}")
        rows.append([PAPER_NAMES.get(name, name), *cells])
    return Table(["", *(heading for heading, _, _ in COLUMNS[:4])], rows)


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


def _named(detector: str, own: set[str]) -> str:
    return f"→ {detector}" if detector in own else detector


def _means(title: str, units: Sequence[Unit]) -> Table:
    own = ours(units)
    rows = []
    for detector in measured(units):
        cells = [spread(seeds_of(units, detector, w, m), 1, 100) for _, w, m in COLUMNS]
        fit = spread(over_seeds(units, "detectors", detector, "fit"), 1)
        cost = spread(over_seeds(units, "detectors", detector, "microseconds"), 1)
        rows.append([_named(detector, own), *cells, fit, cost])
    head = [title, *(heading for heading, _, _ in COLUMNS), "fit, s", "µs per image"]
    return Table(head, rows, f"{title}: means over near and far outliers. {_cost(units)}")


def _cost(units: Sequence[Unit]) -> str:
    """How the cost of these units was measured, which changed once."""
    laps = over_seeds(units, "laps")
    if laps:
        return (
            f"µs per image: the fastest of {min(laps)} laps, less the fastest of the network's own "
            "where a detector runs the network"
        )
    return (
        "µs per image: a single lap, less a single one of the network's own where a detector runs "
        "the network, and zero where that is negative"
    )


def _failures(title: str, units: Sequence[Unit]) -> Any:
    """The detectors that failed, with the text of their errors; nothing where none did."""
    rows = [
        [detector, str(unit.result["seed"]), found["error"]]
        for unit in units
        for detector, found in unit.result["detectors"].items()
        if "error" in found
    ]
    caption = "Detectors that failed; to try them again, remove the unit's file and run it anew"
    return Table([f"{title}: failed", "seed", "error"], rows, caption) if rows else None


def _each(title: str, units: Sequence[Unit], where: str) -> Table:
    """AUROC, FPR95 and both precisions for each set of outliers."""
    columns = kinds(units, where)
    metrics = ("auroc", "fpr95", "aupr in", "aupr out")
    own = ours(units)
    rows = []
    for detector in measured(units):
        cells = [
            " / ".join(f"{value(units, detector, where, metric, kind):.1f}" for metric in metrics)
            for kind in columns
        ]
        rows.append([_named(detector, own), *cells])
    caption = (
        f"{title}, {where} outliers: AUROC / FPR95 / area under precision against recall with the "
        "data and with the outliers as what is to be found"
    )
    return Table([f"{title}, {where}", *columns], rows, caption)


# Units made before kept where a value is from beside the value, and some of it proved wrong.
_WORDS_OF_SOURCES = re.compile(
    "[,:]? (?:as in the paper(?: and in OpenOOD)?|with which OpenOOD starts|its defaults"
    "|(?:the paper's|OpenOOD's first) value|this library's default"
    "|of the authors for (?:this set|CIFAR-10)|half of the features, 256 of 512 in OpenOOD)"
)
# Sources of settings of code that the registry no longer has, and how that code differs.
_OTHER_CODE = {
    "GEN (pytorch-ood)": "the paper's for ImageNet, or all classes if fewer; unlike the paper, "
    "this code clamps probabilities to [1e-7, 1 - 1e-7] before",
    "VRA (pytorch-ood)": "those with which OpenOOD starts; unlike the paper, this code raises "
    "features below the lower percentile to it, and does not set them to zero",
}


def _settings(sets: dict[str, list[Unit]]) -> Table:
    """What every detector was run with, and whose code it is.

    The values are those that the units kept; where they are from is what the registry says now.
    """
    rows = []
    listed = next(iter(sets.values()))[0].result["detectors"].items()
    for detector, about in sorted(listed, key=lambda pair: not pair[1]["ours"]):
        found: dict[str, list[str]] = {}
        for name, units in sets.items():
            setting = units[0].result["detectors"].get(detector, {}).get("setting")
            if setting:
                values = _WORDS_OF_SOURCES.sub("", setting)
                found.setdefault(values, []).append(PAPER_NAMES.get(name, name))
        cells = (
            list(found) if len(found) < 2 else [f"{', '.join(n)}: {s}" for s, n in found.items()]
        )
        row = [detector, about["paper"], about["code"], about["reads"]]
        source = _OTHER_CODE.get(detector, "")
        if detector in RIVALS:
            source = RIVALS[detector].source
        rows.append([*row, "; ".join(cells) or "failed", source or "-"])
    head = ["detector", "paper", "code", "reads", "settings", "where they are from"]
    return Table(head, rows, "Settings; this experiment chose none of them on outliers")
