"""Every base posterior on scikit-learn's digits, without and with the paper's residual.

The confidence is the mean over held-out digits times alpha. Predictions are by the probit, for
bases that are known by samples with the samples' moments. Two Gaussian processes for regression
show their mean error bar instead. The bases are those of :mod:`rgpr_paper.posterior_table`, which
the conformance tests build as well, so an entry there gives a new base both.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rgpr._demo import digits, train
from rgpr._progress import bar
from rgpr.metrics import accuracy, confidence, ece
from rgpr.model import RGPR
from rgpr.posteriors import Posterior

from ..context import Context
from ..experiment import Experiment, register
from ..posterior_table import CLASSIFIERS, REGRESSORS, loader, regression_data, test_data
from ..section import Claim, Section, Table, Text, provenance
from ..units import Result, read_units, run_units

__all__ = ["render", "run"]

NAME = "bases"
ALPHAS = (1.0, 2000.0, 1e6)
SIGMA2 = 0.1
SMALL = ("MAP", "temperature", "last-layer Laplace, kron", "MC dropout")  # in seconds


def run(context: Context) -> None:
    """One unit; the small version has four bases over a network trained for a tenth of the time."""
    run_units(context, NAME, {"digits": partial(_unit, context.small)}, sigma2=SIGMA2)


def _unit(small: bool) -> Result:
    task = digits(0)
    torch.manual_seed(0)
    network = train(task, epochs=10 if small else 100)
    x, y = (part[: 60 if small else None] for part in test_data(task))
    rows = []
    names = SMALL if small else tuple(CLASSIFIERS)
    for name in bar(names, NAME, True):
        build = CLASSIFIERS[name]
        for scale, model in _with_and_without(build(network, task), loader(task)):
            with torch.no_grad():
                p, *far = (model(alpha * x) for alpha in ALPHAS)
            rows.append(
                {
                    "base": name,
                    "sigma2": scale,
                    "accuracy": accuracy(p, y),
                    "ece": ece(p, y),
                    "confidence": [confidence(q).mean().item() for q in (p, *far)],
                }
            )
    bars = []
    for name, build_regressor in REGRESSORS.items():
        data = [regression_data(task)[0]]
        for scale, model in _with_and_without(build_regressor(task), data):
            with torch.no_grad():
                variances = [model(alpha * x, diagonal_output=True)[1] for alpha in ALPHAS]
            found = [variance.sqrt().mean().item() for variance in variances]
            bars.append({"base": name, "sigma2": scale, "bars": found})
    return {"classes": task.classes, "rows": rows, "bars": bars}


def _with_and_without(base: Posterior, data: Any) -> Iterator[tuple[float, RGPR]]:
    for scale in (0.0, SIGMA2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = RGPR(base, residual="paper").fit(data)
        model.sigma2 = scale
        yield scale, model


# -- what it shows -------------------------------------------------------------------------------


def render(folder: Path) -> Section:
    """A table of the classifiers, one of the regressors, and what each base gives far away."""
    units = read_units(folder)
    found = units[0].result
    distances = [f"alpha = {alpha:g}" for alpha in ALPHAS]
    classifiers = [
        [
            row["base"],
            _scale(row),
            f"{row['accuracy']:.1%}",
            f"{row['ece']:.1%}",
            *(f"{number:.3f}" for number in row["confidence"]),
        ]
        for row in found["rows"]
    ]
    regressors = [
        [row["base"], _scale(row), *(f"{number:.3g}" for number in row["bars"])]
        for row in found["bars"]
    ]
    section = Section(
        [
            Text(
                f"Held-out digits times alpha; 1/C is {1 / found['classes']:g}. Below: the mean "
                "error bar of two Gaussian processes for regression."
            ),
            Table(["base", "residual", "accuracy", "ECE", *distances], classifiers),
            Table(["base", "residual", *(f"error bar, {d}" for d in distances)], regressors),
            *provenance(units),
        ]
    )
    limit = 1 / found["classes"]
    extended = [row for row in found["rows"] if row["sigma2"]]
    furthest = max(extended, key=lambda row: row["confidence"][-1])
    section.claims.append(
        Claim(
            "Every base with the residual is within 0.01 of 1/C at alpha = 1e6",
            f"at most {furthest['confidence'][-1]:.3f} ({furthest['base']}), 1/C is {limit:g}",
            furthest["confidence"][-1] <= limit + 0.01,
            ours=True,
        )
    )
    return section


def _scale(row: dict[str, Any]) -> str:
    return f"sigma2 = {row['sigma2']:g}" if row["sigma2"] else "-"


register(
    Experiment(
        name=NAME,
        title="Every base on digits, without and with the residual",
        place=185,
        run=run,
        render=render,
    )
)
