"""What :func:`rgpr.evaluate` says agrees with other libraries, and costs one pass over each set."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor, nn

import rgpr
from networks import mlp
from rgpr import metrics
from rgpr.answers.conformal import p_values
from rgpr.audit.evaluate import DETECTION, _alarms
from rgpr.baselines.detectors import KNN, Energy, Mahalanobis, MaxSoftmax

Pair = tuple[Tensor, Tensor]


@pytest.fixture(scope="module")
def data() -> Pair:
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    x = torch.tensor(images[order], dtype=torch.float32) / 16
    return x, torch.tensor(labels[order])


@pytest.fixture(scope="module")
def network(data: Pair) -> nn.Module:
    torch.manual_seed(0)
    x, y = data
    network = mlp(64, 10, width=48)
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x[:800]), y[:800]).backward()
        optimizer.step()
    return network.eval()


@pytest.fixture(scope="module")
def model(network: nn.Module, data: Pair) -> rgpr.RGPR:
    x, y = data
    model = rgpr.RGPR(network).fit(x[:800], y[:800], progress=False)
    model.calibrate(x[800:1200], y[800:1200], progress=False)
    return model


@pytest.fixture(scope="module")
def outliers(data: Pair) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shuffled = data[0][:150][:, torch.randperm(64, generator=generator)]
    return {"shuffled": shuffled, "uniform": torch.rand(100, 64, generator=generator)}


def test_answers_are_those_of_the_model(model: rgpr.RGPR, data: Pair) -> None:
    x, y = data[0][1200:], data[1][1200:]
    found = rgpr.evaluate(model, list(zip(x.split(100), y.split(100), strict=True)))
    with torch.no_grad():
        own, ours = model.posterior.network(x).softmax(1), model(x)
        sets = model.predict_set(x, 0.9)
    for method, p in (("network", own), ("RGPR", ours)):
        values = found.answers[method]
        assert values["accuracy"] == metrics.accuracy(p, y)
        assert values["nll"] == pytest.approx(metrics.nll(p, y), rel=1e-4)
        assert values["brier"] == pytest.approx(metrics.brier(p, y), rel=1e-4)
        assert values["ece"] == pytest.approx(metrics.ece(p, y), abs=1e-3)
        wrong = p.argmax(1) != y
        share = (p.amax(1)[wrong] > 0.9).double().mean()
        assert values["wrong above 0.9"] == pytest.approx(float(share), abs=1e-9)
    covered = sets.gather(1, y[:, None]).double().mean()
    assert found.answers["RGPR"]["covered"] == pytest.approx(float(covered))
    assert found.answers["RGPR"]["size"] == pytest.approx(float(sets.sum(1).double().mean()))
    flagged = model.flag(x, 0.05).double().mean()
    assert found.alarms["false alarms"] == pytest.approx(float(flagged))
    assert found.alarms["gap"] == pytest.approx(_kolmogorov(model.p_value(x)), abs=1e-6)


def _kolmogorov(p: Tensor) -> float:
    from scipy.stats import kstest

    return float(kstest(p.numpy(), "uniform").statistic)


def test_the_words_about_alarms_say_what_chance_gives(model: rgpr.RGPR, data: Pair) -> None:
    x, y = data
    found = rgpr.evaluate(model, (x[1200:], y[1200:]), progress=False)
    assert found.alarms["gap"] < found.alarms["gap by chance"]
    assert "so these test data look like the held-out data" in str(found)
    found = rgpr.evaluate(model, (3 * x[1200:], y[1200:]), progress=False)
    assert found.alarms["gap"] > found.alarms["gap by chance"]
    assert "so these test data are probably not like the held-out data" in str(found)


@pytest.mark.parametrize(("references", "count"), [(40, 30), (400, 60), (60, 500)])
def test_the_gap_that_chance_gives(references: int, count: int) -> None:
    """Of scores that are all alike, 19 in 20 pairs of samples stay within it, and few stay far."""
    generator, within, half = torch.Generator().manual_seed(0), 0, 0
    for _ in range(1000):
        known = torch.rand(references, generator=generator, dtype=torch.float64).sort().values
        new = torch.rand(count, generator=generator, dtype=torch.float64)
        alarms = _alarms(p_values(new, known), references, 0.05)
        within += alarms["gap"] <= alarms["gap by chance"]
        half += alarms["gap"] <= alarms["gap by chance"] / 2
    assert within >= 940
    assert half <= 600


def test_the_table_of_detection_has_one_order(
    model: rgpr.RGPR, data: Pair, outliers: dict[str, Tensor]
) -> None:
    x, y = data
    report = rgpr.audit.audit(model, (x[1200:], y[1200:]), outliers, progress=False)
    heads = re.findall(r"<tr><th></th>((?:<th>[^<]*</th>)+)</tr>", report.html)
    shown = [re.findall(r"<th>([^<]*)</th>", head) for head in heads]
    assert list(DETECTION) in shown
    lines = str(report.evaluation).splitlines()
    assert any(line.split("  ")[1:] and line.endswith("  ".join(DETECTION)) for line in lines)


def test_detection_agrees_with_scikit_learn_and_pytorch_ood(
    model: rgpr.RGPR, data: Pair, outliers: dict[str, Tensor]
) -> None:
    from pytorch_ood.metrics import OODMetrics
    from sklearn.metrics import average_precision_score, roc_auc_score

    def doubt(x: Tensor) -> Tensor:
        p: Tensor = model.posterior.network(x).double().softmax(1)
        return -p.amax(1)

    x = data[0][1200:]
    found = rgpr.evaluate(model, (x, data[1][1200:]), outliers)
    for name, outside in outliers.items():
        for method, score in (("RGPR, score", model.score), ("network, confidence", doubt)):
            with torch.no_grad():
                scores = torch.cat([score(x), score(outside)])
            truth = torch.cat([torch.zeros(len(x)), torch.ones(len(outside))]).long()
            values = found.detection[name][method]
            assert values["auroc"] == pytest.approx(roc_auc_score(truth, scores))
            assert values["aupr out"] == pytest.approx(average_precision_score(truth, scores))
            assert values["aupr in"] == pytest.approx(average_precision_score(1 - truth, -scores))
            theirs = OODMetrics()
            theirs.update(scores, torch.where(truth == 1, -1, 0))
            assert values["auroc"] == pytest.approx(theirs.compute()["AUROC"], abs=1e-5)
            assert values["fpr95 OpenOOD"] == pytest.approx(theirs.compute()["FPR95TPR"], abs=1e-5)
        flagged = model.flag(outside, 0.05).double().mean()
        assert found.flagged[name] == pytest.approx(float(flagged))


def test_detectors_read_one_pass(
    model: rgpr.RGPR, network: nn.Module, data: Pair, outliers: dict[str, Tensor]
) -> None:
    from pytorch_ood.detector import EnergyBased

    x, y = data
    train = [(x[:800], y[:800])]
    detectors: dict[str, Any] = {
        "energy": Energy(network),
        "softmax": MaxSoftmax(network),
        "knn": KNN(network, k=5).fit(train),
        "theirs": EnergyBased(network),
        "all layers": Mahalanobis(network, "auto").fit(train),
    }
    runs = 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    handle = network.register_forward_hook(count)
    few = {name: detectors[name] for name in ("energy", "softmax", "knn", "theirs")}
    rgpr.evaluate(model, (x[1200:], y[1200:]), {"u": outliers["uniform"]}, detectors=few)
    handle.remove()
    assert runs == 4  # one for each set, and one each to find the last layer
    test = (x[1200:], y[1200:])
    found = rgpr.evaluate(
        model, test, outliers, detectors={**detectors, "length": lambda x: x.norm(dim=1)}
    )
    for name, outside in outliers.items():
        assert found.detection[name]["energy"] == found.detection[name]["theirs"]
        for key, detector in detectors.items():
            if key != "theirs":
                expected = metrics.auroc(-detector.score(test[0]), -detector.score(outside))
                assert found.detection[name][key]["auroc"] == pytest.approx(expected)
        expected = metrics.auroc(-test[0].norm(dim=1), -outside.norm(dim=1))
        assert found.detection[name]["length"]["auroc"] == pytest.approx(expected)
    with pytest.raises(ValueError, match=r"gave shape \(5,\) for .* expected a tensor \(B,\)"):
        rgpr.evaluate(model, x[:9], detectors={"odd": lambda x: torch.zeros(5)})


def test_forms(model: rgpr.RGPR, data: Pair, outliers: dict[str, Tensor]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    found = rgpr.evaluate(model, (data[0][1200:], data[1][1200:]), outliers)
    frame = found.to_frame()
    auroc = frame.query("set == 'shuffled' and method == 'RGPR, score' and metric == 'auroc'")
    assert auroc.value.item() == found.detection["shuffled"]["RGPR, score"]["auroc"]
    assert json.loads(found.to_json())["answers"] == found.answers
    assert len(found.plot()) == 3
    text = str(found)
    assert all(words in text for words in ("fpr95 OpenOOD", "RGPR, score", "alpha = 0.05"))
    assert repr(found) == text


def test_without_targets_and_without_calibration(network: nn.Module) -> None:
    x = torch.rand(60, 64)
    model = rgpr.RGPR(network).fit([x], progress=False)
    found = rgpr.evaluate(model, x, {"far": 50 * x})
    assert (found.answers, found.alarms, found.flagged) == ({}, {}, {})
    assert found.detection["far"]["RGPR, score"]["auroc"] == 1
    with pytest.raises(ValueError, match="taken by the test data"):
        rgpr.evaluate(model, x, {"test": x})
    with pytest.raises(RuntimeError, match="not fitted"):
        rgpr.evaluate(rgpr.RGPR(network), x)


def test_other_likelihoods_and_bases(data: Pair) -> None:
    x = data[0][:300]
    regression = rgpr.RGPR(mlp(64, 2), likelihood="regression").fit([x], progress=False)
    with torch.no_grad():
        y = regression.posterior.network(x) + 0.1 * torch.randn(300, 2)
    regression.calibrate(x[:200], y[:200], progress=False)
    found = rgpr.evaluate(regression, (x[200:], y[200:]), {"far": 9 * x})
    assert found.answers["RGPR"]["rmse"] == pytest.approx(0.1, abs=0.03)
    assert 0.7 < found.answers["RGPR"]["covered"] <= 1
    assert found.detection["far"]["RGPR, variance"]["auroc"] > 0.9
    labels = rgpr.RGPR(mlp(64, 4), likelihood="multilabel").fit([x], progress=False)
    found = rgpr.evaluate(labels, (x, (torch.rand(300, 4) > 0.5).long()))
    assert 0.3 < found.answers["RGPR"]["accuracy"] < 0.7
    ensemble = rgpr.RGPR([mlp(64, 3), mlp(64, 3)]).fit([x], progress=False)
    found = rgpr.evaluate(ensemble, (x, torch.arange(300) % 3))
    assert list(found.answers) == ["network", "base", "RGPR"]


@given(st.integers(0, 10_000), st.integers(1, 60))
def test_risk_and_coverage_by_hand(seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    c = torch.rand(count, generator=generator, dtype=torch.float64)
    right = torch.rand(count, generator=generator) > 0.3
    wrong = (~right[(-c).argsort()]).double().cumsum(0) / torch.arange(1, count + 1)
    torch.testing.assert_close(metrics.risk_coverage(c, right), wrong)
    assert metrics.aurc(c, right) == pytest.approx(float(wrong.mean()))
    tied = metrics.risk_coverage(torch.ones(count), right)  # nothing is told apart
    torch.testing.assert_close(tied, (~right).double().mean().expand(count))
    gap = abs(float((right.double() - c).mean()))
    assert metrics.adaptive_ece(c, right, bins=1) == pytest.approx(gap)
    rows = metrics.reliability(c, right)
    assert rows[:, 2].sum() == count
    filled = rows[rows[:, 2] > 0]
    two = torch.stack([c, 1 - c], 1)
    if bool((c >= 0.5).all()):
        gaps = ((filled[:, 0] - filled[:, 1]).abs() * filled[:, 2]).sum() / count
        assert metrics.ece(two, (~right).long()) == pytest.approx(float(gaps))


def test_bad_answers_are_refused() -> None:
    c = torch.tensor([0.5, torch.nan])
    with pytest.raises(ValueError, match="a confidence is NaN"):
        metrics.aurc(c, torch.tensor([True, False]))
    with pytest.raises(ValueError, match=r"\(2,\) and right has \(3,\)"):
        metrics.reliability(c, torch.zeros(3))


def test_outliers_go_by_name(model: rgpr.RGPR, data: Pair) -> None:
    for wrong in (data[1], [data[0]]):
        for look in (rgpr.evaluate, rgpr.audit.audit):
            with pytest.raises(TypeError, match=r"expected sets by name.*go with the inputs"):
                look(model, data[0], wrong)
