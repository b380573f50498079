r"""Figure "double_cubicspline_gps": the kernel as the limit of more and more ReLU features.

A Bayesian linear model with ``K`` ReLU features that point away from the origin, half on each side,
for ``K`` = 6, 20, 60, and the Gaussian process for infinitely many. The paper does not give its
scales: here the features start within :math:`c_\max = 2` of the origin, and a second picture, not
in the paper, shows how fast the variances grow.
"""

from __future__ import annotations

from functools import partial
from math import log10
from pathlib import Path

import torch
from torch import Tensor

from rgpr.kernels import dscs_diag, dscs_gram, relu_features

from ..context import Context
from ..experiment import Experiment, register
from ..figures import COLORS, drawing
from ..section import Claim, Figure, Section, Table, provenance
from ..units import Result, Unit, read_units, run_units

__all__ = ["render", "run"]

NAME = "construction"
FEATURES = (6, 20, 60)
C_MAX = 2.0
WIDTH = 8.0
FAR = (1e3, 1e4)


def run(context: Context) -> None:
    """One unit, of the first seed; it takes no time, so the small version is coarse alone."""
    seed = context.seeds[0]
    points = 61 if context.small else 241
    run_units(context, NAME, {"functions": partial(_functions, seed, points)}, seed=seed)


def _functions(seed: int, points: int) -> Result:
    """Standard deviations and samples over a line, and variances far away."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.linspace(-WIDTH, WIDTH, points, dtype=torch.float64)
    inside = x[x.abs() <= C_MAX]
    exact = dscs_diag(inside[:, None])
    arrays: dict[str, Tensor] = {"x": x}
    errors, slopes = {}, {}
    for k in FEATURES:
        features = relu_features(x, k, c_max=C_MAX)
        arrays[f"std, {k}"] = features.norm(dim=1)
        weights = torch.randn(k, 5, generator=generator, dtype=torch.float64)
        arrays[f"samples, {k}"] = (features @ weights).T
        gap = relu_features(inside, k, c_max=C_MAX).square().sum(1) - exact
        errors[str(k)] = float(gap.abs().max() / exact.max())
        slopes[str(k)] = _slope(*(_finite_variance(far, k) for far in FAR))
    gram = dscs_gram(x[:, None])
    # The matrix has rank below its size: zero at the origin, two independent halves.
    values, vectors = torch.linalg.eigh(gram)
    root = vectors * values.clamp_min(0).sqrt()
    noise = torch.randn(len(x), 5, generator=generator, dtype=torch.float64)
    arrays["std, inf"] = dscs_diag(x[:, None]).sqrt()
    arrays["samples, inf"] = (root @ noise).T
    slopes["inf"] = _slope(*(float(dscs_diag(torch.tensor([far]).double())) for far in FAR))
    return {"c_max": C_MAX, "errors": errors, "slopes": slopes, "far": FAR, "arrays": arrays}


def _finite_variance(x: float, k: int) -> float:
    return float(relu_features(torch.tensor(x).double(), k, c_max=C_MAX).square().sum())


def _slope(near: float, far: float) -> float:
    """The exponent with which a variance grows between the two distances."""
    return (log10(far) - log10(near)) / (log10(FAR[1]) - log10(FAR[0]))


# -- what it shows -------------------------------------------------------------------------------


def render(folder: Path) -> Section:
    """The figure, the growth of the variances, and the exponents."""
    (unit,) = read_units(folder)
    slopes, errors = unit.result["slopes"], unit.result["errors"]
    rows = [
        ["K", *slopes],
        ["exponent of the growth far away", *(f"{slope:.4f}" for slope in slopes.values())],
        [
            "largest error within c_max, of the largest variance there",
            *(f"{error:.2%}" for error in errors.values()),
            "-",
        ],
    ]
    section = Section([_figure(folder, unit), _growth(folder, unit)])
    section.add(Table(rows[0], rows[1:]), *provenance([unit]))
    section.claims = [
        Claim(
            "with finitely many features the variance grows quadratically",
            ", ".join(f"K = {k}: exponent {slopes[str(k)]:.4f}" for k in FEATURES),
            all(abs(slopes[str(k)] - 2) < 0.01 for k in FEATURES),
        ),
        Claim(
            "with infinitely many the variance grows cubically",
            f"exponent {slopes['inf']:.4f} between {FAR[0]:g} and {FAR[1]:g}",
            abs(slopes["inf"] - 3) < 0.01,
        ),
        Claim(
            "the finite construction converges to the kernel",
            ", ".join(f"K = {k}: {errors[str(k)]:.1%}" for k in FEATURES),
            errors["6"] > errors["20"] > errors["60"],
            "The error falls like 1/K: it is that of a Riemann sum.",
        ),
    ]
    return section


def _figure(folder: Path, unit: Unit) -> Figure:
    caption = (
        "The construction of the kernel: ReLU features (grey), five functions drawn from the prior "
        "(thin), their mean (thick) and one standard deviation (shade). For finite K all features "
        "start within 2 of the origin."
    )
    x = unit.arrays["x"]
    labels = {"6": "$K = 6$", "20": "$K = 20$", "60": "$K = 60$", "inf": r"$K = \infty$"}
    with drawing(
        folder, "construction", caption, ncols=4, figsize=(7.2, 1.9), sharex=True, sharey=True
    ) as (_, axes, block):
        for panel, (k, label) in zip(axes, labels.items(), strict=True):
            if k != "inf":
                starts = torch.linspace(0, unit.result["c_max"], int(k) // 2)
                for start in [*starts, *(-starts)]:
                    side = -1 if start < 0 or torch.signbit(start) else 1
                    ramp = (side * x - start.abs()).clamp_min(0)
                    panel.plot(x, ramp, color="0.6", lw=0.3, zorder=1)
            std = unit.arrays[f"std, {k}"]
            panel.fill_between(x, -std, std, color=COLORS[1], alpha=0.18, lw=0, zorder=2)
            panel.plot(x, unit.arrays[f"samples, {k}"].T, color=COLORS[1], lw=0.7, zorder=3)
            panel.plot(x, 0 * x, color=COLORS[1], lw=2, zorder=4)
            panel.set(title=label, xlim=(-WIDTH, WIDTH), ylim=(-18, 18), xlabel="$x$")
            panel.set_xticks([-5, 0, 5])
        axes[0].set_ylabel(r"$\widehat{f}(x)$")
    return block


def _growth(folder: Path, unit: Unit) -> Figure:
    caption = (
        "Variance against distance: as long as there are features ahead it grows cubically, behind "
        "the last one (dotted line) quadratically."
    )
    x = torch.logspace(-1, 3, 200, dtype=torch.float64)
    with drawing(folder, "growth", caption, figsize=(3.6, 2.6)) as (_, axes, block):
        for number, k in enumerate(FEATURES):
            variance = relu_features(x, k, c_max=C_MAX).square().sum(1)
            axes.plot(x, variance, color=COLORS[number], label=f"$K = {k}$", lw=1)
        axes.plot(x, dscs_diag(x[:, None]), color=COLORS[6], label=r"$K = \infty$", lw=1.6)
        axes.axvline(unit.result["c_max"], color="0.6", ls=":", lw=1)
        axes.set(xscale="log", yscale="log", xlabel="$|x|$", ylabel="variance", ylim=(1e-4, 1e9))
        axes.legend()
    return block


register(
    Experiment(
        name=NAME,
        title="The kernel as the limit of ReLU features",
        paper="fig:double_cubicspline_gps",
        place=10,
        run=run,
        render=render,
    )
)
