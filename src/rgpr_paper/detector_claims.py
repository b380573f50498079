"""What this library claims of its score beside other detectors, measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from .detector_values import SCORE, measured, missing, others, value
from .section import Claim
from .units import Unit

__all__ = ["claims"]

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


def claims(name: str, title: str, units: Sequence[Unit]) -> list[Claim]:
    """The claims about one in-distribution set.

    None of them holds while a detector is missing, because the missing one could be the best.
    """
    found = [
        _ahead(title, units, where, metric, _SLACK.get(name, 0.0))
        for metric in _BETTER
        for where in ("near", "far")
    ]
    for of, where, metric, bound in _BOUNDS:
        if of == name:
            found.append(_within(title, units, where, metric, bound))
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
    lead = {d: _BETTER[metric](score, value(units, d, where, metric)) for d in others(units)}
    best = min(lead, key=lead.__getitem__)
    ahead = [d for d in sorted(lead, key=lead.__getitem__) if lead[d] < -slack]
    by = ", ".join(f"{d} by {-lead[d]:.1f}" for d in ahead[:5])
    more = f" and {len(ahead) - 5} more" if len(ahead) > 5 else ""
    return Claim(
        statement,
        f"{score:.1f} % against {value(units, best, where, metric):.1f} % of {best}",
        not ahead,
        f"Ahead by points: {by}{more}." if ahead else "",
        ours=True,
    )


def _within(title: str, units: Sequence[Unit], where: str, metric: str, bound: float) -> Claim:
    side = "at least" if metric == "auroc" else "at most"
    statement = f"{title}: {_WORDS[metric]} of the score on {where} outliers is {side} {bound:g} %"
    if SCORE not in measured(units):
        return Claim(statement, "not measured", False, ours=True)
    score = value(units, SCORE, where, metric)
    holds = score >= bound if metric == "auroc" else score <= bound
    return Claim(
        statement,
        f"{score:.1f} %",
        holds,
        "" if holds else f"Short of it by {abs(score - bound):.1f} points.",
        ours=True,
    )
