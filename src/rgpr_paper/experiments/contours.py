"""Figure "kernel_contours": the residual's variance on two moons, by input alone and by all layers.

The network is that of the moons experiment, every scale is one as in an untuned model, and inputs
and units are standardised. The paper's colours have no scale in its source; here a contour is a
factor of the largest variance that 95 % of the training data stay below, so that both panels have
the same meaning: white is as certain as the data.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from rgpr._demo import plane
from rgpr.model import RGPR

from ..context import Context
from ..experiment import Experiment, register
from ..figures import COLORS, drawing
from ..section import Claim, Figure, Section, Table, provenance
from ..two_moons import two_moons
from ..units import Result, Unit, read_units, run_units

__all__ = ["render", "run"]

NAME = "contours"
WIDTH = 3.0
MULTIPLES = (1, 4, 16)
LABELS = {"input": "input only", "auto": "input and hidden layers"}


def run(context: Context) -> None:
    """One unit, of the first seed."""
    seed = context.seeds[0]
    unit = partial(_variances, seed, 10 if context.small else 100, 40 if context.small else 120)
    run_units(context, NAME, {"variances": unit}, seed=seed)


def _variances(seed: int, epochs: int, resolution: int) -> Result:
    """Maps of the variance, in units of what 95 % of the training data stay below."""
    task, models, _ = two_moons(seed, epochs)
    x, y = task.train.tensors
    arrays = {"x": x, "y": y}
    numbers = {}
    for layers in LABELS:
        model = RGPR(models["MAP"].posterior.network, layers, residual="paper")
        model.fit(DataLoader(task.train, batch_size=256), progress=False).sigma2 = 1.0
        with torch.no_grad():
            unit = float(model.variance(x).quantile(0.95))
            image = model.variance(plane(WIDTH, resolution)).reshape(resolution, resolution).T
            far = [float(model.variance(a * x).mean()) for a in (1e3, 1e4)]
        image = image / unit
        arrays[layers] = image.float()
        numbers[layers] = {
            "layers": model.layers,
            "quantile": unit,
            "areas": {str(m): _area(image <= m) for m in MULTIPLES},
            "growth": far[1] / far[0],
        }
    return {"residuals": numbers, "arrays": arrays}


def _area(inside: Tensor) -> float:
    return inside.double().mean().item() * (2 * WIDTH) ** 2


# -- what it shows -------------------------------------------------------------------------------


def render(folder: Path) -> Section:
    """The two maps, and the area that is as certain as the data."""
    (unit,) = read_units(folder)
    found = unit.result["residuals"]
    rows = [
        [
            label,
            ", ".join(found[layers]["layers"]),
            *(f"{area:.2f}" for area in found[layers]["areas"].values()),
            f"{found[layers]['growth']:.1f}",
        ]
        for layers, label in LABELS.items()
    ]
    areas = [f"area up to {m} x the data's" for m in MULTIPLES]
    head = ["residual on", "layers", *areas, "variance, 10000 x to 1000 x"]
    section = Section([_figure(folder, unit), Table(head, rows), *provenance([unit])])
    inputs, both = (found[layers]["areas"] for layers in LABELS)
    section.claims = [
        Claim(
            "with the hidden layers the region of low variance is more compact around the data",
            ", ".join(
                f"up to {m} x the data's: area {both[m]:.1f} against {inputs[m]:.1f}"
                for m in ("4", "16")
            ),
            both["4"] < inputs["4"] and both["16"] < inputs["16"],
            f"The region of the data itself is as large as before ({both['1']:.1f} against "
            f"{inputs['1']:.1f}); what changes is how fast the variance rises outside of it.",
        ),
        Claim(
            "the variance is cubic in the distance, also with the hidden layers",
            ", ".join(
                f"{label}: ten times as far, {found[layers]['growth']:.1f} times the variance"
                for layers, label in LABELS.items()
            ),
            all(abs(found[layers]["growth"] / 1000 - 1) < 0.02 for layers in LABELS),
        ),
    ]
    return section


def _figure(folder: Path, unit: Unit) -> Figure:
    caption = (
        "Variance of the residual on two moons, as a multiple of what 95 % of the training data "
        "stay below. The black line is 1."
    )
    levels = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    with drawing(
        folder, "contours", caption, ncols=2, figsize=(6.0, 2.6), sharex=True, sharey=True
    ) as (figure, axes, block):
        for panel, (layers, label) in zip(axes, LABELS.items(), strict=True):
            image = unit.arrays[layers]
            ticks = torch.linspace(-WIDTH, WIDTH, len(image))
            shown = panel.contourf(
                ticks,
                ticks,
                image.log2(),
                [0, 1, 2, 3, 4, 5, 6, 7, 8],
                cmap="Blues",
                extend="max",
            )
            panel.contour(ticks, ticks, image, [1], colors="black", linewidths=1)
            for klass, color in ((0, COLORS[1]), (1, COLORS[3])):
                chosen = unit.arrays["x"][unit.arrays["y"] == klass]
                panel.scatter(*chosen.T, s=2, color=color, lw=0, rasterized=True)
            panel.set(title=label, xticks=[-3, 0, 3], yticks=[-3, 0, 3])
        bar = figure.colorbar(shown, ax=axes, label="variance / that of the data")
        bar.set_ticks(range(9), labels=[f"{level}" for level in levels])
    return block


register(
    Experiment(
        name=NAME,
        title="The residual's variance around two moons",
        paper="fig:kernel_contours",
        place=30,
        run=run,
        render=render,
    )
)
