"""Figure "toy_reg": error bars of a regression network, a BNN, and the BNN with the residual.

The paper does not give its data: here 30 points of a sine with noise of standard deviation 0.2,
between -4 and 4, and a ReLU network with one hidden layer of 50 units. The BNN is last-layer
Laplace with Kronecker factors, prior precision and noise by the evidence. The residual is the
paper's on input and hidden layer; its scales, all at 0.0001, are small enough for Proposition 1.
Error bars are those of the function, without the noise. The lower row, from far away, is not in
the paper.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rgpr.model import RGPR

from ..context import Context
from ..experiment import Experiment, register
from ..figures import COLORS, drawing
from ..regression import fitted_laplace, trained_regressor
from ..section import Claim, Figure, Section, Table, provenance
from ..units import Result, Unit, read_units, run_units

__all__ = ["render", "run"]

NAME = "toy-regression"
SIGMA2 = 1e-4
WIDTHS = {"near": 8.0, "far": 1e4}
FAR = (1e4, 1e5)
NAMES = ("MAP", "BNN", "BNN-RGPR")


def run(context: Context) -> None:
    """One unit, of the first seed."""
    seed = context.seeds[0]
    unit = partial(_curves, seed, epochs=100 if context.small else 1000)
    run_units(context, NAME, {"curves": unit}, seed=seed)


def _curves(seed: int, epochs: int) -> Result:
    generator = torch.Generator().manual_seed(seed)
    x = 8 * torch.rand(30, 1, generator=generator) - 4
    y = x.sin() + 0.2 * torch.randn(30, 1, generator=generator)
    network = trained_regressor(x, y, seed=seed, epochs=epochs)
    base = fitted_laplace(network, x, y, "last_layer")
    models = {}
    for name, sigma2 in (("BNN", 0.0), ("BNN-RGPR", SIGMA2)):
        models[name] = RGPR(base, residual="paper").fit([x], progress=False)
        models[name].sigma2 = sigma2
    arrays: dict[str, Tensor] = {"x": x, "y": y}
    bars = {}
    with torch.no_grad():
        for zoom, width in WIDTHS.items():
            grid = torch.linspace(-width, width, 241)[:, None]
            arrays |= {f"grid, {zoom}": grid, f"MAP, mean, {zoom}": network(grid)}
            for name, model in models.items():
                mean, variance = model(grid, diagonal_output=True)
                arrays |= {f"{name}, mean, {zoom}": mean, f"{name}, std, {zoom}": variance.sqrt()}
        for name, model in models.items():
            far = [float(model(torch.tensor([[a]]), diagonal_output=True)[1]) for a in FAR]
            inliers = float(model(x, diagonal_output=True)[1].sqrt().mean())
            bars[name] = {"inliers": inliers, "far": far}
    return {"error bars": bars, "arrays": arrays}


# -- what it shows -------------------------------------------------------------------------------


def render(folder: Path) -> Section:
    """The three panels, and the error bars at the data and away from it."""
    (unit,) = read_units(folder)
    bars = unit.result["error bars"]
    rows = [
        [name, f"{bar['inliers']:.4f}", *(f"{v**0.5:.4g}" for v in bar["far"])]
        for name, bar in bars.items()
    ]
    head = ["error bar", "at the data", *(f"x = {far:g}" for far in FAR)]
    section = Section([_figure(folder, unit), Table(head, rows), *provenance([unit])])
    base, extended = bars["BNN"], bars["BNN-RGPR"]
    inside = extended["inliers"] / base["inliers"] - 1
    outside = (extended["far"][0] / base["far"][0]) ** 0.5
    growth = extended["far"][1] / extended["far"][0]
    section.claims = [
        Claim(
            "at the data the error bars stay within 5 % of the base's",
            f"{inside:+.2%}",
            abs(inside) <= 0.05,
        ),
        Claim(
            "far away they are at least twice the base's",
            f"{outside:.2f} times at x = {FAR[0]:g}",
            outside >= 2,
        ),
        Claim(
            "the variance grows cubically, the base's quadratically",
            f"ten times as far: {growth:.0f} times with the residual, "
            f"{base['far'][1] / base['far'][0]:.0f} times without",
            abs(growth / 1000 - 1) < 0.2 and abs(base["far"][1] / base["far"][0] / 100 - 1) < 0.2,
            "With the residual it is a cubic plus the base's quadratic, so a little below 1000.",
        ),
    ]
    return section


def _figure(folder: Path, unit: Unit) -> Figure:
    caption = (
        "Toy regression: means, and one standard deviation of the function as shades; above near "
        "the data, below from far away."
    )
    arrays = unit.arrays
    with drawing(
        folder,
        "toy-regression",
        caption,
        nrows=2,
        ncols=3,
        figsize=(7.2, 3.6),
        sharex="row",
        sharey="row",
    ) as (_, axes, block):
        for row, (zoom, width) in enumerate(WIDTHS.items()):
            grid = arrays[f"grid, {zoom}"][:, 0]
            for panel, name in zip(axes[row], NAMES, strict=True):
                mean = arrays[f"{name}, mean, {zoom}"][:, 0]
                panel.plot(grid, mean, color=COLORS[0])
                if f"{name}, std, {zoom}" in arrays:
                    std = arrays[f"{name}, std, {zoom}"][:, 0]
                    panel.fill_between(
                        grid, mean - std, mean + std, color=COLORS[0], alpha=0.2, lw=0
                    )
                panel.scatter(arrays["x"], arrays["y"], s=4, color="black", lw=0, zorder=3)
                panel.set(xlim=(-width, width), xticks=[-width, 0, width])
                if row == 0:
                    panel.set_title(name)
            axes[row, 0].set_ylabel(f"{zoom}: $f(x)$")
    return block


register(
    Experiment(
        name=NAME,
        title="Toy regression",
        paper="fig:toy_reg",
        place=50,
        run=run,
        render=render,
    )
)
