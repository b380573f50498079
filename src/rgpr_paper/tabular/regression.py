"""One set of numbers with one seed: strange rows, and intervals at the data and away from it.

Two kinds of 90 % intervals are compared, both calibrated on the same validation rows: the network's
output plus and minus one number (split conformal prediction), and the model's own, whose width
grows away from the training rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rgpr.answers import conformal
from rgpr.model import RGPR

from ..regression import trained_regressor
from ..units import Result
from .detectors import measured, rankings
from .rows import FAR, Split, read_numbers, shifted_rows, split, strange

__all__ = ["COVERAGE", "SHIFTED", "numbers_unit"]

COVERAGE = 0.9
SHIFTED = "shifted"
_Bounds = Callable[[Tensor], tuple[Tensor, Tensor]]


def numbers_unit(root: Path | None, name: str, seed: int, epochs: int) -> Result:
    """The measures of a set.

    Raises:
        MissingDataError: The set's file is not there.
    """
    x, y = read_numbers(root, name)
    parts = split(x, y, seed)
    network, model = _fitted(parts, seed, epochs)
    test, targets = parts.test
    found = rankings(model, network, *parts.train, seed)
    outliers = strange(test, seed)
    kinds: dict[str, Any] = {kind: measured(found, test, z) for kind, z in outliers.items()}
    intervals = _intervals(network, model, parts)
    with torch.no_grad():
        error = float((network(test) - targets).square().mean().sqrt())
    away, ranks = _shifted(x, y, seed, epochs)
    return {
        "task": "regression",
        "set": name,
        "seed": seed,
        "rows": parts.sizes,
        "columns": x.shape[1],
        "rmse": error,
        "covered": {kind: _covered(bounds, test, targets) for kind, bounds in intervals.items()},
        "width": {kind: _width(bounds, test) for kind, bounds in intervals.items()},
        "wider": {
            f"{factor:g} x": _width(intervals["RGPR"], factor * test)
            / _width(intervals["RGPR"], test)
            for factor in (2.0, FAR)
        },
        "shifted": away,
        "flagged": {
            kind: float(model.flag(z).double().mean())
            for kind, z in {"test": test, **outliers}.items()
        },
        "kinds": {SHIFTED: ranks, **kinds},
    }


def _fitted(parts: Split, seed: int, epochs: int) -> tuple[nn.Module, RGPR]:
    network = trained_regressor(*parts.train, seed=seed, epochs=epochs)
    model = RGPR(network, likelihood="regression").fit(parts.train, progress=False)
    model.calibrate(parts.validation, progress=False)
    return network, model


def _intervals(network: nn.Module, model: RGPR, parts: Split) -> dict[str, _Bounds]:
    x, y = parts.validation
    with torch.no_grad():
        errors = (network(x) - y).abs().flatten().double()
    half = conformal.quantile(errors.sort().values, COVERAGE)

    def constant(z: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            middle = network(z).double()
        return middle - half, middle + half

    return {"constant": constant, "RGPR": lambda z: model.interval(z, COVERAGE)}


def _covered(bounds: _Bounds, x: Tensor, y: Tensor) -> float:
    low, high = bounds(x)
    return float(((low <= y) & (y <= high)).double().mean())


def _width(bounds: _Bounds, x: Tensor) -> float:
    """The median width of the intervals of these rows."""
    low, high = bounds(x)
    return float((high - low).median())


def _shifted(x: Tensor, y: Tensor, seed: int, epochs: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Intervals and ranks of rows with the largest values of the most informative column.

    The network of this part has seen none of them.
    """
    column, away = shifted_rows(x, y)
    parts = split(x[~away], y[~away], seed)
    network, model = _fitted(parts, seed, epochs)
    z = parts.standardised(x[away])
    targets = parts.targets(y[away])
    intervals = _intervals(network, model, parts)
    found = {
        "column": column,
        "rows": int(away.sum()),
        "covered": {kind: _covered(bounds, z, targets) for kind, bounds in intervals.items()},
        "covered at the data": {
            kind: _covered(bounds, *parts.test) for kind, bounds in intervals.items()
        },
        "wider": _width(intervals["RGPR"], z) / _width(intervals["RGPR"], parts.test[0]),
    }
    return found, measured(rankings(model, network, *parts.train, seed), parts.test[0], z)
