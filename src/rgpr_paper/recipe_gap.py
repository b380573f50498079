"""How far our FPR95 is from the printed one, by two ways of training, and on which outliers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

from .comparison import over_seeds
from .section import printed
from .units import Unit

__all__ = ["RECIPES", "Gap", "gaps_of", "kinds_of", "stand_ins_of"]

# The short training and the paper's own, by the words of `--recipe`.
RECIPES = ("fast", "paper")


@dataclass(frozen=True)
class Gap:
    """FPR95 of one method for each set of outliers, in %.

    Attributes:
        method: The method's name.
        printed: What the paper printed, by set of outliers.
        ours: What we measured, by recipe and set of outliers.
        stand_ins: The sets whose images are not the paper's.
    """

    method: str
    printed: dict[str, float]
    ours: dict[str, dict[str, float]]
    stand_ins: frozenset[str]

    @property
    def own(self) -> list[str]:
        """The sets whose images are the paper's own."""
        return [kind for kind in self.printed if kind not in self.stand_ins]

    @property
    def others(self) -> list[str]:
        """The sets that are stand-ins."""
        return [kind for kind in self.printed if kind in self.stand_ins]

    def left(self, recipe: str) -> float:
        """By how many points our mean over the sets is above the printed one."""
        return self.share(recipe, self.printed)

    def closed(self) -> float:
        """By how many points the paper's recipe is nearer to the printed value, on either side."""
        return abs(self.left("fast")) - abs(self.left("paper"))

    def share(self, recipe: str, kinds: Iterable[str]) -> float:
        """What these sets add to :meth:`left`; the shares of all sets add up to it."""
        ours = self.ours[recipe]
        return sum(ours[kind] - self.printed[kind] for kind in kinds) / len(self.printed)

    def each(self, recipe: str, kinds: Sequence[str]) -> float:
        """By how many points one of these sets is above the printed value, on average."""
        return self.share(recipe, kinds) * len(self.printed) / len(kinds)


def gaps_of(title: str, units: dict[str, list[Unit]]) -> dict[str, Gap]:
    """The gap of every method that both recipes measured and that the paper has for all sets.

    Args:
        title: The in-distribution set's name in the paper.
        units: The set's units by recipe.
    """
    found: dict[str, Gap] = {}
    if any(not units.get(recipe) for recipe in RECIPES):
        return found
    both = [unit for recipe in RECIPES for unit in units[recipe]]
    kinds = kinds_of(both)
    for method in both[0].result["methods"]:
        place = {"in": title, "method": method, "metric": "FPR95"}
        values = {kind: printed("ood_hyperopt", **place, out=kind) for kind in kinds}
        known = {kind: value for kind, value in values.items() if value is not None}
        if len(known) < len(kinds) or not over_seeds(both, "methods", method):
            continue
        ours = {
            recipe: {
                kind: 100 * float(mean(over_seeds(units[recipe], "methods", method, "fpr95", kind)))
                for kind in kinds
            }
            for recipe in RECIPES
        }
        found[method] = Gap(method, known, ours, stand_ins_of(both))
    return found


def kinds_of(units: Sequence[Unit]) -> list[str]:
    """Names of the sets of outliers that all of these units have."""
    first, *others = [unit.result["sizes"]["outliers"] for unit in units]
    return [kind for kind in first if all(kind in other for other in others)]


def stand_ins_of(units: Sequence[Unit]) -> frozenset[str]:
    """The sets of outliers that are not what their name says, in any of these units."""
    kinds = kinds_of(units)
    return frozenset(kind for unit in units for kind in unit.result["notes"] if kind in kinds)
