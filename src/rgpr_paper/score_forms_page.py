"""Tables of other forms of the score, and which missed goals one of them would reach."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import mean

from .comparison import PAPER_NAMES, by_set, equal_to_map, over_seeds, stand_ins
from .goals import GOALS, Goal
from .score_forms import PRESENT
from .section import Section, Table, Text, provenance, spread
from .units import Unit

__all__ = ["page", "table"]

_INTRODUCTION = (
    "Other forms of the score, on the outputs of the same networks. r is the strangeness and E the "
    "evidence; relative adds half of log(d_c^3 / d^3), with the distances of the last features to "
    "the nearest class mean and to the overall mean. Means over the sets of near, of far and of "
    "all outliers, in %; ± is the standard deviation between seeds. FPR95 is the share of outliers "
    "that pass where 95 % of the data do. The arrow marks the form that the library has."
)
_NO_CHOICE = (
    "These tables chose nothing: the library's form was fixed before them. The outliers are those "
    "by which the other tables judge the score, so a choice by these numbers would spoil those."
)
_GOALS = (
    "Where goals were set before the runs, a second table says what the library's form and the "
    "best form reach. How the score stands beside other detectors is measured by `openood`."
)
_COLUMNS = (
    ("near AUROC", "near", "auroc"),
    ("far AUROC", "far", "auroc"),
    ("near FPR95", "near", "fpr95"),
    ("far FPR95", "far", "fpr95"),
    ("FPR95 of all sets", "all", "fpr95"),
)


def page(units: Sequence[Unit]) -> Section:
    """The section: for each set the forms, the goals, and whether a form reaches all of them."""
    section = Section([Text(_INTRODUCTION), Text(_NO_CHOICE), Text(_GOALS)])
    if any(" openood " in unit.about["command"] for unit in units):
        section.add(
            Text(
                "Units whose command below is that of `openood` were measured within its run, which"
                " had the forms beside the detectors at that commit. The networks are of the same "
                "recipe and seeds as those of the `openood` page, and were trained anew."
            )
        )
    for name, found in by_set(units).items():
        title = PAPER_NAMES.get(name, name)
        accuracy = spread(over_seeds(found, "accuracy"), 2, 100)
        seeds = ", ".join(str(unit.result["seed"]) for unit in found)
        section.add(Text(f"{title}, seeds {seeds}: accuracy {accuracy} %."))
        section.add(*stand_ins(found), *equal_to_map(found), table(name, found))
        section.add(*_failures(found))
        goals = GOALS.get(name, ())
        if not goals:
            section.add(Text(f"No goal was set for {title}."))
        elif _measured(found):
            section.add(_reached(title, found, goals), _verdict(title, found, goals))
    section.add(*provenance(units))
    return section


def table(name: str, units: Sequence[Unit]) -> Table:
    """Every form on one in-distribution set.

    Args:
        name: The in-distribution set.
        units: Its units.
    """
    title = PAPER_NAMES.get(name, name)
    rows = []
    for form in _measured(units):
        of = partial(over_seeds, units, "forms", form)
        cells = [spread(of(where, metric), 1, 100) for _, where, metric in _COLUMNS]
        rows.append([f"→ {form}" if form == PRESENT else form, *cells])
    return Table([f"{title}: form", *(heading for heading, _, _ in _COLUMNS)], rows)


def _measured(units: Sequence[Unit]) -> list[str]:
    """The forms that failed in no unit."""
    return [f for f in units[0].result["forms"] if over_seeds(units, "forms", f, "near")]


def _failures(units: Sequence[Unit]) -> list[Text]:
    """A sentence for each form that failed, with the text of its error."""
    return [
        Text(f"`{form}` failed with seed {unit.result['seed']}: {found['error']}.")
        for unit in units
        for form, found in unit.result["forms"].items()
        if "error" in found
    ]


def _value(units: Sequence[Unit], form: str, goal: Goal) -> float:
    """A form's mean over the seeds, in %."""
    return 100 * float(mean(over_seeds(units, "forms", form, goal.where, goal.metric)))


def _reached(title: str, units: Sequence[Unit], goals: Sequence[Goal]) -> Table:
    """For each goal the values of the library's form and of the best one."""
    forms = _measured(units)
    rows = []
    for goal in goals:
        values = {form: _value(units, form, goal) for form in forms}
        best = (max if goal.larger_is_better else min)(values, key=values.__getitem__)
        reaching = sum(goal.reached(found) for found in values.values())
        ours = ["-", "-"]
        if PRESENT in values:
            ours = [f"{values[PRESENT]:.1f}", "yes" if goal.reached(values[PRESENT]) else "no"]
        rows.append([str(goal), *ours, best, f"{values[best]:.1f}", f"{reaching} of {len(forms)}"])
    head = [f"{title}: goal", "library's form", "reached", "best form", "it has", "reached by"]
    return Table(head, rows)


def _verdict(title: str, units: Sequence[Unit], goals: Sequence[Goal]) -> Text:
    """Which forms reach all goals of the set."""
    forms = [
        form
        for form in _measured(units)
        if all(goal.reached(_value(units, form, goal)) for goal in goals)
    ]
    goal, together = ("the goal", "") if len(goals) == 1 else ("all goals", " at once")
    if not forms:
        return Text(f"No form reaches {goal} of {title}{together}.")
    named = "; ".join(f"`{form}`" for form in forms)
    verb = "is" if len(goals) == 1 else "are"
    return Text(f"{title}: {goal} {verb} reached{together} by {named}.")
