"""The whole story in a minute: two small networks, with and without the residual.

Digits (8 x 8 images, ten classes) show confidence against distance, two moons show it as a map. A
third of the data that were held out from training calibrates; the rest is what the table is about.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits, make_moons
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from ._atomic import replacing
from ._progress import bar
from .audit import audit
from .audit.findings import made_outliers
from .metrics import accuracy, auroc, confidence, ece, nll
from .model import RGPR
from .posteriors import choose_prior_precision, fit_laplace

__all__ = ["Task", "confidence_map", "digits", "moons", "plane", "run", "show_map", "train", "wrap"]

ALPHAS = (1.0, 10.0, 100.0, 1e4, 1e6)
_REPORTED = "last-layer Laplace + RGPR"


@dataclass(frozen=True)
class Task:
    """Inputs and labels.

    Attributes:
        name: What the data are called.
        classes: How many classes there are.
        train: What networks are trained on.
        test: What they are tested on.
    """

    name: str
    classes: int
    train: TensorDataset
    test: tuple[Tensor, Tensor]

    def split(self) -> tuple[Task, DataLoader[Any]]:
        """The task without a third of its test data, and a loader of that third to calibrate."""
        x, y = self.test
        third = len(x) // 3
        held_out = DataLoader(TensorDataset(x[:third], y[:third]), batch_size=256)
        return replace(self, test=(x[third:], y[third:])), held_out


def run(out: Path, *, seed: int = 0, quick: bool = False) -> dict[str, Any]:
    """Train, wrap, print and draw; returns what ``results.json`` holds.

    Args:
        out: Folder for the files; made if missing.
        seed: Seed of the data, the networks and their training.
        quick: A tenth of the training and coarse maps.
    """
    started = time.perf_counter()
    _pyplot()  # before the work, where it is not installed
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    pictures: dict[Path, str] = {}
    for whole in (digits(seed), moons(seed)):
        torch.manual_seed(seed)
        task, validation = whole.split()
        network = train(task, epochs=10 if quick else 100)
        models = wrap(network, task, validation)
        results[task.name] = evaluate(models, task)
        print_table(task, results[task.name])
        if task.name == "digits":
            path = draw_far_away(models, task, out / "confidence-far-away.png")
            pictures[path] = "how sure each model is of digits as they are scaled up"
            found = audit(
                models[_REPORTED],
                task.test,
                title="Digits",
                command="rgpr demo",
                image=(8, 8),
                progress=False,
            )
            path = found.save(out / "report.html")
            pictures[path] = f"an audit of '{_REPORTED}' on digits, to open in a browser"
        else:
            resolution = 40 if quick else 200
            path = draw_moons(models, task, out / "moons.png", resolution)
            pictures[path] = "how sure each model is over the plane, near two moons and far away"
    report = out / "results.json"
    with replacing(report) as temporary:
        temporary.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nDone in {time.perf_counter() - started:.0f} s. Look at:")
    pictures[report] = "the numbers of both tables, for programs"
    for path, shows in pictures.items():
        print(f"  {path.resolve()}\n      {shows}")
    return results


def digits(seed: int) -> Task:
    images, labels = load_digits(return_X_y=True)
    return _split("digits", 10, images / 16, labels, seed)


def moons(seed: int) -> Task:
    points, labels = make_moons(1000, noise=0.1, random_state=seed)
    return _split("two moons", 2, points, labels, seed)


def _split(
    name: str, classes: int, inputs: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], seed: int
) -> Task:
    order = np.random.default_rng(seed).permutation(len(inputs))
    x = torch.tensor(inputs[order], dtype=torch.float32)
    y = torch.tensor(labels[order], dtype=torch.long)
    cut = int(0.7 * len(x))
    return Task(name, classes, TensorDataset(x[:cut], y[:cut]), (x[cut:], y[cut:]))


def train(task: Task, epochs: int) -> nn.Module:
    """A ReLU network with two hidden layers, by Adam with weight decay."""
    inputs = task.train.tensors[0].shape[1]
    network = nn.Sequential(
        nn.Linear(inputs, 100),
        nn.ReLU(),
        nn.Linear(100, 100),
        nn.ReLU(),
        nn.Linear(100, task.classes),
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3, weight_decay=5e-4)
    loader = DataLoader(task.train, batch_size=64, shuffle=True)
    for _ in bar(range(epochs), f"training on {task.name}", True):
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(network(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return network.eval()


def wrap(
    network: nn.Module, task: Task, validation: DataLoader[Any] | None = None
) -> dict[str, RGPR]:
    """The network as it is and with last-layer Laplace, each without and with the residual.

    Args:
        network: A trained one.
        task: What it was trained on.
        validation: Held-out data, which choose Laplace's prior precision and calibrate the default
            residual. Without them the prior precision is that of the marginal likelihood, and the
            residual is the paper's.
    """
    loader = DataLoader(task.train, batch_size=256)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # laplace-torch's advice about its own defaults
        la = fit_laplace(network, loader, subset="last_layer")
        if validation is None:
            la.optimize_prior_precision(pred_type="glm", method="marglik")
        base = la if validation is None else choose_prior_precision(la, validation, progress=False)
    models: dict[str, RGPR] = {}
    for name, posterior in (("MAP", network), ("last-layer Laplace", base)):
        extended = RGPR(posterior, residual="paper" if validation is None else "onset").fit(loader)
        if validation is not None:
            extended.calibrate(validation)
        plain = RGPR(posterior, layers="input").fit(loader)
        plain.sigma2 = 0.0
        models |= {name: plain, f"{name} + RGPR": extended}
    return models


@torch.no_grad()
def evaluate(models: Mapping[str, RGPR], task: Task) -> dict[str, Any]:
    """Accuracy, calibration, confidence as inputs are scaled away, and how outliers are found.

    Outliers are found by the score where there is a residual, else by the confidence.
    """
    x, y = task.test
    outliers = {kind: z for kind, (_, z) in made_outliers(x).items()}
    rows = {}
    for name, model in models.items():
        probabilities = model(x)

        def inlier(z: Tensor, model: RGPR = model) -> Tensor:
            found = -model.score(z) if bool(model.sigma2.any()) else confidence(model(z))
            return found.double()

        rows[name] = {
            "accuracy": accuracy(probabilities, y),
            "nll": nll(probabilities, y),
            "ece": ece(probabilities, y),
            "confidence": {f"{a:g}": confidence(model(a * x)).mean().item() for a in ALPHAS},
            "auroc": {kind: auroc(inlier(x), inlier(z)) for kind, z in outliers.items()},
        }
    return {"classes": task.classes, "uniform": 1 / task.classes, "models": rows}


def print_table(task: Task, result: Mapping[str, Any]) -> None:
    print(f"\n{task.name}: {task.classes} classes, so 1/C = {result['uniform']:.3f}")
    print(f"{'':26}{'':26}mean confidence at alpha * x, alpha ={'':8}AUROC of the score*, against")
    print(
        f"{'':26}{'accuracy':>9}{'NLL':>8}{'ECE':>7}  "
        + "".join(f"{alpha:>8g}" for alpha in ALPHAS)
        + f"{'shuffled':>13}{'uniform':>9}"
    )
    for name, row in result["models"].items():
        far = "".join(f"{value:>8.3f}" for value in row["confidence"].values())
        found = f"{row['auroc']['shuffled']:>13.1%}{row['auroc']['uniform']:>9.1%}"
        print(f"{name:26}{row['accuracy']:>9.1%}{row['nll']:>8.3f}{row['ece']:>7.1%}  {far}{found}")
    print("* of the confidence in rows without RGPR, which have no score")
    for kind, (words, _) in made_outliers(task.test[0]).items():
        print(f"  {kind}: {words}")


@torch.no_grad()
def draw_far_away(models: Mapping[str, RGPR], task: Task, path: Path) -> Path:
    """Confidence against alpha: means, and one standard deviation as a band."""
    x = task.test[0]
    alphas = np.geomspace(1, 1e7, 71)
    figure, axes = _pyplot().subplots(figsize=(6.4, 3.6), layout="constrained")
    for index, (name, model) in enumerate(models.items()):
        values = torch.stack([confidence(model(float(a) * x)) for a in alphas])
        mean, std = values.mean(1).numpy(), values.std(1).numpy()
        color = f"C{index // 2}"
        style = "-" if index % 2 else "--"
        axes.plot(alphas, mean, style, color=color, label=name)
        axes.fill_between(
            alphas, mean - std, np.minimum(mean + std, 1), color=color, alpha=0.12, lw=0
        )
    axes.axhline(1 / task.classes, color="0.3", lw=1, ls=":", label="1/C")
    axes.set(
        xscale="log",
        ylim=(0, 1.03),
        xlabel=r"$\alpha$: test inputs scaled away from the data",
        ylabel="confidence",
        title=f"Far from the data ({task.name}): mean and one standard deviation",
    )
    axes.legend(loc="center right", fontsize=8, frameon=False)
    return save_figure(figure, path)


@torch.no_grad()
def draw_moons(models: Mapping[str, RGPR], task: Task, path: Path, resolution: int) -> Path:
    """Confidence over the plane, near the data and from far away."""
    figure, axes = _pyplot().subplots(
        2, len(models), figsize=(10, 4.6), layout="constrained", sharex="row", sharey="row"
    )
    for row, (width, label) in enumerate(((3.0, "zoomed in"), (1000.0, "zoomed out"))):
        for column, (name, model) in enumerate(models.items()):
            panel = axes[row, column]
            shown = draw_map(panel, model, task, width, resolution)
            if row == 0:
                panel.set_title(name, fontsize=10)
            if column == 0:
                panel.set_ylabel(label)
    figure.colorbar(shown, ax=axes, label="confidence", shrink=0.8)
    return save_figure(figure, path)


def draw_map(panel: Any, model: RGPR, task: Task, width: float, resolution: int) -> Any:
    """Confidence over the plane as shades, with the training data on top."""
    image = confidence_map(model, width, resolution)
    return show_map(panel, image, width, *task.train.tensors)


@torch.no_grad()
def confidence_map(model: RGPR, width: float, resolution: int) -> Tensor:
    """Confidence on a square grid around the origin, rows from the bottom."""
    return confidence(model(plane(width, resolution))).reshape(resolution, resolution).T


def plane(width: float, resolution: int) -> Tensor:
    """Points of a square grid around the origin, ``(resolution^2, 2)``, column after column."""
    ticks = torch.linspace(-width, width, resolution)
    return torch.cartesian_prod(ticks, ticks)


def show_map(panel: Any, image: Tensor, width: float, x: Tensor, y: Tensor, **options: Any) -> Any:
    """An image over the plane as shades, confidence unless told otherwise, and points on top."""
    options = {"vmin": 0.5, "vmax": 1, "cmap": "Blues", **options}
    extent = (-width, width, -width, width)
    shown = panel.imshow(image, origin="lower", extent=extent, aspect="auto", **options)
    for label, color in enumerate(("C1", "C3")):
        chosen = x[y == label]
        panel.scatter(chosen[:, 0], chosen[:, 1], s=2, color=color, lw=0, rasterized=True)
    panel.set_xticks([-width, 0, width])
    panel.set_yticks([-width, 0, width])
    return shown


def save_figure(figure: Any, path: Path) -> Path:
    """Write a picture, all of it or nothing."""
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120)
    _pyplot().close(figure)
    return path


def _pyplot() -> Any:
    """matplotlib's interface; imported here, as experiments train by this file without drawing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
