"""``model.calibrate``: its two rules, what it sets, and what it says about bad data."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import rgpr
from networks import Task, blobs, laplace_over_blobs, mlp
from rgpr.answers.calibration import Calibration
from rgpr.answers.onset import _onset_and_slope
from rgpr.metrics import confidence, nll
from rgpr.saving.export import onnx


@pytest.fixture
def model(digits: Task) -> rgpr.RGPR:
    return rgpr.RGPR(digits.network).fit(digits.loader())


def noisy_digits(digits: Task, n: int) -> tuple[Tensor, Tensor]:
    """More held-out data than there are: with a little noise, some of it three times as far."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(len(digits.x), (n,), generator=generator)
    x = digits.x[rows] + 0.05 * torch.randn(n, 64, generator=generator)
    return x, digits.y[rows]


@pytest.mark.parametrize("n", [50, 300, 1500])
@pytest.mark.parametrize("budget", [0.0, 0.005, 0.1])
def test_not_weaker_and_within_the_budget(
    model: rgpr.RGPR, digits: Task, n: int, budget: float
) -> None:
    x, y = noisy_digits(digits, n)
    base = nll(digits.network(x).softmax(1), y)
    inputs = torch.cat([a * digits.x for a in (1, 1.5, 2, 4, 10, 100, 1e4)])
    with torch.no_grad():
        before, seen = model.variance(inputs), model._extension().read(inputs).u
        sharp = confidence(model(inputs))
    found = model.calibrate([(x, y)], max_nll_increase=budget)
    with torch.no_grad():
        after, spent = model.variance(inputs), nll(model(x), y) - base
        far = model.residual.joint(seen) >= 2 * model.residual.onset
        assert bool((after[far] >= before[far] * (1 - 1e-9)).all())
        assert bool(far.any())
        assert bool((confidence(model(inputs))[far] <= sharp[far] + 1e-6).all())
    assert found.nll is not None
    # Few examples show nothing about a small excess; then all stays as it was.
    assert spent <= budget + 1e-6 or (n < 1000 and found.nll[2] <= found.nll[1] + 1e-9)
    assert found.nll[2] - found.nll[0] == pytest.approx(spent, abs=1e-5)
    assert float(model.temperature) >= 1


def test_the_rules_of_onset_and_slope_by_hand() -> None:
    R = torch.linspace(0, 10, 2001, dtype=torch.float64)
    few = R[::10]

    def free(beyond: Tensor) -> Tensor:
        return torch.zeros_like(beyond)

    q, c = _onset_and_slope(R, 5.0, free, 0.1)
    assert (q, c) == (5.0, pytest.approx(6 / 5))  # not later, and as steep as may be
    q, c = _onset_and_slope(R, 20.0, free, 0.1)
    assert (q, c) == (pytest.approx(9.5), 1.0)  # earlier and not flatter: stronger everywhere
    q, c = _onset_and_slope(R, 5.0, torch.sign, 0.0301)  # any variance costs one
    assert (q, c) == (pytest.approx(9.7), pytest.approx(2 - 5 / 9.7))  # later, so steeper
    q, c = _onset_and_slope(R, 5.0, torch.sign, 0.0)
    assert (q, c) == (10.0, 1.5)
    assert _onset_and_slope(few, 5.0, free, 0.1) == (5.0, 1.0)
    # One of 202 examples shows nothing, so the onset does not follow it far; but a little it may.
    one_far = torch.cat([few / 3, few.new_tensor([100.0])])
    assert _onset_and_slope(one_far, 5.0, torch.sign, 0.0) == (5.0, 1.0)
    assert _onset_and_slope(one_far, 60.0, torch.sign, 0.0) == (100.0, pytest.approx(1.4))
    q, c = _onset_and_slope(few, 5.0, torch.sign, 0.0)
    assert (q, c) == (10.0, 1.5)
    # Twice as far out as the onset, and further, the new variance is not below the old one.
    beyond = torch.linspace(2 * q, 100, 50, dtype=torch.float64)
    assert bool((c * (beyond - q) >= beyond - 5.0).all())


def test_calibrating_again_starts_anew(model: rgpr.RGPR, digits: Task) -> None:
    data = [noisy_digits(digits, 1200)]
    model.calibrate(data)
    first = (model.sigma2.clone(), model.residual.onset.clone(), model.temperature.clone())
    sets = model.predict_set(digits.x)
    model.calibrate(data)
    assert all(
        torch.equal(a, b)
        for a, b in zip(first, (model.sigma2, model.residual.onset, model.temperature), strict=True)
    )
    assert torch.equal(model.predict_set(digits.x), sets)


def test_overconfidence_is_taken_back_and_underconfidence_is_not_sharpened(digits: Task) -> None:
    x, y = noisy_digits(digits, 800)
    for factor, warmer in ((4.0, True), (0.2, False)):
        network = mlp(64, 10, width=64)
        network.load_state_dict(digits.network.state_dict())
        network[-1].weight.data *= factor
        network[-1].bias.data *= factor
        model = rgpr.RGPR(network.eval()).fit(digits.loader())
        model.calibrate([(x, y)])
        assert (float(model.temperature) > 1.5) == warmer
        assert float(model.temperature) >= 1


def test_labels_are_optional(model: rgpr.RGPR, digits: Task) -> None:
    before = model.sigma2.clone()
    found = model.calibrate([digits.x[:100], digits.x[100:200]])
    assert not found.labelled
    assert torch.equal(model.sigma2, before)
    assert model.p_value(digits.x).shape == (len(digits.x),)
    with pytest.raises(RuntimeError, match="with a loader of \\(x, y\\)"):
        model.predict_set(digits.x)
    with pytest.raises(ValueError, match="batch 1 has targets, unlike those before it"):
        model.calibrate([digits.x[:100], (digits.x[100:200], digits.y[100:200])])


def test_flags_and_sets_on_held_out_digits(model: rgpr.RGPR, digits: Task) -> None:
    model.calibrate([(digits.x[:250], digits.y[:250])])
    x, y = digits.x[250:], digits.y[250:]
    noise = torch.rand(300, 64, generator=torch.Generator().manual_seed(0))
    assert float(model.flag(x).double().mean()) < 0.12
    assert float(model.flag(noise).double().mean()) > 0.95
    both = model.flag(torch.cat([x, noise]), fdr=0.1)
    assert float(both[len(x) :].double().mean()) > 0.9
    assert int(both[: len(x)].sum()) <= 0.2 * int(both.sum())
    for coverage in (0.8, 0.9, 0.99):
        sets = model.predict_set(x, coverage)
        assert bool(sets.any(1).all())
        assert float(sets.gather(1, y[:, None]).double().mean()) >= coverage - 0.05
    far = torch.cat([1e6 * x, torch.full_like(x[:1], torch.inf)])
    assert bool(model.predict_set(far, 0.5).all())
    assert bool(model.flag(torch.full((1, 64), torch.nan)).all())


def test_intervals_cover_and_widen() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3000, 2, generator=generator)
    y = torch.stack([x.sum(1), x[:, 0]], 1) + 0.3 * torch.randn(3000, 2, generator=generator)
    network = mlp(2, 2, hidden=1)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        (network(x[:1000]) - y[:1000]).square().mean().backward()
        optimizer.step()
    model = rgpr.RGPR(network, likelihood="regression").fit([x[:1000]])
    found = model.calibrate([(x[1000:1500], y[1000:1500])])
    assert found.noise == pytest.approx(0.09, rel=0.3)
    for coverage in (0.5, 0.9):
        low, high = model.interval(x[1500:], coverage)
        inside = ((low <= y[1500:]) & (y[1500:] <= high)).all(1)
        assert float(inside.double().mean()) == pytest.approx(coverage, abs=0.07)
    widths = [float((h - low).mean()) for low, h in (model.interval(a * x) for a in (1, 10, 100))]
    assert widths[0] < widths[1] / 3 < widths[2] / 30
    low, high = model.interval(torch.full((1, 2), torch.inf))
    assert bool((low == -torch.inf).all() & (high == torch.inf).all())
    with pytest.raises(ValueError, match=r"use model\.interval"):
        model.predict_set(x)


def test_too_little_data(model: rgpr.RGPR, digits: Task) -> None:
    with pytest.raises(ValueError, match="the loader gave no batch"):
        model.calibrate([])
    with pytest.raises(ValueError, match="only empty batches"):
        model.calibrate([digits.x[:0]])
    for n in (1, 2):
        with pytest.warns(UserWarning, match=f"no p-value is below 1/{n + 1}"):
            found = model.calibrate([(digits.x[:n], digits.y[:n])])
        assert f"calibrated on {n} labelled" in str(found)
        assert float(model.p_value(1e6 * digits.x[:1])[0]) == pytest.approx(1 / (n + 1))
        assert bool(model.predict_set(digits.x).all())  # nothing can be left out yet
    with pytest.raises(ValueError, match=r"alpha = 0\.05 is below 1/3.*at least 19 examples"):
        model.flag(digits.x)


def test_data_that_promise_nothing(model: rgpr.RGPR, digits: Task) -> None:
    one = digits.y == 3
    with pytest.warns(UserWarning, match="all labels are 3"):
        model.calibrate([(digits.x[one], digits.y[one])])
    with pytest.warns(UserWarning, match="are training inputs that fit saw"):
        model.calibrate(digits.loader())
    with pytest.warns(UserWarning, match="are training inputs that fit saw"):
        model.calibrate([tuple(t[:300] for t in digits.train.tensors)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.calibrate([(digits.x, digits.y)])


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.full((50,), 10), "label 10 .* 10 classes, 0 to 9"),
        (torch.full((50,), 0.5), "such as 0.5.*likelihood='regression'"),
        (torch.zeros(49, dtype=torch.long), r"targets of shape \(49,\) for 50 inputs"),
    ],
)
def test_labels_that_do_not_fit(model: rgpr.RGPR, digits: Task, y: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.calibrate([(digits.x[:50], y)])
    assert model._references is None


def test_shares_and_order_of_calls(model: rgpr.RGPR, digits: Task) -> None:
    for call in (model.p_value, model.flag):
        with pytest.raises(RuntimeError, match=r"call model\.calibrate\(val_loader\) first"):
            call(digits.x)
    with pytest.raises(RuntimeError, match="was not fitted"):
        rgpr.RGPR(digits.network).calibrate([digits.x])
    with pytest.raises(ValueError, match="must not be negative"):
        model.calibrate([digits.x], max_nll_increase=-1)
    model.calibrate([(digits.x, digits.y)])
    for options in ({"alpha": 0.0}, {"alpha": 1.5}, {"fdr": 0.0}):
        with pytest.raises(ValueError, match="must lie between 0 and 1"):
            model.flag(digits.x, **options)
    with pytest.raises(ValueError, match=r"coverage = 1\.0 must lie"):
        model.predict_set(digits.x, 1.0)
    for wrong in ({"alpha": 7.0}, {"coverage": 5.0}):
        with pytest.raises(ValueError, match="must lie between 0 and 1"):
            rgpr.RGPR(digits.network).fit(digits.loader()).predict(digits.x, **wrong)
    with pytest.raises(ValueError, match="use predict_set"):
        model.interval(digits.x)
    before = model.predict_set(digits.x)
    model.sigma2 = model.sigma2.tolist()
    assert torch.equal(model.predict_set(digits.x), before)
    model.sigma2 *= 2
    assert model.p_value(digits.x).shape == (len(digits.x),)  # the score does not depend on it
    with pytest.raises(RuntimeError, match="its sigma2 or temperature was set afterwards"):
        model.predict_set(digits.x)


def test_the_papers_residual_can_be_calibrated_too(digits: Task) -> None:
    model = rgpr.RGPR(digits.network, residual="paper").fit(digits.loader())
    found = model.calibrate([(digits.x[:250], digits.y[:250])])
    assert found.onset is None
    assert bool(model.flag(1 - digits.x).any())
    assert bool(model.predict_set(digits.x).any(1).all())


def test_many_references_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rgpr.answers.conformal.MOST_REFERENCES", 500)
    x, y = blobs(n=300)
    model = rgpr.RGPR(mlp()).fit([(x, y)])
    held_out = blobs(n=5000)
    found = model.calibrate([held_out])
    assert (found.examples, found.seen) == (500, 5000)
    exact = rgpr.RGPR(mlp()).fit([(x, y)])
    exact.posterior.network.load_state_dict(model.posterior.network.state_dict())
    exact.fit([(x, y)])
    monkeypatch.setattr("rgpr.answers.conformal.MOST_REFERENCES", 10_000)
    exact.calibrate([held_out])
    difference = (model.p_value(held_out[0]) - exact.p_value(held_out[0])).abs().max()
    # Dvoretzky, Kiefer and Wolfowitz for 500 of them, with a probability of 1 - 1e-4.
    assert float(difference) < math.sqrt(math.log(2e4) / 1000)


def test_exported_with_score_and_p_value(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    la, x, y = laplace_over_blobs("classification", "kron")
    model = rgpr.RGPR(la).fit([(x, y)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.calibrate([blobs(n=90)])
    session = runtime.InferenceSession(onnx(model, tmp_path / "m.onnx", x[:2]))
    assert [o.name for o in session.get_outputs()] == ["probabilities", "score", "p_value"]
    inputs = torch.cat([x, 30 * x, 1e6 * x])
    p, score, p_value = session.run(None, {"x": inputs.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(p, model(inputs).numpy(), atol=2e-6)
        np.testing.assert_allclose(score, model.score(inputs).numpy(), rtol=1e-5, atol=1e-5)
        # A score may cross one reference by rounding.
        np.testing.assert_allclose(p_value, model.p_value(inputs).numpy(), atol=1.01 / 91)


def test_labels_in_another_order_are_noticed() -> None:
    """A network that is sure, and right as often as by chance, is told of."""
    torch.manual_seed(0)
    network = torch.nn.Linear(3, 3)
    with torch.no_grad():
        network.weight.copy_(20 * torch.eye(3))
    x = torch.randn(600, 3)
    y = network(x).argmax(1)
    model = rgpr.RGPR(network).fit([torch.randn(300, 3)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.calibrate([(x, y)])
    with pytest.warns(UserWarning, match=r"of the labels agree with .* by chance 33\.3% would"):
        model.calibrate([(x, y[torch.randperm(600)])])


def test_the_printout_says_what_the_numbers_mean() -> None:
    report = Calibration(500, 500, True, (1.0, 1.0), (0.98, 0.95), 1.0)
    assert "the answers of 95.0% of these examples, of 98.0% before" in str(report)
    assert "variance that grows as steeply with the distance as after fit" in str(report)
    steeper = replace(report, slope=2.5)
    assert "grows 2.5 times as steeply with the distance as after fit" in str(steeper)
