"""Other forms of the score, in answer to why the score misses some of its goals.

Not in the paper. On networks and outliers as those of ``openood``, every form of
:mod:`rgpr_paper.score_forms` is measured by AUROC and FPR95, as means over near, far and all
outliers. Each form is computed from what one pass over the images left, so that the whole table
costs little more than one score. A form that fails is kept with the text of its error.

The table chooses nothing. Its outliers are those by which the other tables judge the score, and a
choice by these numbers would spoil those tables.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import torch

from rgpr.metrics import auroc, fpr95

from ..comparison import PAPER_NAMES
from ..context import Context
from ..experiment import Experiment, register
from ..score_forms import FORMS, Parts
from ..score_forms_page import page
from ..section import Section
from ..subject import Subject
from ..units import Result, read_units, run_seeds

__all__ = ["render", "run"]

NAME = "score-forms"
# Each takes the scores of data and of outliers, higher for inputs more like the data.
_METRICS = {"auroc": auroc, "fpr95": fpr95}


def run(context: Context) -> None:
    """A unit for each set and seed."""
    run_seeds(context, NAME, context.image_sets(*PAPER_NAMES), _unit, forms=list(FORMS))


def _unit(context: Context, name: str, seed: int) -> Result:
    subject = Subject.of(context, name, seed)
    residual = subject.model.residual
    assert residual is not None
    train = subject.outputs(subject.competing.train)
    parts = Parts(subject.bench(train), residual)
    return {**subject.about(), "forms": _measured(parts, subject)}


@torch.no_grad()
def _measured(parts: Parts, subject: Subject) -> dict[str, dict[str, Any]]:
    """For each form the means of AUROC and FPR95 over near, far and all outliers."""
    measured: dict[str, dict[str, Any]] = {}
    where = subject.where
    where["all"] = [kind for kinds in where.values() for kind in kinds]
    for name, form in FORMS.items():
        try:
            scores = {kind: form(parts, each) for kind, each in subject.found.items()}
        except (RuntimeError, ValueError) as error:
            measured[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            continue
        measured[name] = {
            means: {
                metric: mean(value(-scores["test"], -scores[kind]) for kind in kinds)
                for metric, value in _METRICS.items()
            }
            for means, kinds in where.items()
        }
    return measured


def render(folder: Path) -> Section:
    """For each set a table of the forms, and what the goals were."""
    return page(read_units(folder))


register(
    Experiment(
        name=NAME,
        title="Other forms of the score",
        paper="ours",
        place=156,
        run=run,
        render=render,
    )
)
