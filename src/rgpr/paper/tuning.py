"""Objectives for sigma2: the paper's figure on two moons, and what each does to digits.

The base is last-layer Laplace for the moons, with uniform noise around them as outliers, and the
network itself for digits, with the default outliers, :func:`rgpr.noise.like_data`. Validation data
are held out of the test set.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot as plt
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from .. import noise
from ..demo import Task, digits, draw_map, moons, save_figure, train, wrap
from ..metrics import accuracy, confidence, ece, nll
from ..model import RGPR
from ..storage import replacing
from ..tuning import TuningResult

__all__ = ["run"]

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


def run(out: Path, *, seed: int = 0, small: bool = False) -> None:
    """Draw ``tuning.png``, write ``tuning.md``, print both paths."""
    epochs = 10 if small else 100
    picture = figure(out / "tuning.png", seed, epochs, resolution=40 if small else 200)
    text = table(seed, epochs)
    path = out / "tuning.md"
    with replacing(path) as temporary:
        temporary.write_text(text + "\n")
    print(f"{text}\n\nwritten to {picture.resolve()} and {path.resolve()}")


def figure(path: Path, seed: int, epochs: int, resolution: int) -> Path:
    """The paper's figure "tuning": untuned, and after each objective, side by side."""
    task, _, extended, validation, _ = _prepare(moons(seed), "last-layer Laplace", seed, epochs)
    around = _uniform_around(task.train.tensors[0], seed)
    figure, axes = plt.subplots(
        2, 1 + len(OBJECTIVES), figsize=(10, 4.6), layout="constrained", sharex="row", sharey="row"
    )
    extended.sigma2 = 1.0
    shown: Any = None

    def column(number: int, title: str) -> None:
        nonlocal shown
        axes[0, number].set_title(title, fontsize=10)
        for row, width in enumerate((3.0, 30.0)):
            shown = draw_map(axes[row, number], extended, task, width, resolution)

    column(0, "untuned")
    titles = {"L_LL": r"$L_\mathrm{LL}$", "L_OOD": r"$L_\mathrm{OOD}$"}
    for number, (name, _) in enumerate(_tuned(extended, validation, OBJECTIVES, around), start=1):
        column(number, titles.get(name, name))
    axes[0, 0].set_ylabel("zoomed in")
    axes[1, 0].set_ylabel("zoomed out")
    figure.colorbar(shown, ax=axes, label="confidence", shrink=0.8)
    return save_figure(figure, path)


def table(seed: int, epochs: int) -> str:
    """Test metrics of digits after each objective, as Markdown."""
    task, base, extended, validation, (x, y) = _prepare(digits(seed), "MAP", seed, epochs)
    noisy = noise.uniform(x, generator=torch.Generator().manual_seed(seed))
    lines = [
        "| digits | accuracy | NLL | ECE | confidence: test | uniform noise "
        "| 10 x | 1000 x | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]

    def row(name: str, model: RGPR, seconds: float | None) -> None:
        with torch.no_grad():
            p = model(x)
            far = [confidence(model(z)).mean().item() for z in (x, noisy, 10 * x, 1000 * x)]
        numbers = [f"{accuracy(p, y):.1%}", f"{nll(p, y):.3f}", f"{ece(p, y):.1%}"]
        numbers += [f"{value:.2f}" for value in far]
        lines.append(f"| {name} | {' | '.join(numbers)} | {f'{seconds:.2f}' if seconds else '-'} |")

    row("base alone", base, None)
    row("untuned", extended, None)
    for name, result in _tuned(extended, validation, OBJECTIVES | BEYOND, None):
        row(name, extended, result.seconds)
    adaptive = RGPR(base.posterior.network).fit(DataLoader(task.train, batch_size=256))
    row("adaptive residual, L_OOD", adaptive, adaptive.tune(validation).seconds)
    return "\n".join(lines)


def _prepare(
    task: Task, base: str, seed: int, epochs: int
) -> tuple[Task, RGPR, RGPR, DataLoader[Any], tuple[Tensor, Tensor]]:
    """A trained network without and with residual, validation data, and the rest of the test."""
    torch.manual_seed(seed)
    models = wrap(train(task, epochs), task, residual="paper")
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


def _uniform_around(x: Tensor, seed: int) -> list[Tensor]:
    """Uniform noise in a box three times as wide as the data."""
    low, high = x.amin(0), x.amax(0)
    margin = high - low
    generator = torch.Generator().manual_seed(seed)
    return [noise.uniform(x, low=low - margin, high=high + margin, generator=generator)]
