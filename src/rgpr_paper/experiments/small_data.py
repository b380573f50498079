"""Small tables: what the default promises with 30 to 300 validation examples.

Not in the paper. Five sets of scikit-learn (wine, iris, breast cancer, digits, and four blobs),
five seeds, validation sets of 30, 50, 100 and 300 examples where the data allow it. A third of the
data is the test set, the validation examples come next, and the rest (at least 40) trains a ReLU
network with two hidden layers. The model is measured after `fit` alone and after `calibrate`. Where
the default's variance sets in and how steeply it grows was chosen on other splits of these sets
(seeds 10 to 14), by the NLL of test data and the confidence at 1000 x.

- Test NLL above that of the network alone, whose budget is 0.005.
- Mean confidence of test inputs scaled by 10 and by 1000.
- AUROC of the score, beside that of the network's confidence, against test inputs whose columns
  were shuffled, against Gaussian noise three times as wide as the data, and, with a network that
  never saw it, against the class that comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from rgpr import noise
from rgpr._demo import Task, train
from rgpr.metrics import auroc, confidence, nll
from rgpr.model import RGPR

from ..context import Context
from ..experiment import Experiment, register
from ..section import Claim, Section, Table, Text, provenance
from ..units import Result, Unit, read_units, run_units

__all__ = ["render", "run"]

NAME = "small-data"
SIZES = (30, 50, 100, 300)
SEEDS = 5
LEAST_TRAINING = 40
BUDGET = 0.005


def _sklearn(name: str) -> Callable[[int], tuple[Any, Any]]:
    def load(seed: int) -> tuple[Any, Any]:
        from sklearn import datasets

        x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        return x, y

    return load


def _blobs(seed: int) -> tuple[Any, Any]:
    from sklearn.datasets import make_blobs

    x, y = make_blobs(1000, centers=4, n_features=2, random_state=seed)
    return x, y


SETS: dict[str, Callable[[int], tuple[Any, Any]]] = {
    "wine": _sklearn("wine"),
    "iris": _sklearn("iris"),
    "breast cancer": _sklearn("breast_cancer"),
    "digits": _sklearn("digits"),
    "blobs": _blobs,
}


def run(context: Context) -> None:
    """A unit for each set and seed."""
    sets = {"iris": SETS["iris"]} if context.small else SETS
    seeds = range(2 if context.small else SEEDS)
    epochs = 20 if context.small else 100
    units = {
        f"{name}-seed{seed}": partial(_unit, load, seed, epochs)
        for name, load in sets.items()
        for seed in seeds
    }
    run_units(context, NAME, units, epochs=epochs)


def _unit(load: Callable[[int], tuple[Any, Any]], seed: int, epochs: int) -> Result:
    x, y = _shuffled(*load(seed), seed)
    cells = {
        str(size): _cell(x, y, size, seed, epochs)
        for size in SIZES
        if len(x) - len(x) // 3 - size >= LEAST_TRAINING
    }
    return {
        "classes": int(y.max()) + 1,
        "examples": len(x),
        "cells": cells,
        "held-out class": _held_out_class(x, y, seed, epochs),
    }


def _shuffled(x: Any, y: Any, seed: int) -> tuple[Tensor, Tensor]:
    order = np.random.default_rng(seed).permutation(len(x))
    return torch.tensor(x[order], dtype=torch.float32), torch.tensor(y[order], dtype=torch.long)


def _prepared(x: Tensor, y: Tensor, size: int, seed: int, epochs: int) -> dict[str, Any]:
    """A network trained on what test and validation leave, and all parts in its units."""
    test, held_out, training = x.tensor_split([len(x) // 3, len(x) // 3 + size])
    labels = y.tensor_split([len(x) // 3, len(x) // 3 + size])
    spread, center = training.std(0), training.mean(0)
    spread = torch.where(spread > 0, spread, 1.0)
    test, held_out, training = ((part - center) / spread for part in (test, held_out, training))
    torch.manual_seed(seed)
    task = Task("", int(y.max()) + 1, TensorDataset(training, labels[2]), (test, labels[0]))
    return {
        "network": train(task, epochs),
        "train": (training, labels[2]),
        "validation": (held_out, labels[1]),
        "test": (test, labels[0]),
    }


@torch.no_grad()
def _cell(x: Tensor, y: Tensor, size: int, seed: int, epochs: int) -> dict[str, Any]:
    with torch.enable_grad():
        parts = _prepared(x, y, size, seed, epochs)
    network, (test, labels) = parts["network"], parts["test"]
    generator = torch.Generator().manual_seed(seed)
    outliers = {
        "shuffled": noise.permuted(test, scale=(1.0, 1.0), generator=generator),
        "wide": 3 * torch.randn(test.shape, generator=generator),
    }
    model = RGPR(network).fit([parts["train"]], progress=False)
    base = partial(_softmax, network)
    result: dict[str, Any] = {
        "training": len(parts["train"][0]),
        "base": {"nll": nll(base(test), labels), **_confidences(base, test)},
        "fitted": {"nll": nll(model(test), labels), **_confidences(model, test)},
        "auroc": {
            kind: {
                "score": auroc(-model.score(test), -model.score(z)),
                "confidence": auroc(confidence(base(test)), confidence(base(z))),
            }
            for kind, z in outliers.items()
        },
    }
    found = model.calibrate([parts["validation"]], progress=False)
    result["calibrated"] = {"nll": nll(model(test), labels), **_confidences(model, test)}
    assert found.nll is not None
    result["validation nll"] = list(found.nll)
    return result


@torch.no_grad()
def _held_out_class(x: Tensor, y: Tensor, seed: int, epochs: int) -> dict[str, float]:
    """How a class that the network never saw is told from those it knows."""
    new = y == y.max()
    with torch.enable_grad():
        parts = _prepared(x[~new], y[~new], 0, seed, epochs)
    training = x[~new].tensor_split([len(x[~new]) // 3])[1]
    spread = training.std(0)
    strange = (x[new] - training.mean(0)) / torch.where(spread > 0, spread, 1.0)
    model = RGPR(parts["network"]).fit([parts["train"]], progress=False)
    test, base = parts["test"][0], partial(_softmax, parts["network"])
    return {
        "score": auroc(-model.score(test), -model.score(strange)),
        "confidence": auroc(confidence(base(test)), confidence(base(strange))),
    }


def _softmax(network: nn.Module, x: Tensor) -> Tensor:
    logits: Tensor = network(x)
    return logits.double().softmax(1)


def _confidences(predict: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, float]:
    return {f"{a:g} x": float(confidence(predict(a * x)).double().mean()) for a in (10, 1000)}


# -- what it shows -------------------------------------------------------------------------------


def render(folder: Path) -> Section:
    """One row for each set and size of the validation set."""
    units = read_units(folder)
    text = (
        "Means over seeds, worst in brackets. NLL is that of test data, above the network's own; "
        "the budget is 0.005. Confidence at 1000 x is of the model after `fit` and after "
        "`calibrate`, less 1/C. AUROC in %, of the score and, behind the slash, of the network's "
        "confidence. A dash: too few data for such a validation set."
    )
    section = Section([Text(text)])
    head = [
        "set, validation",
        "NLL, fitted",
        "NLL, calibrated",
        "confidence at 10 x: network",
        "fitted",
        "calibrated",
        "at 1000 x, above 1/C: fitted",
        "calibrated",
        "shuffled columns",
        "wide noise",
    ]
    rows = []
    for name, found in _by_set(units).items():
        for size in map(str, SIZES):
            cells = [unit.result["cells"][size] for unit in found if size in unit.result["cells"]]
            label = f"{name}, {size}"
            limit = 1 / found[0].result["classes"]
            rows.append(_row(label, cells, limit) if cells else [label, *["-"] * (len(head) - 1)])
    section.add(Table(head, rows))
    rows = [
        [name, *(_auroc([unit.result["held-out class"] for unit in found]),)]
        for name, found in _by_set(units).items()
    ]
    section.add(Table(["held-out class", "AUROC"], rows, "A class that the network never saw"))
    section.claims += _claims(units)
    section.add(*provenance(units))
    return section


def _by_set(units: Sequence[Unit]) -> dict[str, list[Unit]]:
    names = {unit.name.rpartition("-")[0] for unit in units}
    return {n: [u for u in units if u.name.rpartition("-")[0] == n] for n in SETS if n in names}


def _row(label: str, cells: list[Any], limit: float) -> list[str]:
    base = [cell["base"]["nll"] for cell in cells]
    costs = (
        [cell[stage]["nll"] - alone for cell, alone in zip(cells, base, strict=True)]
        for stage in ("fitted", "calibrated")
    )
    return [
        label,
        *(f"{mean(values):+.4f} ({max(values):+.4f})" for values in costs),
        *(_confidence(cells, stage, "10 x") for stage in ("base", "fitted", "calibrated")),
        *(_confidence(cells, stage, "1000 x", limit) for stage in ("fitted", "calibrated")),
        *(_auroc([cell["auroc"][kind] for cell in cells]) for kind in ("shuffled", "wide")),
    ]


def _confidence(cells: list[Any], stage: str, factor: str, less: float = 0.0) -> str:
    """The mean over seeds less a number, and in brackets the worst seed."""
    values = [cell[stage][factor] - less for cell in cells]
    return f"{mean(values):.3f} ({max(values):.3f})"


def _auroc(found: list[dict[str, float]]) -> str:
    ours, theirs = (100 * mean(f[kind] for f in found) for kind in ("score", "confidence"))
    return f"{ours:.1f} / {theirs:.1f}"


_NOISE = (
    "The worst single seed is beyond it. Test sets are small, and one correctly classified example "
    "that lies far from the rest can cost more than the whole budget."
)
_ONE = "The worst single seed is beyond it."


@dataclass(frozen=True)
class _Bound:
    """A bound on a number of each cell, which must hold for the mean over seeds.

    Attributes:
        statement: What is claimed of the number.
        value: The number, of a cell and a stage (``"fitted"`` or ``"calibrated"``).
        bound: The largest mean that is allowed.
        strict: Whether the mean must stay below the bound.
        beyond: The remark where the worst single seed is above the bound.
    """

    statement: str
    value: Callable[[Any, str], float]
    bound: float
    strict: bool = False
    beyond: str = _ONE

    def claim(self, cells: dict[str, list[Any]], stage: str) -> Claim:
        """The claim at one stage, for the cells of each set and size."""
        values = {label: [self.value(c, stage) for c in found] for label, found in cells.items()}
        means = {label: mean(found) for label, found in values.items()}
        largest = max(means, key=means.__getitem__)
        worst = max((value, label) for label, found in values.items() for value in found)
        holds = means[largest] < self.bound if self.strict else means[largest] <= self.bound
        return Claim(
            f"{self.statement}, {stage}",
            f"at most {means[largest]:+.4f} ({largest}); worst seed {worst[0]:+.4f} ({worst[1]})",
            holds,
            "" if holds and worst[0] <= self.bound else self.beyond,
            ours=True,
        )


_BOUNDS = (
    _Bound(
        "Confidence at 1000 x is at most 1/C + 0.15",
        lambda cell, stage: cell[stage]["1000 x"] - cell["limit"],
        0.15,
    ),
    _Bound(
        "Confidence at 10 x is below the network's",
        lambda cell, stage: cell[stage]["10 x"] - cell["base"]["10 x"],
        0.0,
        strict=True,
    ),
    _Bound(
        "The NLL of test data is at most 0.005 above the network's",
        lambda cell, stage: cell[stage]["nll"] - cell["base"]["nll"],
        BUDGET,
        beyond=_NOISE,
    ),
)


def _claims(units: Sequence[Unit]) -> list[Claim]:
    """What the default promises on small data: means over seeds, and the worst seed beside."""
    cells = _cells(units)
    stages = ("fitted", "calibrated")
    claims = [bound.claim(cells, stage) for stage in stages for bound in _BOUNDS]
    return [*claims, _budget_is_kept(cells), _score_is_better(cells)]


def _cells(units: Sequence[Unit]) -> dict[str, list[Any]]:
    """The cells of all seeds for each set and size that was run; each knows its own 1/C."""
    cells = {
        f"{name}, {size}": [
            {**unit.result["cells"][size], "limit": 1 / unit.result["classes"]}
            for unit in found
            if size in unit.result["cells"]
        ]
        for name, found in _by_set(units).items()
        for size in map(str, SIZES)
    }
    return {label: found for label, found in cells.items() if found}


def _budget_is_kept(cells: dict[str, list[Any]]) -> Claim:
    every = [c["validation nll"] for found in cells.values() for c in found]
    held = max(after - base for base, _, after in every)
    over = sum(after - base > BUDGET for base, _, after in every)
    return Claim(
        "Calibrating leaves the NLL of the validation data within the budget of 0.005, or no "
        "worse than the fit left it, for every seed",
        f"at most {held:+.4f}; {over} of {len(every)} are beyond the budget and stay as fitted",
        all(after <= max(base + BUDGET, fitted) + 1e-9 for base, fitted, after in every),
        ours=True,
    )


def _score_is_better(cells: dict[str, list[Any]]) -> Claim:
    lost = [
        f"{label}, {kind}"
        for label, found in cells.items()
        for kind in ("shuffled", "wide")
        if mean(c["auroc"][kind]["score"] for c in found)
        <= mean(c["auroc"][kind]["confidence"] for c in found)
    ]
    return Claim(
        "The score tells shuffled columns and wide noise better than the network's confidence",
        "in every cell" if not lost else f"not for {'; '.join(lost)}",
        not lost,
        ours=True,
    )


register(
    Experiment(
        name=NAME,
        title="The default with 30 to 300 validation examples",
        paper="ours",
        place=160,
        run=run,
        render=render,
    )
)
