"""Goals for the score that were set before the runs. No source has these numbers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GOALS", "Goal"]

_WORDS = {"auroc": "AUROC", "fpr95": "FPR95"}


@dataclass(frozen=True)
class Goal:
    """A bound on the score's mean over some outliers.

    Attributes:
        where: ``"near"``, ``"far"`` or ``"all"`` outliers.
        metric: ``"auroc"``, of which the bound is the least value, or ``"fpr95"``, of which it is
            the largest.
        bound: The bound in %.
    """

    where: str
    metric: str
    bound: float

    @property
    def larger_is_better(self) -> bool:
        """Whether the bound is the least value that reaches it."""
        return self.metric == "auroc"

    @property
    def within(self) -> str:
        """The bound in words."""
        return f"{'at least' if self.larger_is_better else 'at most'} {self.bound:g} %"

    def reached(self, found: float) -> bool:
        """Whether a value in % reaches the bound."""
        return found >= self.bound if self.larger_is_better else found <= self.bound

    def __str__(self) -> str:
        return f"{_WORDS[self.metric]} on {self.where} outliers of {self.within}"


# By in-distribution set; the other sets have none.
GOALS = {
    "cifar100": (Goal("near", "auroc", 78.7), Goal("far", "fpr95", 27.0)),
    "svhn": (Goal("all", "fpr95", 8.0),),
}
