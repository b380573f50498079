"""Why an input is flagged, and which ones are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rgpr
from networks import Task, mlp


def test_an_explanation_adds_up(digits: Task) -> None:
    model = rgpr.RGPR(digits.network).fit(digits.loader())
    x = torch.cat([digits.x[:3], 50 * digits.x[:1], torch.rand(1, 64)])
    explanation = model.explain(x)
    assert list(explanation.layers) == model.layers
    assert explanation.variance.shape == (5, 3)
    torch.testing.assert_close(explanation.total, model.variance(x).detach())
    torch.testing.assert_close(explanation.share.sum(1), torch.ones(5).double())
    lines = str(explanation).splitlines()
    assert len(lines) == 6
    assert "confidence" in lines[0]
    assert "%" in lines[1]


def test_a_layer_that_is_made_strange_is_named() -> None:
    """The second entry is a thousand standard deviations out: the input's doing."""
    x = torch.randn(200, 4)
    model = rgpr.RGPR(mlp()).fit([x])
    model.sigma2 = [1.0, 0.0, 0.5]
    strange = x[:1].clone()
    strange[0, 1] = 1e3
    share = model.explain(strange).share[0]
    assert share[1] == 0
    assert share[0] > share[2] > 0
    far = model.explain(torch.cat([1e38 * strange, torch.full((1, 4), torch.inf)]))
    assert torch.equal(far.total.isinf(), torch.tensor([True, True]))
    torch.testing.assert_close(far.share.sum(1), torch.ones(2).double())
    model.sigma2 = 0.0
    assert (model.explain(strange).share == 0).all()
    regression = rgpr.RGPR(mlp(), likelihood="regression").fit([x])
    assert regression.explain(x[:2]).confidence is None
    assert "-" in str(regression.explain(x[:2]))


@pytest.mark.parametrize("tpr", [0.9, 0.95, 0.99])
def test_the_share_that_passes_is_the_one_asked_for(digits: Task, tpr: float) -> None:
    model = rgpr.RGPR(digits.network).fit(digits.loader())
    threshold = model.set_threshold(
        [(digits.x[:200], digits.y[:200]), digits.x[200:]], tpr=tpr, progress=False
    )
    passed = 1 - model.flag(digits.x).double().mean()
    assert tpr <= passed < tpr + 2 / len(digits.x)
    assert 0.1 < threshold < 1
    noisy = torch.cat([1e4 * digits.x, torch.full((1, 64), torch.nan)])
    assert model.flag(noisy).all()


def test_regression_is_flagged_by_its_variance() -> None:
    x = torch.randn(200, 4)
    model = rgpr.RGPR(mlp(), likelihood="regression").fit([x])
    model.set_threshold([x], tpr=0.95)
    assert model.flag(x).sum() == 10
    assert model.flag(100 * x).all()


def test_a_threshold_is_saved(tmp_path: Path) -> None:
    x = torch.randn(200, 4)
    model = rgpr.RGPR(mlp()).fit([x])
    with pytest.raises(RuntimeError, match="set_threshold"):
        model.flag(x)
    for bad in (0.0, 1.0):
        with pytest.raises(ValueError, match="tpr"):
            model.set_threshold([x], tpr=bad)
    with pytest.raises(ValueError, match="empty batches"):
        model.set_threshold([x[:0]])
    model.set_threshold([x])
    model.save(tmp_path / "m")
    again = rgpr.load(tmp_path / "m", mlp())
    assert torch.equal(again.flag(2 * x), model.flag(2 * x))
