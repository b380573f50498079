"""One set of classes with one seed: strange rows, false alarms, and probabilities at the data."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from rgpr._demo import Task, train
from rgpr.metrics import accuracy, ece, nll
from rgpr.model import RGPR

from ..units import Result
from .detectors import METRICS, measured, rankings
from .rows import Split, read_classes, split, strange

__all__ = ["HELD_OUT", "classes_unit"]

HELD_OUT = "held-out class"


def classes_unit(name: str, seed: int, epochs: int) -> Result:
    """The measures of a set; a set of two classes has none to hold out."""
    x, y = read_classes(name)
    parts = split(x, y, seed)
    network = _trained(parts, seed, epochs)
    test, labels = parts.test
    model = RGPR(network).fit(parts.train, progress=False)
    at_data = {
        "base": _at_data(lambda z: network(z).double().softmax(1), test, labels),
        "fitted": _at_data(model, test, labels),
    }
    model.calibrate(parts.validation, progress=False)
    at_data["calibrated"] = _at_data(model, test, labels)
    found = rankings(model, network, *parts.train, seed)
    outliers = strange(test, seed)
    kinds: dict[str, Any] = {kind: measured(found, test, z) for kind, z in outliers.items()}
    result: Result = {
        "task": "classification",
        "set": name,
        "seed": seed,
        "rows": parts.sizes,
        "columns": x.shape[1],
        "classes": int(y.max()) + 1,
        "at data": at_data,
        "flagged": {
            kind: float(model.flag(z).double().mean())
            for kind, z in {"test": test, **outliers}.items()
        },
    }
    if result["classes"] > 2:
        each = [_without(x, y, held_out, seed, epochs) for held_out in range(result["classes"])]
        kinds = {HELD_OUT: _averaged(each), **kinds}
        result["held-out classes"] = [
            {detector: values["auroc"] for detector, values in one.items()} for one in each
        ]
    return {**result, "kinds": kinds}


def _trained(parts: Split, seed: int, epochs: int) -> nn.Module:
    """A ReLU network with two hidden layers of 100 units."""
    torch.manual_seed(seed)
    classes = int(parts.train[1].max()) + 1
    return train(Task("", classes, TensorDataset(*parts.train), parts.test), epochs)


@torch.no_grad()
def _at_data(predict: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> dict[str, float]:
    p = predict(x)
    return {"nll": nll(p, y), "ece": ece(p, y), "accuracy": accuracy(p, y)}


def _without(x: Tensor, y: Tensor, held_out: int, seed: int, epochs: int) -> dict[str, Any]:
    """How the rows of one class are told from those that another network was trained on."""
    known = y != held_out
    labels = torch.where(y > held_out, y - 1, y)
    parts = split(x[known], labels[known], seed)
    network = _trained(parts, seed, epochs)
    model = RGPR(network).fit(parts.train, progress=False)
    found = rankings(model, network, *parts.train, seed)
    return measured(found, parts.test[0], parts.standardised(x[~known]))


def _averaged(each: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean over the classes that were held out in turn."""
    return {
        detector: {metric: mean(one[detector][metric] for one in each) for metric in METRICS}
        for detector in each[0]
    }
