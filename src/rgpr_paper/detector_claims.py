"""What this library says of its score beside other detectors: claims, and where it is behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .comparison import PAPER_NAMES, by_set
from .detector_values import COLUMNS, SCORE, kinds, marked, measured, missing, others, value
from .goals import GOALS, Goal
from .section import Claim, Text
from .units import Unit

__all__ = ["claims", "verdict"]

_WORDS = {"auroc": "AUROC", "fpr95": "FPR95"}
# The best detectors find nearly every far outlier of MNIST: there the score is to be level.
_SLACK = {("mnist", "far"): 0.5}


def claims(name: str, title: str, units: Sequence[Unit]) -> list[Claim]:
    """The claims about one in-distribution set.

    None of them holds while a detector is missing, because the missing one could be the best.
    """
    found = [
        _ahead(title, units, where, metric, _SLACK.get((name, where), 0.0))
        for metric in _WORDS
        for where in ("near", "far")
    ]
    found += [_within(title, units, goal) for goal in GOALS.get(name, ())]
    lacking = missing(units)
    if not lacking:
        return found
    gap = f"Not measured: {', '.join(lacking)}."
    return [replace(c, holds=False, discussion=f"{gap} {c.discussion}".strip()) for c in found]


def _ahead(title: str, units: Sequence[Unit], where: str, metric: str, slack: float) -> Claim:
    """That the score leads every detector that is not this library's, or is level with them."""
    statement = f"{title}: {_WORDS[metric]} of the score on {where} outliers is "
    statement += f"within {slack} points of the best detector's" if slack else "the best of all"
    if SCORE not in measured(units) or not others(units):
        return Claim(statement, "not measured", False, ours=True)
    score = value(units, SCORE, where, metric)
    rivals = {d: value(units, d, where, metric) for d in others(units)}
    lead = {d: _lead(metric, score, other) for d, other in rivals.items()}
    best = min(lead, key=lead.__getitem__)
    ahead = [d for d in sorted(lead, key=lead.__getitem__) if lead[d] < -slack]
    by = ", ".join(f"{d} by {_points(-lead[d])}" for d in ahead[:5])
    more = f" and {len(ahead) - 5} more" if len(ahead) > 5 else ""
    ours, theirs = _told_apart(score, rivals[best])
    return Claim(
        statement,
        f"{ours} % against {theirs} % of {best}",
        not ahead,
        f"Ahead by points: {by}{more}." if ahead else "",
        ours=True,
    )


def _within(title: str, units: Sequence[Unit], goal: Goal) -> Claim:
    statement = f"{title}: {_WORDS[goal.metric]} of the score on {goal.where} outliers is "
    statement += f"{goal.within}, a goal set before the runs"
    if SCORE not in measured(units):
        return Claim(statement, "not measured", False, ours=True)
    score = value(units, SCORE, goal.where, goal.metric)
    holds = goal.reached(score)
    return Claim(
        statement,
        f"{score:.1f} %",
        holds,
        "" if holds else f"Short of it by {abs(score - goal.bound):.1f} points.",
        ours=True,
    )


# -- where it is behind --------------------------------------------------------------------------


def verdict(units: Sequence[Unit]) -> Text:
    """Sets on which no other detector has a better mean, and every place where one is ahead."""
    sets = {PAPER_NAMES.get(name, name): found for name, found in by_set(marked(units)).items()}
    gaps = {d: None for found in sets.values() for d in missing(found)}
    if SCORE in gaps:
        return Text("The score was not measured.")
    count = max(len(others(found)) for found in sets.values())
    behind = {
        title: [f"{h} ({by})" for h, where, metric in COLUMNS if (by := _by(found, where, metric))]
        for title, found in sets.items()
    }
    best = " and ".join(title for title, columns in behind.items() if not columns)
    ahead, looked = [], 0
    for title, found in sets.items():
        for where in ("near", "far"):
            for kind in kinds(found, where):
                each = [
                    f"{w}: {by}" for m, w in _WORDS.items() if (by := _by(found, where, m, kind))
                ]
                ahead += [f"{kind} against {title} ({'; '.join(each)})"] if each else []
                looked += 1
    sentences = [
        f"{count} other detectors stand beside the score.",
        f"On {best} none of them has a better mean AUROC or FPR95, near or far." if best else "",
        *(f"On {t} others are ahead in {', '.join(each)}." for t, each in behind.items() if each),
        f"On {len(ahead)} of {looked} single sets of outliers others are ahead in AUROC or "
        f"FPR95: {', '.join(ahead)}."
        if ahead
        else "On no single set of outliers is another ahead in AUROC or FPR95.",
        "In brackets is the one that is furthest ahead." if ahead else "",
        f"Not measured: {', '.join(gaps)}." if gaps else "",
    ]
    return Text(" ".join(filter(None, sentences)))


def _by(units: Sequence[Unit], where: str, metric: str, kind: str = "mean") -> str:
    """The detector that is furthest ahead of the score, and by how much; empty if none is."""
    score = value(units, SCORE, where, metric, kind)
    lead = {d: _lead(metric, score, value(units, d, where, metric, kind)) for d in others(units)}
    first = min(lead, key=lead.__getitem__, default=SCORE)
    return f"{first} by {_points(-lead[first])} points" if lead.get(first, 0) < 0 else ""


def _lead(metric: str, ours: float, other: float) -> float:
    """By how many points ours is better; less than zero if the other one is."""
    lead = ours - other if metric == "auroc" else other - ours
    return round(lead, 9)  # means of the same numbers may differ in their last digits


def _points(difference: float) -> str:
    """A positive difference with one decimal, or with its first digit if it is small."""
    return f"{difference:.1f}" if difference >= 0.05 else f"{difference:.1g}"


def _told_apart(one: float, other: float) -> tuple[str, str]:
    """Two numbers with one decimal, or with up to three where that tells them apart."""
    for digits in (1, 2, 3):
        texts = f"{one:.{digits}f}", f"{other:.{digits}f}"
        if texts[0] != texts[1]:
            return texts
    return f"{one:.1f}", f"{other:.1f}"
