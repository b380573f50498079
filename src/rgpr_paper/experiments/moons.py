"""Figure "asymp_overconfidence": confidence on two moons, zoomed in and zoomed out.

The paper shows its BNN alone; here it stands between the network itself and the same BNN with the
residual. The BNN is last-layer Laplace with Kronecker factors, its prior precision by the marginal
likelihood; the residual is the paper's, tuned by L_OOD with uniform noise around the data. The
network has two hidden layers of 100 units.
"""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rgpr._demo import confidence_map
from rgpr.metrics import accuracy, confidence

from ..context import Context
from ..experiment import Experiment, register
from ..figures import drawing
from ..section import Claim, Figure, Section, Table, provenance
from ..two_moons import show_maps, two_moons, uniform_around
from ..units import Result, Unit, read_units, run_units

__all__ = ["render", "run"]

NAME = "moons"
WIDTHS = {"zoomed in": 3.0, "zoomed out": 1000.0}
ALPHAS = (1.0, 10.0, 100.0, 1e4, 1e6)
LABELS = {"MAP": "network alone", "LLL": "BNN (LLL)", "LLL-RGPR": "BNN with RGPR"}


def run(context: Context) -> None:
    """One unit, of the first seed."""
    seed = context.seeds[0]
    unit = partial(_maps, seed, 10 if context.small else 100, 40 if context.small else 120)
    run_units(context, NAME, {"maps": unit}, seed=seed)


def _maps(seed: int, epochs: int, resolution: int) -> Result:
    task, models, validation = two_moons(seed, epochs)
    x, y = task.train.tensors
    extended = models["last-layer Laplace + RGPR"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # layers that tuning switches off
        extended.tune(validation, objective="ood", ood=uniform_around(x, seed), progress=False)
    shown = {"MAP": models["MAP"], "LLL": models["last-layer Laplace"], "LLL-RGPR": extended}
    test_x, test_y = (part[len(task.test[0]) // 2 :] for part in task.test)
    arrays: dict[str, Tensor] = {"x": x, "y": y}
    numbers = {}
    for name, model in shown.items():
        for zoom, width in WIDTHS.items():
            arrays[f"{name}, {zoom}"] = confidence_map(model, width, resolution).half()
        with torch.no_grad():
            far = {f"{a:g}": confidence(model(a * test_x)).mean().item() for a in ALPHAS}
            numbers[name] = {"accuracy": accuracy(model(test_x), test_y), "confidence": far}
    return {"methods": numbers, "sigma2": extended.sigma2.tolist(), "arrays": arrays}


# -- what it shows -------------------------------------------------------------------------------


def render(folder: Path) -> Section:
    """The maps, and the mean confidence as the test points are scaled away."""
    (unit,) = read_units(folder)
    methods = unit.result["methods"]
    section = Section([_figure(folder, unit)])
    head = ["mean confidence at", *(f"{alpha:g} x" for alpha in ALPHAS), "accuracy"]
    rows = [
        [
            LABELS[name],
            *(f"{value:.4f}" for value in found["confidence"].values()),
            f"{found['accuracy']:.1%}",
        ]
        for name, found in methods.items()
    ]
    section.add(Table(head, rows), *provenance([unit]))
    last = f"{ALPHAS[-1]:g}"
    far = {name: found["confidence"][last] for name, found in methods.items()}
    section.claims = [
        Claim(
            "far away the BNN stays overconfident, though less so than the network alone",
            f"at {last} x: BNN {far['LLL']:.3f}, network {far['MAP']:.3f}",
            0.6 < far["LLL"] < far["MAP"],
        ),
        Claim(
            "with the residual the confidence goes to 1/2",
            f"{far['LLL-RGPR']:.4f} at {last} x",
            far["LLL-RGPR"] < 0.51,
        ),
        Claim(
            "the residual leaves the accuracy as it is, within 0.3 points",
            f"{methods['LLL-RGPR']['accuracy']:.1%} against {methods['LLL']['accuracy']:.1%}",
            abs(methods["LLL-RGPR"]["accuracy"] - methods["LLL"]["accuracy"]) <= 0.003,
        ),
    ]
    return section


def _figure(folder: Path, unit: Unit) -> Figure:
    caption = (
        "Confidence on two moons near the data and from far away: the network alone, a BNN, and "
        "the BNN with the residual."
    )
    with drawing(
        folder, "moons", caption, nrows=2, ncols=3, figsize=(6.4, 3.5), sharex="row", sharey="row"
    ) as (figure, axes, block):
        show_maps(figure, axes, unit.arrays, LABELS, WIDTHS)
    return block


register(
    Experiment(
        name=NAME,
        title="Overconfidence far away, on two moons",
        paper="fig:asymp_overconfidence",
        place=20,
        run=run,
        render=render,
    )
)
