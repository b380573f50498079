"""What a monitor refuses, and that it is then as it was before."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rgpr
from networks import mlp, noise

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model() -> rgpr.RGPR:
    torch.manual_seed(0)
    model = rgpr.RGPR(mlp()).fit([noise(500, 1)], progress=False)
    model.calibrate([noise(300, 2)], progress=False)
    return model


@pytest.fixture
def monitor(model: rgpr.RGPR) -> rgpr.Monitor:
    monitor = rgpr.Monitor(model)
    monitor.update(noise(20, 3))
    return monitor


# -- times ---------------------------------------------------------------------------------------


def test_a_datetime_is_its_timestamp(model: rgpr.RGPR, tmp_path: Path) -> None:
    monitor = rgpr.Monitor(model)
    start = datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=2)))
    monitor.update(noise(300, 3), at=start)
    later = start + timedelta(hours=1)
    assert monitor.update(noise(100, 4, 5), at=later).alarm
    assert monitor.since_time in (start.timestamp(), later.timestamp())
    monitor.save(tmp_path / "monitor.safetensors")
    again = rgpr.Monitor.load(tmp_path / "monitor.safetensors", model)
    assert again.since_time == monitor.since_time


@pytest.mark.parametrize(
    ("at", "error", "words"),
    [
        ("2026-01-01", TypeError, "at = '2026-01-01' is a str; pass one number"),
        (np.datetime64("2026-01-01"), TypeError, r"is a datetime64; pass .* datetime\.datetime"),
        (np.timedelta64(5, "s"), TypeError, "is a timedelta64"),
        ([1.0, 2.0], TypeError, "is a list"),
        (math.nan, ValueError, "leave it out"),
    ],
)
def test_other_times_change_nothing(
    monitor: rgpr.Monitor, at: Any, error: type[Exception], words: str
) -> None:
    before = monitor.to_json_line(), monitor._bins[0].counts.sum()
    with pytest.raises(error, match=words):
        monitor.update(noise(10, 5), at=at)
    assert (monitor.to_json_line(), monitor._bins[0].counts.sum()) == before


# -- settings ------------------------------------------------------------------------------------


def test_settings_that_are_no_numbers(model: rgpr.RGPR) -> None:
    with pytest.raises(TypeError, match=r"alpha = 'x' is no number; pass .* 0\.01"):
        rgpr.Monitor(model, alpha="x")  # type: ignore[arg-type]
    for name in ("window", "bins"):
        with pytest.raises(TypeError, match=rf"{name} = 1\.5 is no whole number"):
            rgpr.Monitor(model, **{name: 1.5})
    assert rgpr.Monitor(model, alpha=np.float32(0.1), window=np.int64(5)).alpha < 1


# -- labels --------------------------------------------------------------------------------------


def test_an_input_counts_once(model: rgpr.RGPR, tmp_path: Path) -> None:
    path = tmp_path / "monitor.safetensors"
    monitor = rgpr.Monitor(model)
    x = noise(200, 3)
    monitor.update(x)
    seen: set[int] = set()
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0)) + 1
    for part in order.split(23):
        monitor.label(torch.zeros(len(part)), part, x=x[part - 1])
        seen |= set(part.tolist())
        inside = sorted(seen)
        starts = [n for n in inside if n - 1 not in seen]
        ends = [n for n in inside if n + 1 not in seen]
        assert monitor._performance.runs.T.tolist() == [starts, ends]
        monitor.save(path)
        monitor = rgpr.Monitor.load(path, model)
        with pytest.raises(ValueError, match=f"input {part[-1]} has a label already.*once"):
            monitor.label([0], [int(part[-1])], x=x[:1])
    assert monitor._performance.runs.tolist() == [[1, 200]]
    assert sum(window.labelled for window in monitor.performance) == 200


def test_a_label_twice_in_one_call(monitor: rgpr.Monitor) -> None:
    with pytest.raises(ValueError, match=r"input 5 is named 2 times; .* name each input once"):
        monitor.label([0, 0, 0], [5, 4, 5], x=noise(3, 3))
    assert monitor.performance == []


@pytest.mark.parametrize("numbers", [[5.9, 7.2, 1], [math.nan, 1, 2], [True, False, True], "abc"])
def test_numbers_that_are_not_whole(monitor: rgpr.Monitor, numbers: Any) -> None:
    with pytest.raises(ValueError, match=r"whole numbers|give the number of each input"):
        monitor.label([0, 0, 0], numbers, x=noise(3, 3))
    monitor.label([0, 0], torch.tensor([5.0, 7.0]), x=noise(2, 3))


@pytest.mark.parametrize(
    ("predicted", "words"),
    [
        (torch.tensor([0, 1]), r"shape \(2,\); expected probabilities \(B, 3\)"),
        (torch.full((2, 5), 0.2), r"shape \(2, 5\); expected probabilities \(B, 3\)"),
        (torch.tensor([[0.5, 0.5, 0.0], [2.0, -1.0, 0.0]]), "row 1 .* look like logits"),
        (torch.tensor([[0.5, 0.1, 0.1], [1.0, 0.0, 0.0]]), "row 0 of predicted"),
        (torch.tensor([[1.0, 0.0, 0.0], [math.nan] * 3]), "row 1 is not finite.* leave these"),
    ],
)
def test_predictions_that_are_none(monitor: rgpr.Monitor, predicted: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        monitor.label([0, 1], [1, 2], predicted=predicted)
    assert monitor.performance == []
    monitor.label([0, 1], [1, 2], predicted=torch.eye(3, dtype=torch.float16)[:2])
    assert monitor.performance[0].accuracy == 1


def test_inputs_with_a_nan_have_no_prediction(monitor: rgpr.Monitor) -> None:
    x = noise(3, 3)
    x[1, 0] = math.nan
    with pytest.raises(ValueError, match="row 1 is not finite"):
        monitor.label([0, 0, 0], [1, 2, 3], x=x)
    assert monitor.performance == []


def test_no_labels_are_no_error(monitor: rgpr.Monitor) -> None:
    monitor.label(torch.zeros(0), [], x=noise(3, 3)[:0])
    assert monitor.performance == []
    with pytest.raises(ValueError, match="targets of shape"):
        monitor.label(torch.zeros(2), [], x=noise(3, 3)[:0])


def test_labels_and_numbers_are_checked_as_such() -> None:
    torch.manual_seed(0)
    for likelihood, wrong in (("multilabel", -0.5), ("regression", math.nan)):
        model = rgpr.RGPR(mlp(), likelihood=likelihood).fit([noise(300, 1)], progress=False)
        model.calibrate([noise(200, 2)], progress=False)
        monitor = rgpr.Monitor(model)
        monitor.update(noise(5, 3))
        predicted = torch.full((1, 3), 0.9)  # of labels, each by itself
        monitor.label([[1, 0, 1]], [1], predicted=predicted)
        predicted[0, 1] = wrong
        with pytest.raises(ValueError, match="row 0"):
            monitor.label([[1, 0, 1]], [2], predicted=predicted)


def test_predictions_spare_the_network_another_run(model: rgpr.RGPR) -> None:
    monitor, runs = rgpr.Monitor(model), []
    monitor.update(noise(20, 3))
    predicted = model(noise(20, 3)).detach()
    y = torch.zeros(10, dtype=torch.long)
    monitor.label(y, range(1, 11), predicted=predicted[:10])
    handle = model.posterior.network.register_forward_pre_hook(lambda *_: runs.append(1))
    monitor.label(y, range(11, 21), predicted=predicted[10:])
    handle.remove()
    assert not runs
