"""How well outliers are found, and what that costs at the data: ten methods on the same networks.

Beyond the paper's tables: this library's adaptive residual and four detectors beside the paper's
methods. For each seed a network is trained, 2000 images are split off the test set for
validation, and the metrics are those of the rest. Outliers for tuning are smoothed noise made of
training images and never one of the test sets. A set of outliers that is missing is left out, and
named.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..metrics import accuracy, auroc, confidence, ece, fpr95, nll
from ..tuning import TuningResult
from .data import ImageSet, Loader, read_outliers
from .experiment import Context, Result, Unit, read_units, run_units
from .methods import contestants
from .section import Check, Section, Table, Text, provenance, spread

__all__ = ["METHODS", "measure", "render", "run"]

NAME = "detection"
FAR = 2000
ALPHAS = (1.0, 10.0, 100.0, 1e4)
METHODS = (
    "MAP",
    "TS",
    "Energy",
    "KNN",
    "Mahalanobis",
    "ViM",
    "LLL",
    "LLL-RGPR-LL",
    "LLL-RGPR-OOD",
    "LLL-RGPR-adaptive",
)


def run(context: Context) -> None:
    """A unit for each set and seed."""
    for name in context.image_sets("mnist", "cifar10"):
        units = {
            f"{name}-seed{seed}": partial(_unit, context, name, seed) for seed in context.seeds
        }
        run_units(context, NAME, units, recipe=context.recipe)


def _unit(context: Context, name: str, seed: int) -> Result:
    outliers, missing = read_outliers(context.data, name, context.device, context.download)
    competing = contestants(context, name, seed)
    measured: dict[str, Any] = {}
    tuning: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    for method in tqdm(
        competing.methods(METHODS), total=len(METHODS), desc="methods", leave=False, disable=None
    ):
        measured[method.name] = measure(method.predict, competing.test, outliers)
        seconds |= {f"{method.name}, {part}": value for part, value in method.seconds.items()}
        if method.tuning is not None:
            tuning[method.name] = _shortened(method.tuning)
    adaptive = competing.method("LLL-RGPR-adaptive")
    notes = {kind: images.note for kind, images in outliers.items() if images.note}
    return {
        "set": name,
        "seed": seed,
        "notes": competing.notes | notes,
        "missing": missing,
        "sizes": {
            "train": len(competing.train.x),
            "validation": len(competing.validation.x),
            "test": len(competing.test.x),
            "outliers": {kind: len(images.x) for kind, images in outliers.items()},
        },
        "methods": measured,
        "confidence far away": _far_away(adaptive.predict, competing.test.x[:FAR]),
        "tuning": tuning,
        "seconds": competing.seconds | seconds,
    }


@torch.no_grad()
def measure(
    predict: Callable[[Tensor], Tensor], test: Loader, outliers: dict[str, ImageSet]
) -> dict[str, Any]:
    """All metrics of one method; those of probabilities only where it has some."""

    def scores(loader: Loader) -> Tensor:
        output = torch.cat([predict(x) for x in loader])
        return output if output.dim() == 1 else confidence(output)

    p = torch.cat([predict(x) for x, _ in test])
    inside = p if p.dim() == 1 else confidence(p)
    outside = {kind: scores(Loader(images.x)) for kind, images in outliers.items()}
    result: dict[str, Any] = {}
    for metric, value in (("fpr95", fpr95), ("auroc", auroc)):
        values = {kind: value(inside, scores) for kind, scores in outside.items()}
        result[metric] = {**values, "mean": mean(values.values())}
    if p.dim() == 2:
        assert test.y is not None
        result |= {"ece": ece(p, test.y), "nll": nll(p, test.y), "accuracy": accuracy(p, test.y)}
    return result


@torch.no_grad()
def _far_away(predict: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, float]:
    """Mean confidence at ``alpha * x``."""
    return {
        f"{alpha:g}": confidence(torch.cat([predict(alpha * b) for b in Loader(x)])).mean().item()
        for alpha in ALPHAS
    }


def _shortened(result: TuningResult) -> dict[str, Any]:
    names = ("objective", "sigma2", "ood_weight", "calibration", "metrics", "converged", "warnings")
    return {name: getattr(result, name) for name in names}


# -- what it shows -------------------------------------------------------------------------------

_NOTES = (
    "FPR95 (less is better) and AUROC (more is better) are means over the sets of outliers; the "
    "score is the largest probability, or the detector's own. ECE has 15 bins. Detectors have no "
    "probabilities of their own. Training on a GPU does not repeat itself bit by bit, so another "
    "run gives other networks. All in % but the NLL."
)


def render(folder: Path) -> Section:
    """Tables for each set."""
    section = Section([Text(_NOTES)])
    by_set: dict[str, list[Unit]] = {}
    for unit in read_units(folder):
        by_set.setdefault(unit.result["set"], []).append(unit)
    for name, units in by_set.items():
        _render_set(section, name, units)
    return section


def _render_set(section: Section, name: str, units: list[Unit]) -> None:
    results = [unit.result for unit in units]
    first = results[0]
    sizes = first["sizes"]
    numbers = f"{sizes['train']} training, {sizes['validation']} validation, {sizes['test']} test"
    seeds = ", ".join(str(result["seed"]) for result in results)
    section.add(Text(f"In-distribution: {name}, seeds {seeds}; {numbers} images."))
    for kind, note in first["notes"].items():
        section.add(Text(f"{kind} is a stand-in: {note}."))
    for kind, remedy in first["missing"].items():
        section.add(Text(f"Outliers {kind} are left out: {remedy}"))

    def over_seeds(method: str, *keys: str) -> list[Any]:
        values = [result["methods"][method] for result in results]
        for key in keys:
            values = [value[key] for value in values]
        return values

    rows = []
    for method, found in first["methods"].items():
        cells = [
            spread(over_seeds(method, metric, "mean"), 1, 100) for metric in ("fpr95", "auroc")
        ]
        if "ece" in found:
            cells += [spread(over_seeds(method, "ece"), 2, 100)]
            cells += [spread(over_seeds(method, "nll"), 4)]
            cells += [spread(over_seeds(method, "accuracy"), 2, 100)]
        else:
            cells += ["-"] * 3
        rows.append([method, *cells])
    section.add(Table(["method", "FPR95", "AUROC", "ECE", "NLL", "accuracy"], rows, name))
    kinds = list(sizes["outliers"])
    rows = [
        [method, *(spread(over_seeds(method, "fpr95", kind), 1, 100) for kind in kinds)]
        for method in first["methods"]
    ]
    section.add(Table(["FPR95 against", *kinds], rows))
    far = {
        a: [result["confidence far away"][a] for result in results]
        for a in first["confidence far away"]
    }
    head = ["LLL-RGPR-adaptive, mean confidence at", *(f"{alpha} x" for alpha in far)]
    section.add(Table(head, [["test images", *(spread(values, 4) for values in far.values())]]))
    parts = [part for part in first["seconds"] if all(part in r["seconds"] for r in results)]
    rows = [[part, spread([r["seconds"][part] for r in results], 1)] for part in parts]
    section.add(Table(["what takes time", "seconds"], rows))
    section.add(*provenance(units))
    section.checks += _claims(name, results)


def _claims(name: str, results: list[Result]) -> list[Check]:
    def averaged(method: str, *keys: str) -> float:
        values = [result["methods"][method] for result in results]
        for key in keys:
            values = [value[key] for value in values]
        return 100 * float(mean(values))

    base, tuned = averaged("LLL", "fpr95", "mean"), averaged("LLL-RGPR-OOD", "fpr95", "mean")
    changes = {
        method: averaged(method, "accuracy") - averaged("LLL", "accuracy")
        for method in ("LLL-RGPR-LL", "LLL-RGPR-OOD", "LLL-RGPR-adaptive")
    }
    worst = max(changes, key=lambda method: abs(changes[method]))
    return [
        Check(
            f"{name}: FPR95 of LLL-RGPR-OOD is below that of LLL",
            f"{tuned:.1f} % against {base:.1f} %",
            tuned < base,
        ),
        Check(
            f"{name}: the residual changes the accuracy by at most 0.3 points",
            f"at most {abs(changes[worst]):.2f} points ({worst})",
            abs(changes[worst]) <= 0.3,
        ),
    ]
