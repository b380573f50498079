"""Figure "tuning": objectives for sigma2 on two moons; and what each does to digits.

The base is last-layer Laplace for the moons, with uniform noise around them as outliers, and the
network itself for digits, with the default outliers, :func:`rgpr.noise.like_data`. Validation data
are held out of the test set. The table of digits, budgets, temperatures and the default residual
are not in the paper.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from rgpr import noise
from rgpr._demo import Task, confidence_map, digits, moons, train, wrap
from rgpr.metrics import accuracy, confidence, ece, nll
from rgpr.model import RGPR
from rgpr.tuning import TuningResult

from ..context import Context
from ..experiment import Experiment, register
from ..figures import drawing
from ..section import Claim, Figure, Section, Table, Text, provenance
from ..two_moons import show_maps, uniform_around
from ..units import Result, Unit, read_units, run_units

__all__ = ["render", "run"]

NAME = "tuning"
OBJECTIVES: dict[str, dict[str, Any]] = {
    "marginal likelihood": {"objective": "marginal-likelihood"},
    "L_LL": {"objective": "likelihood"},
    "L_OOD": {"objective": "ood"},
}
BEYOND: dict[str, dict[str, Any]] = {
    "L_OOD, joint temperature": {"objective": "ood", "temperature": True},
    "L_OOD, NLL + 0.01 at most": {"objective": "ood", "max_nll_increase": 0.01},
    "L_OOD, joint temperature, ECE + 0.5 % at most": {
        "objective": "ood",
        "temperature": True,
        "max_ece_increase": 0.005,
    },
}
WIDTHS = {"zoomed in": 3.0, "zoomed out": 30.0}
_TITLES = {"L_LL": r"$\mathcal{L}_\mathrm{LL}$", "L_OOD": r"$\mathcal{L}_\mathrm{OOD}$"}


def run(context: Context) -> None:
    """Two units: the maps of the moons, and the table of digits, for the first seed."""
    seed, epochs = context.seeds[0], 10 if context.small else 100
    units = {
        "moons": partial(_moons, seed, epochs, resolution=40 if context.small else 120),
        "digits": partial(_digits, seed, epochs),
    }
    run_units(context, NAME, units, seed=seed)


def _moons(seed: int, epochs: int, resolution: int) -> Result:
    """Maps of the confidence, untuned and after each objective."""
    task, _, extended, validation, _ = _prepare(moons(seed), "last-layer Laplace", seed, epochs)
    x, y = task.train.tensors
    around = uniform_around(x, seed)
    extended.sigma2 = 1.0
    sigma2 = {"untuned": extended.sigma2.tolist()}
    arrays: dict[str, Tensor] = {"x": x, "y": y, **_maps(extended, "untuned", resolution)}
    for name, _ in _tuned(extended, validation, OBJECTIVES, around):
        sigma2[name] = extended.sigma2.tolist()
        arrays |= _maps(extended, name, resolution)
    return {"sigma2": sigma2, "layers": extended.layers, "arrays": arrays}


def _maps(model: RGPR, name: str, resolution: int) -> dict[str, Tensor]:
    """Maps of the confidence in every zoom, as a unit keeps them."""
    return {
        f"{name}, {zoom}": confidence_map(model, width, resolution).half()
        for zoom, width in WIDTHS.items()
    }


def _digits(seed: int, epochs: int) -> Result:
    """Test metrics of digits after each objective."""
    task, base, extended, validation, (x, y) = _prepare(digits(seed), "MAP", seed, epochs)
    noisy = noise.uniform(x, generator=torch.Generator().manual_seed(seed))
    inputs = {"test": x, "uniform noise": noisy, "10 x": 10 * x, "1000 x": 1000 * x}
    measured = partial(_measured, y, inputs)
    rows = {"base alone": measured(base), "untuned": measured(extended)}
    for name, result in _tuned(extended, validation, OBJECTIVES | BEYOND, None):
        rows[name] = measured(extended, result.seconds)
    default = RGPR(base.posterior.network).fit(DataLoader(task.train, batch_size=256))
    rows["default residual, fitted"] = measured(default)
    started = time.perf_counter()
    default.calibrate(validation)
    rows["default residual, calibrated"] = measured(default, time.perf_counter() - started)
    return {"rows": rows}


@torch.no_grad()
def _measured(
    y: Tensor, inputs: dict[str, Tensor], model: RGPR, seconds: float | None = None
) -> dict[str, Any]:
    """A row of the table: metrics at the test data, and the confidence on each kind of input."""
    p = model(inputs["test"])
    return {
        "accuracy": accuracy(p, y),
        "nll": nll(p, y),
        "ece": ece(p, y),
        "confidence": {kind: confidence(model(z)).mean().item() for kind, z in inputs.items()},
        "seconds": seconds,
    }


def _prepare(
    task: Task, base: str, seed: int, epochs: int
) -> tuple[Task, RGPR, RGPR, DataLoader[Any], tuple[Tensor, Tensor]]:
    """A trained network without and with residual, validation data, and the rest of the test."""
    torch.manual_seed(seed)
    models = wrap(train(task, epochs), task)
    x, y = task.test
    half = len(x) // 2
    validation = DataLoader(TensorDataset(x[:half], y[:half]), batch_size=256)
    return task, models[base], models[f"{base} + RGPR"], validation, (x[half:], y[half:])


def _tuned(
    model: RGPR,
    validation: DataLoader[Any],
    objectives: dict[str, dict[str, Any]],
    outliers: list[Tensor] | None,
) -> Iterator[tuple[str, TuningResult]]:
    """One objective after the other, each from the same start."""
    start, warm = model.sigma2, model.temperature
    for name, options in objectives.items():
        model.sigma2, model.temperature = start, warm
        ood = outliers if options["objective"] == "ood" else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that L_LL switches layers off is the point
            yield name, model.tune(validation, ood=ood, **options)


# -- what it shows -------------------------------------------------------------------------------


def render(folder: Path) -> Section:
    """The figure and the table, of those units that are there."""
    units = {unit.name: unit for unit in read_units(folder)}
    section = Section()
    if "moons" in units:
        section.add(_figure(folder, units["moons"]))
        sigma2 = units["moons"].result["sigma2"]
        rows = [[name, *(f"{value:.3g}" for value in values)] for name, values in sigma2.items()]
        section.add(Table(["sigma2", *units["moons"].result["layers"]], rows, "Scales found"))
        section.claims += _claims(units["moons"])
    if "digits" in units:
        section.add(
            Text(
                "The same objectives on digits, over the network alone, with the default outliers; "
                "then what the library has beyond the paper: a temperature tuned with the scales, "
                "budgets, and the default residual."
            ),
            _table(units["digits"].result["rows"]),
        )
    section.add(*provenance(list(units.values())))
    return section


def _figure(folder: Path, unit: Unit) -> Figure:
    maps, names = unit.arrays, list(unit.result["sigma2"])
    caption = (
        "Confidence of last-layer Laplace with RGPR on two moons, untuned (all scales 1) and after "
        "each objective; above near the data, below from ten times as far. Outliers for tuning "
        "are uniform noise in a box three times as wide as the data."
    )
    with drawing(
        folder,
        "tuning",
        caption,
        nrows=2,
        ncols=len(names),
        figsize=(7.2, 3.4),
        sharex="row",
        sharey="row",
    ) as (figure, axes, block):
        titles = {name: _TITLES.get(name, name) for name in names}
        show_maps(figure, axes, maps, titles, WIDTHS)
    return block


def _table(rows: dict[str, Any]) -> Table:
    kinds = list(next(iter(rows.values()))["confidence"])
    head = ["digits", "accuracy", "NLL", "ECE", *(f"confidence: {kind}" for kind in kinds)]
    cells = []
    for name, row in rows.items():
        numbers = [f"{row['accuracy']:.1%}", f"{row['nll']:.3f}", f"{row['ece']:.1%}"]
        numbers += [f"{value:.2f}" for value in row["confidence"].values()]
        cells.append([name, *numbers, "-" if row["seconds"] is None else f"{row['seconds']:.2f}"])
    return Table([*head, "seconds to tune"], cells)


def _claims(unit: Unit) -> list[Claim]:
    """The likelihood alone leaves more confidence outside the data than the outliers do."""
    # The corners of the map near the data: away from it, but not far.
    outside = {
        name: float(
            unit.arrays[f"{name}, zoomed in"].float()[[0, 0, -1, -1], [0, -1, 0, -1]].mean()
        )
        for name in ("L_LL", "L_OOD")
    }
    return [
        Claim(
            "L_LL alone is overconfident outside the data; L_OOD is less so",
            f"mean confidence in the four corners of the upper maps: L_LL {outside['L_LL']:.3f}, "
            f"L_OOD {outside['L_OOD']:.3f}",
            outside["L_OOD"] < outside["L_LL"],
        )
    ]


register(
    Experiment(
        name=NAME,
        title="Objectives for tuning the residual's scales",
        paper="fig:tuning",
        place=40,
        run=run,
        render=render,
    )
)
