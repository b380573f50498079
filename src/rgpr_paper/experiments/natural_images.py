"""Table "ood_imagenet": natural images instead of noise as outliers for tuning.

ECE, and FPR95 averaged over the sets of outliers, when sigma2 is tuned by the validation
likelihood, with smoothed noise, and with ImageNet at 32 x 32 or its stand-in. For MNIST natural
images are made grey, 28 x 28.

Beyond the paper, ``LLL-RGPR-onset`` and ``LLL-RGPR-score`` are this library's default residual,
calibrated on validation images without any outlier, and its score, which has no ECE. Units of
earlier versions lack both, and then the tables have no row of them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from ..comparison import (
    PAPER_NAMES,
    TUNINGS,
    by_set,
    equal_to_map,
    over_seeds,
    percent,
    remarks,
    stand_ins,
)
from ..context import Context
from ..data import notes_of, read_outliers
from ..experiment import Experiment, register
from ..measures import measure
from ..methods import OUTLIERS_TO_TUNE, contestants
from ..section import Claim, Section, Table, Text, beside, printed, provenance, spread
from ..units import Result, Unit, read_units, run_seeds

__all__ = ["render", "run"]

NAME = "natural-images"
# Our methods by the paper's names; those that it does not have are this library's, and use no
# outliers.
OURS = ("LLL-RGPR-onset", "LLL-RGPR-score")
METHODS: dict[str, str] = TUNINGS | {method: method for method in OURS}


def run(context: Context) -> None:
    """A unit for each set and seed."""
    run_seeds(context, NAME, context.image_sets(*PAPER_NAMES), _unit)


def _unit(context: Context, name: str, seed: int) -> Result:
    outliers, missing = read_outliers(context.data, name, context.device, context.download)
    competing = contestants(context, name, seed)
    found = {
        method.name: measure(method.predict, competing.test, outliers)
        for method in competing.methods(METHODS)
    }
    return {
        "set": name,
        "seed": seed,
        "notes": competing.notes | competing.natural_notes | notes_of(outliers),
        "choices": [competing.choices],
        "missing": missing,
        "methods": found,
    }


# -- what it shows -------------------------------------------------------------------------------

_ABOUT = (
    "The paper's residual over LLL, tuned by the validation likelihood (-LL), with smoothed noise"
    " as outliers too (-OOD), or with natural images (-OOD-natural). In %, less is better; FPR95 "
    "is the mean over the sets of outliers. ± is the standard deviation between networks. The "
    "paper's means of FPR95 are over six sets, of which it lists five, and ours over these five: "
    "compare differences and not levels."
)


def render(folder: Path) -> Section:
    """The paper's table."""
    units = read_units(folder)
    sets = by_set(units)
    section = Section([Text(_ABOUT)])
    if any(method in unit.result["methods"] for unit in units for method in OURS):
        section.add(Text(_MARKED))
    section.add(*stand_ins(units), *equal_to_map(units))
    head = [PAPER_NAMES.get(name, name) for name in sets]
    for metric, keys in (("ECE", ("ece",)), ("FPR95", ("fpr95", "mean"))):
        rows = []
        for method, paper in METHODS.items():
            if not any(over_seeds(found, "methods", method, *keys) for found in sets.values()):
                continue
            cells = [
                beside(
                    spread(over_seeds(found, "methods", method, *keys), 1, 100),
                    printed("ood_imagenet", **{"in": column}, method=paper, metric=metric),
                )
                for column, found in zip(head, sets.values(), strict=True)
            ]
            rows.append([f"→ {method}" if method in OURS else method, *cells])
        section.add(Table([metric, *head], rows))
    section.add(*remarks("ood_imagenet"), *provenance(units))
    for name, found in sets.items():
        section.claims += _claims(PAPER_NAMES.get(name, name), found)
    return section


_MARKED = (
    "An arrow marks this library's default residual, which was calibrated on validation images and "
    "saw no outlier, and its score, which is no probability and so has no ECE."
)


def _claims(name: str, units: list[Unit]) -> list[Claim]:
    averaged = partial(percent, units)

    noise, natural = "LLL-RGPR-OOD", "LLL-RGPR-OOD-natural"
    errors = averaged(noise, "ece"), averaged(natural, "ece")
    passes = averaged(noise, "fpr95", "mean"), averaged(natural, "fpr95", "mean")
    worse, better = errors[1] >= errors[0], passes[1] <= passes[0]
    return [
        Claim(
            f"{name}: with natural images the ECE gets worse",
            f"{errors[0]:.1f} % with noise, {errors[1]:.1f} % with natural images",
            worse,
            "" if worse else _discussion(name, "ECE", units),
        ),
        Claim(
            f"{name}: with natural images the FPR95 gets better",
            f"{passes[0]:.1f} % with noise, {passes[1]:.1f} % with natural images",
            better,
            "" if better else _discussion(name, "FPR95", units),
        ),
        *_without_outliers(name, units),
    ]


def _without_outliers(name: str, units: list[Unit]) -> list[Claim]:
    """What the default residual does without any outliers, where the units have it."""
    default, noise = "LLL-RGPR-onset", "LLL-RGPR-OOD"
    if not over_seeds(units, "methods", default):
        return []
    claims = []
    for metric, keys in (("ECE", ("ece",)), ("FPR95", ("fpr95", "mean"))):
        own, tuned = percent(units, default, *keys), percent(units, noise, *keys)
        natural = percent(units, f"{noise}-natural", *keys)
        claims.append(
            Claim(
                f"{name}: the {metric} of {default}, which saw no outlier, is below that of {noise}"
                ", which was tuned with noise",
                f"{own:.1f} % against {tuned:.1f} %",
                own < tuned,
                f"With natural images {noise} has {natural:.1f} %.",
                ours=True,
            )
        )
    return claims


def _discussion(name: str, metric: str, units: list[Unit]) -> str:
    """The same two numbers in the paper's table, and what is different here."""
    before, after = (
        printed("ood_imagenet", **{"in": name}, method=method, metric=metric)
        for method in ("LLL-RGPR-OOD", "LLL-RGPR-OOD ImageNet")
    )
    note = units[0].result["notes"].get("ImageNet32")
    what = f" ({note})" if note else ""
    return (
        f"In the paper's table: {before} % with noise, {after} % with natural images. Here scales "
        f"are tuned to the optimum, with {OUTLIERS_TO_TUNE} images{what}."
    )


register(
    Experiment(
        name=NAME,
        title="Natural images as outliers for tuning",
        paper="tab:ood_imagenet",
        place=140,
        run=run,
        render=render,
    )
)
