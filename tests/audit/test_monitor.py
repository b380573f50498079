"""A monitor of a model: alarms, layers, files, processes, labels, and what goes out."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import rgpr
from networks import Task, mlp, noise
from rgpr.audit.monitor.performance import WINDOWS
from rgpr.audit.monitor.trace import POINTS

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model() -> rgpr.RGPR:
    torch.manual_seed(0)
    model = rgpr.RGPR(mlp()).fit([noise(1000, 1)], progress=False)
    model.calibrate([noise(600, 2)], progress=False)
    return model


@pytest.fixture
def drifted(model: rgpr.RGPR) -> rgpr.Monitor:
    """1000 inputs like the data, then 200 that are not; 100 a minute."""
    monitor = rgpr.Monitor(model)
    for minute in range(12):
        monitor.update(noise(100, 10 + minute, 1 if minute < 10 else 2), at=60.0 * minute)
    return monitor


# -- alarms --------------------------------------------------------------------------------------


def test_no_alarm_without_a_drift(model: rgpr.RGPR) -> None:
    monitor = rgpr.Monitor(model)
    for batch in range(20):
        report = monitor.update(noise(100, 100 + batch))
    assert not report.alarm
    assert not monitor.alarm
    assert (report.count, report.when, report.since, report.drifted) == (2000, None, None, ())
    assert monitor.since_time is None
    assert report.log10 == monitor.log10_martingale < 2
    assert "no alarm after 2000 inputs" in str(report)
    assert not any(layer.drifted for layer in monitor.layers)


def test_a_drift_is_seen_and_dated(drifted: rgpr.Monitor) -> None:
    assert drifted.alarm
    assert 1000 < drifted.when < 1060
    assert 980 < drifted.since <= drifted.when
    assert drifted.since_time in (540.0, 600.0)
    assert "ALARM at input" in repr(drifted)
    first = drifted.layers[0]
    assert first.drifted
    assert first.name in drifted.model.layers
    assert first.since <= first.when


def test_an_alarm_is_new_once_and_stays(model: rgpr.RGPR) -> None:
    monitor = rgpr.Monitor(model)
    assert monitor.update(noise(100, 3, 5)).new
    report = monitor.update(noise(2000, 4))
    assert report.alarm
    assert not report.new


def test_too_ordinary_inputs_are_a_drift_too(model: rgpr.RGPR) -> None:
    monitor = rgpr.Monitor(model)
    assert monitor.update(noise(400, 3, 0.2)).alarm


def test_false_alarms_stay_within_the_bound(model: rgpr.RGPR) -> None:
    """150 monitors with validation data of their own, at a level of 0.2; no layers, for speed."""
    alarms = 0
    for seed in range(150):
        scores = torch.randn(400, generator=torch.Generator().manual_seed(seed)).double()
        model_ = _Calibrated(scores[:100].sort().values)
        monitor = rgpr.Monitor(model_, alpha=0.2, layers=False, seed=seed)
        alarms += monitor.update_scores(scores[100:]).alarm
    assert alarms <= 0.2 * 150


class _Calibrated(rgpr.RGPR):
    """A model with references that a test gives."""

    def __init__(self, references: Tensor) -> None:
        super().__init__(mlp())
        self._references = references

    def _reference_scores(self) -> Tensor:
        assert self._references is not None
        return self._references


def test_batches_may_be_cut_anywhere(model: rgpr.RGPR) -> None:
    explained = model.explain(torch.cat([noise(500, 5), noise(300, 6, 1.5)]))
    whole = rgpr.Monitor(model)
    whole.update_scores(explained.score, explained.strangeness)
    cut = rgpr.Monitor(model)
    for rows in torch.arange(800).split([1, 250, 0, 400, 149]):
        cut.update_scores(explained.score[rows], explained.strangeness[rows].numpy())
    np.testing.assert_allclose(cut._martingale.log, whole._martingale.log, rtol=1e-9)
    assert (cut.when, cut.since) == (whole.when, whole.since)
    np.testing.assert_allclose(cut._trace.points, whole._trace.points, rtol=1e-9)


def test_memory_stays_the_same(model: rgpr.RGPR) -> None:
    monitor = rgpr.Monitor(model, layers=False)
    generator = np.random.default_rng(0)
    sizes = []
    for _ in range(3):
        monitor.update_scores(generator.standard_normal(4000))
        arrays = [monitor._bins[0].edges, monitor._bins[0].counts, monitor._trace.points]
        sizes.append([array.shape for array in arrays])
    assert sizes[0][:2] == sizes[2][:2]
    assert len(monitor._trace.points) <= POINTS
    assert monitor._bins[0].counts.sum() == 600 + 1 + 12_000


def test_scores_without_layers(model: rgpr.RGPR) -> None:
    """The layers skip such inputs; the score does not."""
    monitor = rgpr.Monitor(model)
    monitor.update_scores(model.score(noise(100, 7)))
    monitor.update(noise(50, 8))
    assert monitor._martingale.count.tolist() == [150, *[50] * len(model.layers)]


def test_a_nan_and_an_infinity(model: rgpr.RGPR) -> None:
    x = noise(5, 9)
    x[1, 0], x[2, 0] = math.nan, math.inf
    monitor = rgpr.Monitor(model)
    report = monitor.update(x)
    assert report.nans == 1
    assert math.isfinite(report.log10)
    assert monitor.update(torch.full((40, 4), math.nan)).alarm


def test_digits_scaled_inputs_name_the_input_layer(digits: Task) -> None:
    model = rgpr.RGPR(digits.network).fit(digits.loader(), progress=False)
    model.calibrate([digits.x[:250]], progress=False)
    monitor = rgpr.Monitor(model)
    assert not monitor.update(digits.x[250:400]).alarm
    report = monitor.update(1.5 * digits.x[400:])
    assert report.alarm
    assert "input" in report.drifted
    assert 130 < monitor.since < 190


# -- bad input -----------------------------------------------------------------------------------


def test_bad_input(model: rgpr.RGPR) -> None:
    with pytest.raises(TypeError, match="not a Sequential; wrap the network"):
        rgpr.Monitor(mlp())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="not fitted"):
        rgpr.Monitor(rgpr.RGPR(mlp()))
    with pytest.raises(RuntimeError, match=r"not calibrated: call model\.calibrate"):
        rgpr.Monitor(rgpr.RGPR(mlp()).fit([noise(50, 0)], progress=False))
    for alpha in (0, 1, -1, math.nan):
        with pytest.raises(ValueError, match="must lie between 0 and 1"):
            rgpr.Monitor(model, alpha)
    with pytest.raises(ValueError, match="bins = 2 is too few"):
        rgpr.Monitor(model, bins=2)
    with pytest.raises(ValueError, match="window = 0 must be"):
        rgpr.Monitor(model, window=0)
    monitor = rgpr.Monitor(model)
    with pytest.raises(ValueError, match=r"shape \(3, 1\); expected \(B,\)"):
        monitor.update_scores(torch.zeros(3, 1))
    with pytest.raises(ValueError, match=r"shape \(3, 2\); expected \(3, "):
        monitor.update_scores(torch.zeros(3), torch.zeros(3, 2))
    assert monitor.count == 0
    assert monitor.update_scores([]).count == 0


# -- files ---------------------------------------------------------------------------------------


def test_killed_and_resumed_is_the_same_to_the_last_bit(model: rgpr.RGPR, tmp_path: Path) -> None:
    path = tmp_path / "monitor.safetensors"
    straight, stopped = rgpr.Monitor(model, window=50), rgpr.Monitor(model, window=50)
    for batch in range(12):
        x = noise(60, 40 + batch, 1 if batch < 8 else 1.6)
        for monitor in (straight, stopped):
            monitor.update(x, at=float(batch))
            numbers = range(monitor.count - 59, monitor.count + 1)
            monitor.label(torch.zeros(60), numbers, x=x)
        stopped.save(path)
        stopped = rgpr.Monitor.load(path, model)
    assert straight.alarm
    assert straight.to_json_line() == stopped.to_json_line()
    for name, array in straight._martingale.state.items():
        np.testing.assert_array_equal(array, stopped._martingale.state[name])
    for mine, other in zip(straight._bins, stopped._bins, strict=True):
        np.testing.assert_array_equal(mine.counts, other.counts)
        np.testing.assert_array_equal(mine.edges, other.edges)
    np.testing.assert_array_equal(straight._trace.points, stopped._trace.points)
    assert straight.performance == stopped.performance
    assert list(tmp_path.iterdir()) == [path]


def test_resumed_with_a_loaded_model(model: rgpr.RGPR, tmp_path: Path) -> None:
    model.save(tmp_path / "model.safetensors")
    monitor = rgpr.Monitor(model)
    monitor.update(noise(100, 1))
    monitor.save(tmp_path / "monitor.safetensors")
    again = rgpr.load(tmp_path / "model.safetensors", mlp())
    resumed = rgpr.Monitor.load(tmp_path / "monitor.safetensors", again)
    x = noise(50, 2)
    assert resumed.update(x) == monitor.update(x)
    assert resumed.layers == monitor.layers


def test_files_that_are_not_this_models_monitor(model: rgpr.RGPR, tmp_path: Path) -> None:
    model.save(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="holds no monitor"):
        rgpr.Monitor.load(tmp_path / "model.safetensors", model)
    with pytest.raises(FileNotFoundError):
        rgpr.Monitor.load(tmp_path / "none.safetensors", model)
    rgpr.Monitor(model).save(tmp_path / "monitor.safetensors")
    other = rgpr.RGPR(mlp()).fit([noise(100, 1)], progress=False)
    other.calibrate([noise(100, 2)], progress=False)
    with pytest.raises(ValueError, match="another model or another calibration"):
        rgpr.Monitor.load(tmp_path / "monitor.safetensors", other)


def test_a_model_from_before_layers_were_kept(model: rgpr.RGPR) -> None:
    kept, model._layer_references = model._layer_references, None
    try:
        monitor = rgpr.Monitor(model)
        assert monitor.update(noise(100, 1, 5)).alarm
        assert monitor.layers == []
    finally:
        model._layer_references = kept


# -- several processes ---------------------------------------------------------------------------


def test_merged(model: rgpr.RGPR, drifted: rgpr.Monitor) -> None:
    quiet = rgpr.Monitor(model, seed=1)
    quiet.update(noise(300, 1))
    merged = drifted.merge(quiet, quiet)
    assert merged.processes == 3
    assert merged.count == 1200 + 600
    assert merged.alarm
    assert merged.raised_by == (0,)
    assert "ALARM by process 0 after" in str(merged)
    assert "ALARM by processes 0, 1 after" in str(replace(merged, raised_by=(0, 1)))
    capitals = [10.0**m.log10_martingale for m in (drifted, quiet, quiet)]
    assert 10.0**merged.log10_average == pytest.approx(np.mean(capitals))
    largest = drifted._martingale.peak[0] / math.log(10) - math.log10(3)
    assert merged.log10_largest == pytest.approx(largest)
    assert merged.drifted
    alone = quiet.merge()
    assert not alone.alarm
    assert alone.log10_average == pytest.approx(quiet.log10_martingale)


def test_many_processes_need_more_evidence(model: rgpr.RGPR) -> None:
    """What is enough for one is not enough for one of a thousand."""
    monitor = rgpr.Monitor(model)
    monitor._martingale.peak[0] = monitor._martingale.limits[0] + 1
    assert monitor.merge().alarm
    assert not monitor.merge(*[rgpr.Monitor(model, layers=True)] * 999).alarm


def test_only_alike_monitors_are_merged(model: rgpr.RGPR) -> None:
    with pytest.raises(ValueError, match=r"alpha = 0\.01.*alpha = 0\.1"):
        rgpr.Monitor(model).merge(rgpr.Monitor(model, 0.1))
    with pytest.raises(ValueError, match="made alike"):
        rgpr.Monitor(model).merge(rgpr.Monitor(model, layers=False))


# -- labels that come late -----------------------------------------------------------------------


def test_labels_in_any_order(digits: Task) -> None:
    model = rgpr.RGPR(digits.network).fit(digits.loader(), progress=False)
    model.calibrate([digits.x[:200]], progress=False)
    x, y = digits.x[200:450], digits.y[200:450].clone()
    y[200:] = (y[200:] + 1) % 10  # from here on the labels mean something else
    monitor = rgpr.Monitor(model, window=100)
    monitor.update(x)
    order = torch.randperm(250)
    for rows in order.split(60):
        monitor.label(y[rows], rows + 1, predicted=model(x[rows]))
    windows = monitor.performance
    assert [(w.first, w.last, w.labelled) for w in windows] == [
        (1, 100, 100),
        (101, 200, 100),
        (201, 300, 50),
    ]
    assert windows[0].accuracy == rgpr.metrics.accuracy(model(x[:100]), y[:100]) > 0.9
    assert windows[0].loss == pytest.approx(rgpr.metrics.nll(model(x[:100]), y[:100]), rel=1e-5)
    assert windows[2].accuracy < 0.1
    again = rgpr.Monitor(model, window=100)
    again.update(x)
    again.label(y, range(1, 251), x=x)
    assert again.performance[1].loss == pytest.approx(windows[1].loss, rel=1e-5)
    assert json.loads(again.to_json_line())["performance"]["accuracy"] == windows[2].accuracy


def test_windows_double_when_there_are_too_many(model: rgpr.RGPR) -> None:
    monitor = rgpr.Monitor(model, layers=False, window=2)
    monitor.update_scores(np.zeros(3 * WINDOWS))
    certain = torch.tensor([[1.0, 0.0, 0.0]])
    for number in (1, 2, 3, 3 * WINDOWS):
        monitor.label([0], [number], predicted=certain)
    assert [(w.first, w.last, w.labelled) for w in monitor.performance] == [
        (1, 4, 3),
        (3 * WINDOWS - 3, 3 * WINDOWS, 1),
    ]


@pytest.mark.parametrize("likelihood", ["multilabel", "regression"])
def test_other_likelihoods(likelihood: str) -> None:
    torch.manual_seed(0)
    model = rgpr.RGPR(mlp(), likelihood=likelihood).fit([noise(300, 1)], progress=False)
    model.calibrate([noise(200, 2)], progress=False)
    monitor = rgpr.Monitor(model)
    x = noise(50, 3)
    monitor.update(x)
    answer = model(x)
    if likelihood == "regression":
        monitor.label(answer[0] + 2, range(1, 51), x=x)
        (window,) = monitor.performance
        assert window.accuracy is None
        assert window.loss == pytest.approx(4, rel=1e-4)
        assert "rgpr_monitor_mean_squared_error" in monitor.prometheus()
    else:
        y = (answer > 0.5).long()
        monitor.label(y, range(1, 51), x=x)
        (window,) = monitor.performance
        assert window.accuracy == 1
        chance = torch.where(y == 1, answer, 1 - answer).double()
        assert window.loss == pytest.approx(float(-chance.log().sum(1).mean()), rel=1e-5)


def test_labels_that_do_not_fit(model: rgpr.RGPR) -> None:
    monitor = rgpr.Monitor(model)
    x = noise(10, 1)
    monitor.update(x)
    with pytest.raises(ValueError, match="no input number 11: 10 inputs were read"):
        monitor.label(torch.zeros(10), range(2, 12), x=x)
    with pytest.raises(ValueError, match="no input number 0"):
        monitor.label(torch.zeros(10), range(10), x=x)
    with pytest.raises(ValueError, match="for 10 predictions"):
        monitor.label(torch.zeros(10), [1], x=x)
    with pytest.raises(TypeError, match="x= or their predictions"):
        monitor.label(torch.zeros(10), range(1, 11))
    with pytest.raises(ValueError, match="label"):
        monitor.label(torch.full((10,), 7), range(1, 11), x=x)
    assert monitor.performance == []


# -- out -----------------------------------------------------------------------------------------


def test_the_words_say_how_far_the_alarm_is(model: rgpr.RGPR) -> None:
    monitor = rgpr.Monitor(model, alpha=0.02)
    status = monitor.update(noise(100, 3))
    evidence = f"{10**status.log10:.2g}"
    assert str(status) == (
        f"no alarm after 100 inputs; the evidence for a drift is {evidence}, and 50 raises the "
        "alarm"
    )
    assert json.loads(monitor.to_json_line())["alpha"] == 0.02


def test_a_line_of_json(drifted: rgpr.Monitor) -> None:
    line = drifted.to_json_line()
    assert "\n" not in line
    found = json.loads(line)
    assert found["alarm"] is True
    assert found["count"] == 1200
    assert found["since"] == drifted.since
    assert [layer["name"] for layer in found["layers"]] == [la.name for la in drifted.layers]


def test_text_for_prometheus(drifted: rgpr.Monitor) -> None:
    drifted.label([0], [1], predicted=torch.tensor([[0.5, 0.25, 0.25]]))
    text = drifted.prometheus(process='a "b"\\\n')
    assert text.endswith("\n")
    values = {}
    typed = set()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            typed.add(line.split()[2])
        elif not line.startswith("#"):
            match = re.fullmatch(r'(\w+)\{((?:\w+="(?:[^"\\]|\\.)*",?)+)\} (\S+)', line)
            assert match, line
            assert match[1] in typed
            values[match[1], match[2]] = float(match[3])
    label = r'process="a \"b\"\\\n"'
    assert values["rgpr_monitor_inputs_total", label] == 1200
    assert values["rgpr_monitor_alarm", label] == 1
    assert values["rgpr_monitor_nll", label] == pytest.approx(math.log(2))
    first = drifted.layers[0]
    named = f'{label},layer="{first.name}"'
    assert values["rgpr_monitor_layer_log10_martingale", named] == first.log10
    assert "{" not in rgpr.Monitor(drifted.model, layers=False).prometheus()


def test_pictures(model: rgpr.RGPR, drifted: rgpr.Monitor) -> None:
    axes = drifted.plot()
    assert len(axes) == 2
    axes[0].figure.canvas.draw()
    drifted.label([0], [1], predicted=torch.tensor([[0.5, 0.25, 0.25]]))
    assert len(drifted.plot()) == 3
    assert len(rgpr.Monitor(model, layers=False).plot()) == 1


def test_pictures_in_files_do_not_pile_up(drifted: rgpr.Monitor, tmp_path: Path) -> None:
    """A notebook shows the figures that are open; a service that draws into files needs none."""
    import matplotlib.pyplot as plt

    plt.close("all")
    shown = drifted.plot()[0].figure
    for day in range(25):
        axes = drifted.plot(tmp_path / f"{day}.png")
    assert (tmp_path / "24.png").read_bytes().startswith(b"\x89PNG")
    assert len(axes) == 2
    assert [plt.figure(number) for number in plt.get_fignums()] == [shown]
    plt.close("all")
