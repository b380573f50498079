"""The default on images: are its probabilities the base's, and does its score find strangers?

Not in the paper. The base is last-layer Laplace. The default residual is fitted on the training
images and calibrated on 2000 images split off the test set; no outlier is used for either. What is
measured:

- at the data: NLL, ECE and the share of wrong predictions above 0.9, of the base, after `fit` and
  after `calibrate`; the share of test images that `flag` flags at 5 %, and the coverage of
  `predict_set` at 90 %;
- against near and far outliers: FPR95 and AUROC of the confidence and of the score.

Near outliers are natural images or characters like the data, far ones are of another kind. The form
of the score was found while looking at most of them, on other networks; the section "What was
chosen on what" of the page on residuals has the whole list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from rgpr.metrics import accuracy, auroc, confidence, ece, fpr95, nll
from rgpr.model import RGPR

from ..comparison import PAPER_NAMES, by_set, equal_to_map, over_seeds, stand_ins
from ..context import Context
from ..data import ImageSet, Loader, notes_of
from ..experiment import Experiment, register
from ..methods import Contestants, contestants
from ..near_far import near_and_far
from ..section import Claim, Section, Table, Text, provenance, spread
from ..units import Result, Unit, read_units, run_seeds

__all__ = ["render", "run", "summary"]

NAME = "two-answers"
_Answer = Callable[[Tensor], Tensor]


def run(context: Context) -> None:
    """A unit for each set and seed."""
    run_seeds(context, NAME, context.image_sets(*PAPER_NAMES), _unit)


def _unit(context: Context, name: str, seed: int) -> Result:
    outliers, missing = near_and_far(context, name)
    competing = contestants(context, name, seed)
    model = RGPR(competing.posterior("LLL")).fit(competing.train, progress=False)
    stages = {"fitted": _at_data(model, competing)}
    found = model.calibrate(competing.validation, progress=False)
    stages["calibrated"] = _at_data(model, competing)
    base = RGPR(competing.posterior("LLL"), layers="input").fit(competing.train, progress=False)
    base.sigma2 = 0.0
    stages["base"] = _at_data(base, competing)
    answers: dict[str, _Answer] = {
        "confidence, base": lambda x: confidence(base(x)),
        "confidence": lambda x: confidence(model(x)),
        "score": lambda x: -model.score(x),
    }
    return {
        "set": name,
        "seed": seed,
        "classes": competing.classes,
        "notes": competing.notes | notes_of(outliers["near"]) | notes_of(outliers["far"]),
        "choices": [competing.choices],
        "missing": missing,
        "at data": stages,
        "promises": _promises(model, competing),
        "calibration": asdict(found),
        "outliers": {
            answer: {
                where: _detection(value, competing.test, sets) for where, sets in outliers.items()
            }
            for answer, value in answers.items()
        },
    }


@torch.no_grad()
def _at_data(model: RGPR, competing: Contestants) -> dict[str, float]:
    p = torch.cat([model(x) for x, _ in competing.test])
    y = competing.test.y
    assert y is not None
    wrong = p.argmax(1) != y
    return {
        "nll": nll(p, y),
        "ece": ece(p, y),
        "accuracy": accuracy(p, y),
        "wrong above 0.9": float((confidence(p)[wrong] > 0.9).double().mean()),
    }


@torch.no_grad()
def _promises(model: RGPR, competing: Contestants) -> dict[str, float]:
    y = competing.test.y
    assert y is not None
    flags = torch.cat([model.flag(x) for x, _ in competing.test])
    sets = torch.cat([model.predict_set(x) for x, _ in competing.test])
    return {
        "flagged at 5 %": float(flags.double().mean()),
        "covered at 90 %": float(sets.gather(1, y[:, None]).double().mean()),
        "classes in a set": float(sets.double().sum(1).mean()),
    }


@torch.no_grad()
def _detection(value: _Answer, test: Loader, sets: dict[str, ImageSet]) -> dict[str, Any]:
    inside = torch.cat([value(x) for x, _ in test])
    result: dict[str, Any] = {"fpr95": {}, "auroc": {}}
    for kind, images in sets.items():
        outside = torch.cat([value(x) for x in Loader(images.x)])
        result["fpr95"][kind] = fpr95(inside, outside)
        result["auroc"][kind] = auroc(inside, outside)
    for values in result.values():
        values["mean"] = mean(values.values())
    return result


# -- what it shows -------------------------------------------------------------------------------


def render(folder: Path) -> Section:
    """A table at the data, and one against each kind of outliers."""
    units = read_units(folder)
    section = Section(
        [
            Text(
                "Last-layer Laplace as it is, and with the default residual: fitted on training "
                "images, calibrated on 2000 images split off the test set, no outliers used. "
                "FPR95 is the share of outliers that pass where 95 % of the test images do. All in "
                "% but the NLL; ± is the standard deviation between seeds."
            )
        ]
    )
    section.add(*equal_to_map(units))
    for name, found in by_set(units).items():
        section.add(*stand_ins(found), *_tables(PAPER_NAMES.get(name, name), found))
        section.claims += _claims(name, found)
    section.add(*provenance(units))
    return section


def summary(folder: Path) -> Table:
    """The means that the README shows: a row for each set."""
    head = ["", "NLL, base", "with RGPR", "ECE, base", "with RGPR"]
    head += ["near outliers: FPR95 / AUROC, base", "score"]
    head += ["far outliers: base", "confidence with RGPR", "score"]
    rows = []
    for name, units in by_set(read_units(folder)).items():
        at = partial(_at, units)
        pair = partial(_pair, units)
        rows.append(
            [
                PAPER_NAMES.get(name, name),
                *(f"{at('at data', stage, 'nll'):.4f}" for stage in ("base", "calibrated")),
                *(f"{100 * at('at data', stage, 'ece'):.2f}" for stage in ("base", "calibrated")),
                *(pair(answer, "near") for answer in ("confidence, base", "score")),
                *(pair(a, "far") for a in ("confidence, base", "confidence", "score")),
            ]
        )
    return Table(head, rows)


def _at(units: Sequence[Unit], *keys: str) -> float:
    """The mean over seeds of what the units have under these keys."""
    return float(mean(over_seeds(units, *keys)))


def _pair(units: Sequence[Unit], answer: str, where: str) -> str:
    """FPR95 and AUROC of an answer, in %, over the near or the far outliers."""
    found = (100 * _at(units, "outliers", answer, where, m, "mean") for m in ("fpr95", "auroc"))
    return " / ".join(f"{value:.1f}" for value in found)


def _tables(name: str, units: list[Unit]) -> list[Table]:
    metrics = (("nll", 4, 1), ("ece", 2, 100), ("wrong above 0.9", 1, 100), ("accuracy", 2, 100))
    rows = [
        [stage, *(spread(over_seeds(units, "at data", stage, m), d, f) for m, d, f in metrics)]
        for stage in ("base", "fitted", "calibrated")
    ]
    at_data = Table([f"{name}, test", "NLL", "ECE", "wrong above 0.9", "accuracy"], rows)
    names = list(units[0].result["promises"])
    cells = [
        spread(over_seeds(units, "promises", n), 2, 1 if n == "classes in a set" else 100)
        for n in names
    ]
    promises = Table([f"{name}, promises", *names], [["test", *cells]])
    tables = [at_data, promises]
    for where in ("near", "far"):
        kinds = list(units[0].result["outliers"]["score"][where]["fpr95"])
        rows = [
            [
                answer,
                *(
                    " / ".join(
                        spread(over_seeds(units, "outliers", answer, where, m, kind), 1, 100)
                        for m in ("fpr95", "auroc")
                    )
                    for kind in kinds
                ),
            ]
            for answer in units[0].result["outliers"]
        ]
        tables.append(Table([f"{name}, {where}: FPR95 / AUROC", *kinds], rows))
    return tables


def _claims(name: str, units: Sequence[Unit]) -> list[Claim]:
    at = partial(_at, units)
    classes = units[0].result["classes"]
    budget = 0.02 if classes >= 100 else 0.005
    spent = at("at data", "calibrated", "nll") - at("at data", "base", "nll")
    error = 100 * (at("at data", "calibrated", "ece") - at("at data", "base", "ece"))
    wrong = [100 * at("at data", stage, "wrong above 0.9") for stage in ("calibrated", "base")]
    far = [
        100 * at("outliers", answer, "far", "fpr95", "mean")
        for answer in ("score", "confidence", "confidence, base")
    ]
    near = [
        100 * at("outliers", answer, "near", "auroc", "mean")
        for answer in ("score", "confidence, base")
    ]
    name = PAPER_NAMES.get(name, name)
    return [
        Claim(
            f"{name}: the NLL of test data is at most {budget:g} above the base's",
            f"{spent:+.4f}",
            spent <= budget,
            "" if spent <= budget else _CHANCE,
            ours=True,
        ),
        Claim(
            f"{name}: the ECE is at most 0.5 points above the base's",
            f"{error:+.2f} points",
            error <= 0.5,
            ours=True,
        ),
        Claim(
            f"{name}: no more of the wrong predictions are above 0.9 than the base's",
            f"{wrong[0]:.1f} % against {wrong[1]:.1f} %",
            wrong[0] <= wrong[1],
            ours=True,
        ),
        Claim(
            f"{name}: fewer far outliers pass the confidence than the base's, and fewer the score",
            f"{far[0]:.1f} % pass the score, {far[1]:.1f} % the confidence, {far[2]:.1f} % the "
            "base's",
            far[0] <= far[1] <= far[2],
            ""
            if far[0] <= far[1] <= far[2]
            else _each(units, "far", "fpr95", "score", "confidence", "confidence, base"),
            ours=True,
        ),
        Claim(
            f"{name}: near outliers have a better AUROC by the score than by the base's confidence",
            f"{near[0]:.1f} % against {near[1]:.1f} %",
            near[0] > near[1],
            "" if near[0] > near[1] else _each(units, "near", "auroc", "score", "confidence, base"),
            ours=True,
        ),
    ]


def _each(units: Sequence[Unit], where: str, metric: str, *answers: str) -> str:
    """The same comparison for each set of outliers, as a sentence."""
    kinds = [kind for kind in units[0].result["outliers"]["score"][where][metric] if kind != "mean"]
    values = {
        kind: [f"{100 * _at(units, 'outliers', a, where, metric, kind):.1f} %" for a in answers]
        for kind in kinds
    }
    found = (f"{kind} {' against '.join(each)}" for kind, each in values.items())
    return f"By set of outliers: {', '.join(found)}."


_CHANCE = "The budget is kept on the validation images, and the test images are others."


register(
    Experiment(
        name=NAME,
        title="Probabilities and score of the default, near and far",
        paper="ours",
        place=150,
        run=run,
        render=render,
    )
)
