"""Table "ood_reg_faraway": error bars on UCI regression sets, at the data and far away from it.

As in the paper: standardised data, a ReLU network with 50 hidden units, LLL, KFL, SWAG and SVGP
with 50 inducing points, each without and with the residual, whose scales are all 0.001; outliers
are 1000 points of a standard Gaussian times 2000; the number is the mean predictive standard
deviation of the function. The residual reads input and hidden layer, for the SVGP the input.

Unlike the paper, whose ten trials are predictions of one network, each of our ten trials has its
own split (a tenth for testing), network and posterior; numbers are medians over the trials, as
single ones are off by orders of magnitude where a hidden unit that was all but dead at the data
fires far away. Moments of KFL and SWAG are those of 100 samples of weights. SWAG goes on by SGD
with rate 0.1 for 40 epochs.

The paper does not say what noise its Laplace approximations assume. Error bars scale with it, and
with the usual unit noise they come out at the size of the paper's, so that is what ``LLL`` and
``KFL`` are here, with the prior precision by the marginal likelihood. ``LLL, fitted noise`` and
``KFL, fitted noise`` are not in the paper: both by the marginal likelihood.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from rgpr.model import RGPR
from rgpr.posteriors import KFL, SVGP

from ..context import Context
from ..data import REGRESSION_SETS, read_regression
from ..experiment import Experiment, register
from ..regression import SAMPLES, SIGMA2, fitted_laplace, swag, trained_regressor
from ..section import Claim, Section, Table, Text, beside, printed, provenance, spread
from ..units import Result, read_units, run_units

__all__ = ["render", "run"]

NAME = "uci"
BASES = ("LLL", "KFL", "SWAG", "SVGP")
BEYOND = ("LLL, fitted noise", "KFL, fitted noise")
TRIALS = 10
OUTLIERS = 1000
ALPHA = 2000.0


def run(context: Context) -> None:
    """A unit for each set and trial; ten trials whatever the seeds are, two if small."""
    sets = ("made",) if context.small else tuple(REGRESSION_SETS)
    units: dict[str, Callable[[], Result]] = {
        f"{name}-trial{trial}": partial(_trial, context, name, trial)
        for name in sets
        for trial in range(2 if context.small else TRIALS)
    }
    run_units(context, NAME, units, sigma2=SIGMA2)


def _trial(context: Context, name: str, trial: int) -> Result:
    x, y = _made() if name == "made" else read_regression(context.data, name)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(trial))
    test, training = order[: len(x) // 10], order[len(x) // 10 :]
    x, y = _standardised(x, training), _standardised(y, training)
    generator = torch.Generator().manual_seed(trial)
    outliers = ALPHA * torch.randn(OUTLIERS, x.shape[1], generator=generator)
    found: dict[str, Any] = {}
    for base, posterior in _bases(x[training], y[training], trial, context.small):
        for method, sigma2 in ((base, 0.0), (_extended(base), SIGMA2)):
            model = RGPR(posterior, likelihood="regression", residual="paper")
            model.fit([x[training]], progress=False).sigma2 = sigma2
            found[method] = _measure(model, x[test], y[test], outliers)
    return {"set": name, "trial": trial, "rows": len(x), "methods": found}


def _extended(base: str) -> str:
    """The base's name with that of the residual in it: ``LLL-RGPR, fitted noise``."""
    return base.replace(base[:3] + ",", base[:3] + "-RGPR,") if "," in base else f"{base}-RGPR"


def _bases(x: Tensor, y: Tensor, seed: int, small: bool) -> Iterator[tuple[str, Any]]:
    """Each base, fitted to the training data; all but the SVGP on the same network."""
    epochs, svgp_epochs = (40, 10) if small else (400, None)
    network = trained_regressor(x, y, seed=seed, epochs=epochs)
    for suffix, noise in (("", 1.0), (", fitted noise", None)):
        yield f"LLL{suffix}", fitted_laplace(network, x, y, "last_layer", noise=noise)
        la = fitted_laplace(network, x, y, "all", noise=noise)
        yield f"KFL{suffix}", KFL.from_laplace(la, n_samples=SAMPLES, seed=seed)
    yield "SWAG", swag(network, x, y, seed=seed, epochs=epochs // 10)
    yield "SVGP", SVGP.fit(x, y, inducing=50, epochs=svgp_epochs, seed=seed, progress=False)


@torch.no_grad()
def _measure(model: RGPR, x: Tensor, y: Tensor, outliers: Tensor) -> dict[str, float]:
    prediction, variance = model(x, diagonal_output=True)
    return {
        "inliers": float(variance.sqrt().mean()),
        "outliers": float(model(outliers, diagonal_output=True)[1].sqrt().mean()),
        "rmse": float((prediction - y).square().mean().sqrt()),
    }


def _standardised(values: Tensor, training: Tensor) -> Tensor:
    shift, scale = values[training].mean(0), values[training].std(0)
    return (values - shift) / torch.where(scale > 0, scale, 1.0)


def _made() -> tuple[Tensor, Tensor]:
    """200 rows of four inputs and a smooth target with noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 4, generator=generator)
    noise = 0.1 * torch.randn(200, 1, generator=generator)
    return x, x[:, :1].sin() + x[:, 1:2] * x[:, 2:3] / 4 + noise


# -- what it shows -------------------------------------------------------------------------------


def render(folder: Path) -> Section:
    """The paper's table, ours beside it, and the error of the means."""
    units = read_units(folder)
    found = {unit.result["set"] for unit in units}
    trials: dict[str, list[Any]] = {
        name: [unit.result["methods"] for unit in units if unit.result["set"] == name]
        for name in (*REGRESSION_SETS, "made")
        if name in found
    }
    count = ", ".join(f"{name}: {len(found)}" for name, found in trials.items())
    section = Section(
        [
            Text(
                "Error bars of the function, means over 1000 outliers or the test data, in units "
                f"of the standardised targets; medians over trials ({count}), and in brackets the "
                "smallest and the largest."
            )
        ]
    )
    titles = {"inliers": "Inliers (less is better)", "outliers": "Outliers (more is better)"}
    for part, title in titles.items():
        rows = [
            [method, *(_cell(name, method, part, found) for name, found in trials.items())]
            for base in (*BASES, *BEYOND)
            for method in (base, _extended(base))
        ]
        section.add(Table(["method", *trials], rows, title))
    rows = [
        [base, *(spread([trial[base]["rmse"] for trial in found], 3) for found in trials.values())]
        for base in (*BASES, *BEYOND)
    ]
    section.add(
        Text(
            "Far away the SVGP with the residual, which reads the input alone, is where the paper "
            "has it. The others are wider than the paper's: the difference is the hidden layer, "
            "where a unit that hardly varied at the data is divided by its small standard "
            "deviation. Of the bases alone, which depend on noise, prior and training, only the "
            "size can be compared."
        )
    )
    caption = "Root mean squared error on test data, the same with the residual; not in the paper"
    section.add(Table(["method", *trials], rows, caption), *provenance(units))
    section.claims = [claim for base in (*BASES, *BEYOND) for claim in _claims(base, trials)]
    return section


def _cell(name: str, method: str, part: str, trials: list[Any]) -> str:
    values = [trial[method][part] for trial in trials]
    digits = 3 if part == "inliers" else 0
    place = {"in": name.removesuffix("-red"), "method": method, "metric": part}
    paper = printed("ood_reg_faraway", **place)
    ours = f"{median(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"
    return beside(ours, None if paper is None else f"{paper:.{digits}f}")


def _claims(base: str, trials: dict[str, list[Any]]) -> list[Claim]:
    def ratios(part: str) -> dict[str, float]:
        extended = _extended(base)
        return {
            name: median(trial[extended][part] / trial[base][part] for trial in found)
            for name, found in trials.items()
        }

    inside, outside = ratios("inliers"), ratios("outliers")
    kept = all(abs(ratio - 1) <= 0.05 for ratio in inside.values())
    wider = all(ratio >= 2 for ratio in outside.values())
    ours = base in BEYOND
    return [
        Claim(
            f"{base}: the residual leaves the error bars of inliers within 5 %",
            ", ".join(f"{name} {ratio - 1:+.1%}" for name, ratio in inside.items()),
            kept,
            "" if kept else _TIGHT,
            ours,
        ),
        Claim(
            f"{base}: the residual makes those of outliers at least twice as long",
            ", ".join(f"{name} {ratio:.1f} times" for name, ratio in outside.items()),
            wider,
            "" if wider else _WIDE,
            ours,
        ),
    ]


_TIGHT = (
    "The residual adds about 0.001 times a number near one to the variance of an inlier, whatever "
    "the base says. Where the base's own error bars are below a tenth that is more than 5 %: the "
    "scale of 0.001 is small for the paper's wide posteriors and not for tight ones."
)
_WIDE = (
    "The base's own error bars are already wide at 2000 standard deviations; cubic growth "
    "overtakes them further out. The paper's table has the same for KFL on three sets and SWAG on "
    "one."
)


register(
    Experiment(
        name=NAME,
        title="Error bars of regression, near and far",
        paper="tab:ood_reg_faraway",
        place=60,
        run=run,
        render=render,
    )
)
