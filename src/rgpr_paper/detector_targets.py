"""What the score is to reach beside other detectors: the best of them, and goals set before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .detector_values import others, value
from .units import Unit

__all__ = ["GOALS", "SLACK", "Target", "targets"]

# The best detectors find nearly every far outlier of MNIST: there the score is to be level.
SLACK = {("mnist", "far"): 0.5}
# Goals that were set before the runs: set, kind of outliers, metric, bound in %. No source has
# these numbers.
GOALS = (
    ("cifar100", "near", "auroc", 78.7),
    ("cifar100", "far", "fpr95", 27.0),
    ("svhn", "all", "fpr95", 8.0),
)
_WORDS = {"auroc": "AUROC", "fpr95": "FPR95"}


@dataclass(frozen=True)
class Target:
    """A bound on the score's mean over some outliers.

    Attributes:
        where: ``"near"``, ``"far"`` or ``"all"`` outliers.
        metric: ``"auroc"``, of which the bound is the least value, or ``"fpr95"``, of which it is
            the largest.
        bound: The bound in %.
        reason: Where the bound is from.
    """

    where: str
    metric: str
    bound: float
    reason: str

    def reached(self, found: float) -> bool:
        """Whether a value in % reaches the bound; means may differ in their last digits."""
        short = self.bound - found if self.metric == "auroc" else found - self.bound
        return short < 1e-9

    def __str__(self) -> str:
        side = "at least" if self.metric == "auroc" else "at most"
        of = f"{_WORDS[self.metric]} on {self.where} outliers"
        return f"{of} of {side} {self.bound:.4g} % ({self.reason})"


def targets(name: str, units: Sequence[Unit]) -> list[Target]:
    """All targets on one in-distribution set: to lead every other detector, and the goals."""
    found = []
    rivals = others(units)
    for metric in _WORDS if rivals else ():
        for where in ("near", "far"):
            values = {d: value(units, d, where, metric) for d in rivals}
            best = (max if metric == "auroc" else min)(values, key=values.__getitem__)
            slack = SLACK.get((name, where), 0.0)
            bound = values[best] - slack if metric == "auroc" else values[best] + slack
            found.append(Target(where, metric, bound, f"{best}'s"))
    found += [
        Target(where, metric, bound, "a goal") for of, where, metric, bound in GOALS if of == name
    ]
    return found
