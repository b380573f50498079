"""Everything for many inputs is what the single calls say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rgpr
from networks import blobs, mlp
from rgpr.likelihoods import LIKELIHOODS
from rgpr.likelihoods.classification import Classification


def check(found: Any, expected: Tensor) -> None:
    np.testing.assert_array_equal(
        found,
        expected.detach().float().numpy()
        if expected.dtype == torch.bfloat16
        else expected.detach().numpy(),
    )


def strange(count: int = 60) -> Tensor:
    x = torch.randn(count, 4)
    x[3:6] *= 1e3
    x[6], x[7, 2], x[8, 1] = 1e30, torch.inf, torch.nan
    return x


@pytest.mark.parametrize("residual", ["onset", "paper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_classes(residual: str, dtype: torch.dtype) -> None:
    model = rgpr.RGPR(mlp().to(dtype), residual=residual).fit([torch.randn(200, 4).to(dtype)])
    x = strange().to(dtype)
    bare = model.predict([x])
    check(bare.probabilities, model(x))
    check(bare.score, model.score(x))
    assert bare.p_value is bare.flag is bare.set is bare.mean is bare.interval is None
    model.calibrate([torch.randn(99, 4).to(dtype)])
    assert model.predict([x]).set is None
    model.calibrate([(torch.randn(99, 4).to(dtype), torch.arange(99) % 3)])
    found = model.predict([x], alpha=0.1, coverage=0.8)
    check(found.probabilities, model(x))
    check(found.score, model.score(x))
    check(found.p_value, model.p_value(x))
    check(found.flag, model.flag(x, 0.1))
    check(found.set, model.predict_set(x, 0.8))
    known = np.arange(60) != 8
    check(found.confidence[known], model(x).amax(1)[known])
    check(found.label[known], model(x).argmax(1)[known])
    assert found.label[8] == -1
    assert found.flag[8]
    assert len(found) == 60


@pytest.mark.parametrize("outputs", [1, 2])
def test_numbers(outputs: int) -> None:
    x, network = torch.randn(300, 4), mlp(4, outputs)
    y = network(x).detach() + torch.randn(300, outputs)
    model = rgpr.RGPR(network, likelihood="regression").fit(x[:150], y[:150])
    assert model.predict(x).interval is None
    model.calibrate(x[150:], y[150:])
    x = strange()
    found = model.predict([x[:30], x[30:]])
    parts = [model(part, diagonal_output=True) for part in (x[:30], x[30:])]
    check(found.mean, torch.cat([mean for mean, _ in parts]))
    check(found.variance, torch.cat([variance for _, variance in parts]))
    for side, ours in enumerate(found.interval):
        check(ours, torch.cat([model.interval(part)[side] for part in (x[:30], x[30:])]))
    check(found.p_value, torch.cat([model.p_value(part) for part in (x[:30], x[30:])]))
    assert found.probabilities is found.label is found.set is None


def test_the_network_runs_once_for_each_batch() -> None:
    network, x = mlp(), torch.randn(3000, 4)
    model = rgpr.RGPR(network).fit(x)
    model.calibrate(torch.randn(99, 4), torch.arange(99) % 3)
    runs: list[int] = []
    handle = network.register_forward_hook(lambda _, args, __: runs.append(len(args[0])))
    found = model.predict(x.numpy())
    handle.remove()
    assert runs == [1024, 1024, 952]
    assert len(found) == 3000
    check(found.score, torch.cat([model.score(part) for part in x.split(1024)]))


def test_a_frame_comes_back_as_one() -> None:
    pd = pytest.importorskip("pandas")
    x = pd.DataFrame(np.random.default_rng(0).normal(size=(50, 4)), index=range(100, 150))
    model = rgpr.RGPR(mlp()).fit(x)
    model.calibrate(x + 0.1, np.arange(50) % 3)
    found = model.predict(x)
    table = found.to_frame()
    assert list(table.index) == list(range(100, 150))
    assert {"label", "confidence", "score", "p_value", "flag", "set_2"} < set(table)
    np.testing.assert_array_equal(table["probabilities_1"], found.probabilities[:, 1])
    assert repr(found).startswith("Predictions of 50 inputs: score (50,), probabilities (50, 3)")
    y = np.zeros((50, 1))
    regression = rgpr.RGPR(mlp(4, 1), likelihood="regression").fit(x, y)
    regression.calibrate(x + 0.1, y)
    assert {"mean_0", "variance_0", "low_0", "high_0"} < set(regression.predict(x).to_frame())


def test_a_likelihood_of_ones_own_has_sets() -> None:
    """A subclass of a likelihood answers as that does, under whatever name."""

    class Grades(Classification):
        name = "grades"

    x, y = blobs()
    try:
        model = rgpr.RGPR(mlp(), likelihood="grades").fit((x, y), progress=False)
        model.calibrate(x, y, progress=False)
        found = model.predict(x[:5])
        assert found.set is not None
        assert found.set.shape == (5, 3)
        assert model.predict_set(x[:5]).shape == (5, 3)
        with pytest.raises(ValueError, match="use predict_set"):
            model.interval(x[:5])
    finally:
        del LIKELIHOODS["grades"]


def test_what_cannot_be_predicted() -> None:
    x = torch.randn(60, 4)
    model = rgpr.RGPR(mlp())
    with pytest.raises(RuntimeError, match="not fitted"):
        model.predict(x)
    model.fit(x)
    assert len(model.predict(x[:0])) == 0
    with pytest.raises(ValueError, match="gave no batch"):
        model.predict([])
    with pytest.raises(ValueError, match=r"shape \(5,\).*\(4,\)"):
        model.predict(torch.randn(3, 5))
    model.calibrate(torch.randn(40, 4), torch.arange(40) % 3)
    with pytest.raises(ValueError, match=r"alpha = 0\.01 is below 1/41"):
        model.predict(x, alpha=0.01)
    with pytest.raises(ValueError, match="coverage = 2 must lie between"):
        model.predict(x, coverage=2)
