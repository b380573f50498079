"""Answers of fixed networks to fixed inputs, as they were when `golden.json` was written.

A change that only moves or renames code leaves every number as it is. One that means to change
them writes the file again, ``python tests/test_golden.py``, and says so in the CHANGELOG.

All of it is float64, where what one processor rounds otherwise than another stays far below the
tolerance. Numbers come from numpy's frozen generator, whose stream never changes.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rgpr
from rgpr.posteriors import Ensemble, FunctionPosterior, Temperature

GOLDEN = Path(__file__).with_name("golden.json")
Numbers = dict[str, Any]


class Draws:
    """Tensors of normal numbers, the same for ever."""

    def __init__(self, seed: int) -> None:
        self._numbers = np.random.RandomState(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.from_numpy(self._numbers.standard_normal(shape))


def with_weights(network: nn.Module, draw: Draws) -> nn.Module:
    network = network.double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            fan_in = max(1, parameter[0].numel()) if parameter.dim() > 1 else 4
            parameter.copy_(draw(*parameter.shape) * math.sqrt(2 / fan_in))
    return network


def mlp(draw: Draws, outputs: int = 3) -> nn.Module:
    hidden = [nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 8), nn.Tanh()]
    return with_weights(nn.Sequential(*hidden, nn.Linear(8, outputs)), draw)


def images(draw: Draws) -> nn.Module:
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return with_weights(nn.Sequential(*layers, nn.Linear(6, 3)), draw)


def laplace(network: nn.Module, x: Tensor, y: Tensor, structure: str) -> Any:
    pytest.importorskip("laplace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from laplace import Laplace

        la = Laplace(network, "classification", "last_layer", structure)
        la.fit(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=32))
    return la


def bases(draw: Draws, x: Tensor, y: Tensor) -> Iterator[tuple[str, Any]]:
    network = mlp(draw)
    noise = 0.3 * draw(7, 1, 3)

    def samples(x: Tensor, n_samples: int, generator: torch.Generator | None) -> Tensor:
        return network(x) + noise.repeat(-(-n_samples // 7), 1, 1)[:n_samples]

    yield "map", network
    yield "lll kron", laplace(network, x, y, "kron")
    yield "lll diag", laplace(network, x, y, "diag")
    yield "ensemble", Ensemble([network, mlp(draw), mlp(draw)])
    yield "temperature", Temperature(network, 1.7)
    yield "function", FunctionPosterior(network, samples)


def far(x: Tensor) -> Tensor:
    rows = [x[:4], 10 * x[:4], 1e6 * x[:2], 1e40 * x[:1], x[:1] * torch.nan, x[:1] * torch.inf]
    return torch.cat(rows)


def answers(model: rgpr.RGPR, x: Tensor) -> Numbers:
    found: Numbers = {"layers": model.layers, "sigma2": model.sigma2}
    with torch.no_grad():
        if model.likelihood == "regression":
            found["mean"], found["variance"] = model(x, diagonal_output=True)
        else:
            found["probit"] = model(x)
            found["bridge"] = model(x, link_approx="bridge")
        found["v"], found["score"] = model.variance(x), model.score(x)
    return found


def fitted() -> Iterator[tuple[str, Numbers]]:
    """The default and the paper's residual over several bases."""
    draw = Draws(0)
    x, y = draw(200, 5), torch.arange(200) % 3
    x = x + y[:, None]
    for name, base in bases(draw, x, y):
        for residual in ("onset", "paper"):
            model = rgpr.RGPR(base, residual=residual).fit([(x[:120], y[:120])], progress=False)
            numbers = answers(model, far(x))
            if residual == "onset":
                did = model.calibrate([(x[120:], y[120:])], progress=False)
                numbers["calibrated"] = model(far(x)).detach()
                numbers["p"] = model.p_value(far(x))
                numbers["set"] = model.predict_set(far(x), 0.8).double()
                numbers["temperature"] = did.temperature
            yield f"{name}, {residual}", numbers


def other_models() -> Iterator[tuple[str, Numbers]]:
    """Images, one output, regressions, recipes of one's own, certificates."""
    draw = Draws(1)
    x = draw(60, 2, 8, 8)
    model = rgpr.RGPR(images(draw)).fit([x], progress=False)
    yield "images", answers(model, far(x)) | {"radius": model.certify().radii}
    x = draw(150, 5)
    yield "one output", answers(rgpr.RGPR(mlp(draw, 1)).fit([x], progress=False), far(x))
    network = mlp(draw, 2)
    y = network(x).detach() + 0.1 * draw(150, 2)
    for residual in ("onset", "paper"):
        model = rgpr.RGPR(network, likelihood="regression", residual=residual)
        model.fit([x[:100]], progress=False)
        model.calibrate([(x[100:], y[100:])], progress=False)
        low, high = model.interval(far(x))
        yield f"regression, {residual}", answers(model, far(x)) | {"low": low, "high": high}
    offsets = rgpr.Strategy("whitened", of="raw", offset=1.0)
    recipe = rgpr.ResidualRecipe(rgpr.Strategy("moments", offset=1.0), offsets, "sum")
    model = rgpr.RGPR(mlp(draw), residual=recipe).fit([x], progress=False)
    yield "recipe", answers(model, far(x)) | {"radius": model.certify().radii}


def tuned() -> Iterator[tuple[str, Numbers]]:
    """The three objectives, temperature and budgets."""
    draw = Draws(2)
    x, network = draw(160, 5), mlp(draw)
    y = (network(x).detach() + draw(160, 3)).argmax(1)
    train, val = [(x[:80], y[:80])], [(x[80:], y[80:])]
    outliers = [6 * draw(80, 5)]
    options: dict[str, dict[str, Any]] = {
        "likelihood": {},
        "ood": {"ood": outliers},
        "ood, temperature": {"ood": outliers, "temperature": True},
        "ood, budget": {"ood": outliers, "temperature": True, "max_nll_increase": 0.02},
        "marginal-likelihood": {},
    }
    for name, given in options.items():
        model = rgpr.RGPR(network, residual="paper").fit(train, progress=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            objective = name.partition(",")[0]
            result = model.tune(val, objective, progress=False, **given)
        found = {"before": result.before, "after": result.after, "weight": result.ood_weight}
        # A scale that ran towards zero means nothing: what it makes of predictions does.
        numbers = answers(model, far(x)) | found | {"temperature": model.temperature}
        del numbers["sigma2"]
        yield name, numbers


PARTS: dict[str, Callable[[], Iterator[tuple[str, Numbers]]]] = {
    "fitted": fitted,
    "other models": other_models,
    "tuned": tuned,
}


def as_json(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().tolist()
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    return value


def assert_same(found: Any, kept: Any, where: str) -> None:
    if isinstance(kept, dict):
        assert found.keys() == kept.keys(), where
        for key in kept:
            assert_same(found[key], kept[key], f"{where}, {key}")
    elif isinstance(kept, list) and kept and not isinstance(kept[0], str):
        np.testing.assert_allclose(found, kept, rtol=1e-7, atol=1e-7, err_msg=where)
    elif isinstance(kept, float):
        assert found == pytest.approx(kept, rel=1e-7, abs=1e-7, nan_ok=True), where
    else:
        assert found == kept, where


@pytest.mark.parametrize("part", PARTS)
def test_answers_are_what_they_were(part: str) -> None:
    kept = json.loads(GOLDEN.read_text())[part]
    found = {name: as_json(numbers) for name, numbers in PARTS[part]()}
    assert_same(found, kept, part)


if __name__ == "__main__":
    every = {
        part: {name: as_json(numbers) for name, numbers in run()} for part, run in PARTS.items()
    }
    GOLDEN.write_text(json.dumps(every, indent=None, separators=(",", ":")) + "\n")
