"""Inputs, sets and detectors of an evaluation that are not as they should be."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import rgpr
from networks import mlp, noise
from rgpr import metrics

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model() -> rgpr.RGPR:
    torch.manual_seed(0)
    model = rgpr.RGPR(mlp()).fit([noise(500, 1)], progress=False)
    model.calibrate((noise(300, 2), torch.arange(300) % 3), progress=False)
    return model


def with_holes(x: Tensor) -> Tensor:
    """Three rows with a NaN."""
    x = x.clone()
    x[5, 0] = x[70, 1] = x[71, 2] = math.nan
    return x


def test_rows_with_a_nan_are_the_strangest_and_have_no_answer(model: rgpr.RGPR) -> None:
    x, y, far = noise(100, 3), torch.arange(100) % 3, noise(90, 4, 2)
    holes, outside = with_holes(x), with_holes(far)
    kept = ~holes.isnan().any(1)
    data = list(zip(holes.split(30), y.split(30), strict=True))
    length = {"length": lambda x: x.norm(dim=1)}
    found = rgpr.evaluate(model, data, {"far": outside}, detectors=length, progress=False)
    assert found.nans == {"test": 3, "far": 3}
    assert found.answered == 97
    assert "test data (97, and 3 with NaN left out)" in str(found)
    assert "far (90, 3 with NaN, " in str(found)
    assert json.loads(found.to_json())["nans"] == found.nans
    clean = rgpr.evaluate(model, (x[kept], y[kept]), {"far": outside}, progress=False)
    for method, values in clean.answers.items():
        assert found.answers[method] == pytest.approx(values)
    assert clean.nans == {"test": 0, "far": 3}
    with torch.no_grad():
        ours, theirs = (model.score(each).nan_to_num(math.inf) for each in (holes, outside))
    values = found.detection["far"]["RGPR, score"]
    assert values["auroc"] == metrics.auroc(-ours, -theirs)
    assert values["fpr95"] == metrics.fpr95(-ours, -theirs)
    for values in found.detection["far"].values():
        assert all(math.isfinite(value) for value in values.values())
    assert found.flagged["far"] == pytest.approx(float(model.flag(outside, 0.05).double().mean()))


@pytest.mark.parametrize("likelihood", ["multilabel", "regression"])
def test_other_likelihoods(likelihood: str) -> None:
    torch.manual_seed(0)
    model = rgpr.RGPR(mlp(), likelihood=likelihood).fit([noise(300, 1)], progress=False)
    x, y = noise(100, 3), (noise(100, 4)[:, :3] > 0).long()
    model.calibrate((noise(100, 5), y), progress=False)
    holes = with_holes(x)
    kept = ~holes.isnan().any(1)
    found = rgpr.evaluate(model, (holes, y), {"far": with_holes(9 * x)}, progress=False)
    clean = rgpr.evaluate(model, (x[kept], y[kept]), progress=False)
    assert found.nans["test"] == 3
    for method, values in clean.answers.items():
        assert found.answers[method] == pytest.approx(values)


def test_no_row_has_an_answer(model: rgpr.RGPR) -> None:
    x = torch.full((4, 4), math.nan)
    found = rgpr.evaluate(model, (x, torch.zeros(4)), {"i": noise(9, 1)}, progress=False)
    assert found.answers == {}
    assert found.detection["i"]["RGPR, score"]["auroc"] == 0
    with pytest.raises(ValueError, match="no input whose entries are all finite"):
        rgpr.audit.audit(model, (x, torch.zeros(4)), progress=False)


def test_a_report_of_rows_with_a_nan(model: rgpr.RGPR) -> None:
    data = (with_holes(noise(100, 3)), torch.arange(100) % 3)
    report = rgpr.audit.audit(
        model, data, {"far": with_holes(noise(90, 4, 5))}, notes="see below", progress=False
    )
    assert "see below" in report.warnings
    assert "<li>See below.</li>" in report.html
    assert any("for 3 of the 100 inputs of 'test'" in note for note in report.warnings)
    assert any("for 3 of the 90 inputs of 'far'" in note for note in report.warnings)
    assert report.evaluation.nans["uniform"] == 0  # made of the other rows
    assert "right answers on 97 test inputs" in report.html
    assert '="nan' not in report.html


@pytest.mark.parametrize("name", ["RGPR, score", "network, confidence", "p-value"])
def test_names_of_detectors_that_are_taken(model: rgpr.RGPR, name: str) -> None:
    x = noise(9, 1)
    with pytest.raises(ValueError, match=rf"named \['{name}'\].*choose others"):
        rgpr.evaluate(model, x, {"i": x}, detectors={name: model.score, "mine": model.score})


def test_detectors_are_named_in_errors(model: rgpr.RGPR) -> None:
    def hole(x: Tensor) -> Tensor:
        return torch.where(x[:, 0] == 7, math.nan, x[:, 0])

    x = noise(9, 1)
    outside = noise(20, 2)
    outside[13, 0] = 7
    batches: Any = [outside[:10], outside[10:]]
    with pytest.raises(ValueError, match="'mine' gave NaN for row 13, from 0, of the far data"):
        rgpr.evaluate(model, x, {"far": batches}, detectors={"mine": hole}, progress=False)
    with pytest.raises(ValueError, match=r"the detector 'odd' gave shape \(5,\) for 9 inputs"):
        rgpr.evaluate(model, x, detectors={"odd": lambda x: torch.zeros(5)}, progress=False)
    with pytest.raises(TypeError, match="detectors is a list; expected detectors by name"):
        rgpr.evaluate(model, x, detectors=[hole], progress=False)  # type: ignore[arg-type]


def test_sets_without_inputs(model: rgpr.RGPR) -> None:
    x, y = noise(9, 1), torch.zeros(9)
    with pytest.raises(ValueError, match="the test data hold no input; give at least one"):
        rgpr.evaluate(model, (x[:0], y[:0]), {"i": x}, progress=False)
    with pytest.raises(ValueError, match="the i data hold no input"):
        rgpr.evaluate(model, (x, y), {"i": x[:0]}, progress=False)
