"""The paper's own training beside the short one, on the same methods and outliers.

The other experiments train by the recipe ``fast``, in 30 epochs. Here each network is trained by it
and, with the same seed, by the paper's recipe of 100 epochs, and both are measured as in
:mod:`rgpr_paper.experiments.detection`. The page says how much of the distance between our FPR95
and the printed one the paper's recipe closes, and on which outliers the rest lies. MAP decides most
of it, because it contains no part of this library's method.

There is no deep ensemble: five networks of 100 epochs for every seed would take longer than all
other experiments. Both recipes are run whatever ``--recipe`` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..compared import compared
from ..comparison import PAPER_NAMES, by_set, equal_to_map, over_seeds, percent, stand_ins
from ..context import Context
from ..detection_claims import claims
from ..experiment import Experiment, register
from ..networks import SETTINGS, plan_of
from ..recipe_answer import LEVEL, answer, question
from ..recipe_gap import RECIPES, Gap, gaps_of, kinds_of, stand_ins_of
from ..section import Block, Claim, Section, Table, Text, beside, printed, provenance, spread
from ..units import Result, Unit, read_units, run_units

__all__ = ["METHODS", "render", "run"]

NAME = "recipe"
SETS = ("mnist", "cifar10")
METHODS = (
    "MAP",
    "TS",
    "GP-DSCS",
    "LLL",
    "LLL-RGPR-LL",
    "LLL-RGPR-OOD",
    "LLL-RGPR-onset",
    "LLL-RGPR-score",
)
_WORDS = {"fast": "the short training", "paper": "the paper's training"}


def run(context: Context) -> None:
    """A unit ``SET-RECIPE-seedN`` for each set, recipe and seed."""
    for name in context.image_sets(*SETS):
        for recipe in RECIPES:
            trained = replace(context, recipe=recipe)
            units = {
                f"{name}-{recipe}-seed{seed}": partial(_unit, trained, name, seed)
                for seed in context.seeds
            }
            run_units(trained, NAME, units, recipe=recipe, methods=METHODS)


def _unit(context: Context, name: str, seed: int) -> Result:
    plan = asdict(plan_of(context, SETTINGS[name]))
    measured = compared(context, name, seed, METHODS)
    return {**measured, "recipe": context.recipe, "plan": plan}


# -- what it shows -------------------------------------------------------------------------------

_NOTES = (
    "All in % but the NLL. A cell has the short training, then the paper's, and in parentheses what"
    " the paper printed. ± is the standard deviation between seeds; both trainings have the same "
    "seeds. Images, split, methods and measures are those of the experiment `detection`. There is "
    "no deep ensemble, since each seed would need five networks of 100 epochs."
)
# The tables by set of outliers: metric, and the paper's table of it.
_TABLES = {"fpr95": "ood_hyperopt", "auroc": "ood_auroc_auprc", "mmc": "ood_hyperopt"}
# Fields of a plan, and whether the paper's text has their value.
_PLAN = {
    "optimizer": "yes",
    "lr": "yes",
    "momentum": "yes",
    "weight_decay": "yes",
    "epochs": "yes",
    "schedule": "yes",
    "milestones": "yes",
    "batch_size": "no",
    "augment": "no",
    "nesterov": "no",
    "bf16": "no",
}


def render(folder: Path) -> Section:
    """For each set the answer first, then the tables from which it follows."""
    units = read_units(folder)
    section = Section([Text(_NOTES)])
    for name, found in by_set(units).items():
        title = PAPER_NAMES.get(name, name)
        recipes = {r: [u for u in found if u.result["recipe"] == r] for r in RECIPES}
        section.add(*_blocks(title, found, recipes))
        section.claims += _claims(title, recipes)
    section.add(*provenance(units))
    return section


def _blocks(title: str, units: list[Unit], recipes: dict[str, list[Unit]]) -> Iterator[Block]:
    """Everything that is shown of one in-distribution set."""
    gaps = gaps_of(title, recipes)
    lacking = [recipe for recipe in RECIPES if not recipes[recipe]]
    if lacking:
        yield Text(f"Gap: {title} was not run by the recipe `{lacking[0]}`.")
    elif "MAP" in gaps:
        yield from answer(title, gaps)
        yield _gaps(title, gaps)
    else:
        yield Text(f"{question(title)} The paper printed no numbers of these sets of outliers.")
    yield from stand_ins(units)
    yield from equal_to_map(units)
    yield _plans(title, recipes)
    yield _means(title, units, recipes)
    for metric, table in _TABLES.items():
        yield _by_outliers(title, units, recipes, (metric, table))


def _gaps(title: str, gaps: dict[str, Gap]) -> Table:
    """Points between our mean FPR95 and the printed one, and where they are."""
    rows = []
    for method, gap in gaps.items():
        points = [gap.left("fast"), gap.left("paper"), gap.closed()]
        points += [gap.share("paper", kinds) for kinds in (gap.own, gap.others)]
        average = sum(gap.printed.values()) / len(gap.printed)
        rows.append([method, f"{average:.1f}", *(f"{value:+.1f}" for value in points)])
    head = [f"{title}: FPR95", "printed", "short training", "the paper's training", "nearer by"]
    head += ["of the rest: the paper's own images", "of the rest: stand-ins"]
    caption = (
        f"{title}: points between our mean FPR95 and the printed one, by how many the paper's "
        "training is nearer, and which sets of outliers the rest is on (these two add up to it)"
    )
    return Table(head, rows, caption)


def _plans(title: str, recipes: dict[str, list[Unit]]) -> Table:
    """What the two trainings are, and which values the paper names."""
    plans = {r: found[0].result["plan"] for r, found in recipes.items() if found}
    rows = [
        [word, *(_shown(plan, word) for plan in plans.values()), named]
        for word, named in _PLAN.items()
    ]
    head = [f"{title}: training", *(_WORDS[recipe] for recipe in plans), "named by the paper"]
    return Table(head, rows)


def _shown(plan: dict[str, Any], word: str) -> str:
    """The value of a plan's field, or a dash where the plan makes no use of it."""
    idle = {"milestones": plan["schedule"] != "milestones"}
    idle |= dict.fromkeys(("momentum", "nesterov"), plan["optimizer"] != "sgd")
    value = plan[word]
    if idle.get(word, False):
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _means(title: str, units: list[Unit], recipes: dict[str, list[Unit]]) -> Table:
    """Means over the sets of outliers, and what a method does at the data."""
    kinds = kinds_of(units)
    rows = []
    for method in METHODS:
        place = {"in": title, "method": method}
        values = [printed("ood_hyperopt", **place, metric="FPR95", out=kind) for kind in kinds]
        known = [value for value in values if value is not None]
        average = f"{sum(known) / len(known):.1f}" if known and len(known) == len(kinds) else None
        accuracy, error = (printed("acc_ece", **place, metric=m) for m in ("accuracy", "ECE"))
        rows.append(
            [
                method,
                beside(_both(recipes, method, "fpr95", "mean"), average),
                _both(recipes, method, "auroc", "mean"),
                beside(_both(recipes, method, "accuracy", digits=2), accuracy),
                beside(_both(recipes, method, "ece", digits=2), error),
                _both(recipes, method, "nll", digits=4, factor=1),
            ]
        )
    head = [f"{title}: short / the paper's training", "FPR95", "AUROC", "accuracy", "ECE", "NLL"]
    return Table(head, rows, f"{title}: means over the sets of outliers, accuracy and calibration")


def _by_outliers(
    title: str, units: list[Unit], recipes: dict[str, list[Unit]], shown: tuple[str, str]
) -> Table:
    """One metric for each set of outliers; stand-ins are marked in the head."""
    metric, table = shown
    kinds, marked = kinds_of(units), stand_ins_of(units)
    columns = ["test", *kinds] if metric == "mmc" else kinds
    rows = []
    for method in METHODS:
        if not over_seeds(units, "methods", method, metric):
            continue
        cells = []
        for kind in columns:
            place = {"in": title, "out": title if kind == "test" else kind, "method": method}
            paper = printed(table, **place, metric=metric.upper())
            cells.append(beside(_both(recipes, method, metric, kind), paper))
        rows.append([method, *cells])
    head = [f"{kind} (stand-in)" if kind in marked else kind for kind in columns]
    return Table(
        [f"{metric.upper()}, {title}", *head],
        rows,
        f"{title}: {metric.upper()}, short training / the paper's training ({table})",
    )


def _both(recipes: dict[str, list[Unit]], *keys: str, digits: int = 1, factor: float = 100) -> str:
    """A value by the short training and by the paper's."""
    values = [over_seeds(recipes[recipe], "methods", *keys) for recipe in RECIPES]
    return " / ".join(spread(found, digits, factor) for found in values) if any(values) else "-"


# -- claims --------------------------------------------------------------------------------------


def _claims(title: str, recipes: dict[str, list[Unit]]) -> list[Claim]:
    """The claims on detection by the paper's training, and how near it comes to the paper."""
    if not recipes["paper"]:
        return []
    found = claims(title, recipes["paper"], _WORDS["paper"])
    found += _accuracy(title, recipes["paper"])
    gap = gaps_of(title, recipes).get("MAP")
    if gap is not None and abs(gap.left("fast")) > LEVEL:
        fast, paper = gap.left("fast"), gap.left("paper")
        nearer = abs(paper) < abs(fast)
        found.append(
            Claim(
                f"{title}: the paper's training brings the mean FPR95 of MAP nearer to the printed",
                f"{fast:+.1f} points from it by the short training, {paper:+.1f} by the paper's",
                nearer,
                "" if nearer else "So the length of training is not what sets both apart.",
                ours=True,
            )
        )
    return found


def _accuracy(title: str, units: Sequence[Unit]) -> list[Claim]:
    """That the paper's training gives networks as good as the paper's, where it has them."""
    wanted = printed("acc_ece", **{"in": title}, method="MAP", metric="accuracy")
    if wanted is None:
        return []
    ours = percent(units, "MAP", "accuracy")
    holds = abs(ours - wanted) <= 0.5
    return [
        Claim(
            f"{title}: with the paper's training the accuracy of MAP is within 0.5 points of the "
            "printed one",
            f"{ours:.2f} % against {wanted:.1f} %",
            holds,
            "" if holds else "The paper names neither batch size nor augmentation; both are ours.",
            ours=True,
        )
    ]


register(
    Experiment(
        name=NAME,
        title="The paper's own training, beside the short one",
        paper="ours",
        place=112,
        run=run,
        render=render,
    )
)
