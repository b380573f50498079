"""A calibration that keeps the ranking, and the adaptive residual that ends with it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import rgpr
from networks import Task, mlp
from rgpr import noise
from rgpr.metrics import accuracy, confidence, ece
from rgpr.predictive import calibrated, evidence
from rgpr.tuning.calibration import fit_calibration

pytestmark = pytest.mark.filterwarnings("ignore:sigma2")


def random_probabilities(n: int, classes: int, seed: int, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(n, classes, generator=generator).double()).softmax(1)


@given(
    st.integers(2, 12),
    st.integers(0, 10**6),
    st.floats(0.01, 100),
    st.floats(0.01, 30),
)
def test_it_is_a_distribution_with_the_bases_class_and_the_variances_ranking(
    classes: int, seed: int, stretch: float, scale: float
) -> None:
    p = random_probabilities(40, classes, seed, scale)
    base = random_probabilities(40, classes, seed + 1)
    q = calibrated(p, base, stretch)
    torch.testing.assert_close(q.sum(1), torch.ones(40).double())
    assert (q >= 0).all()
    assert q.amax(1).min() >= 1 / classes - 1e-12
    top = q.amax(1)
    assert torch.equal(q.gather(1, base.argmax(1, keepdim=True))[:, 0], top)
    order = evidence(p).argsort()
    assert (top[order].diff() >= -1e-12).all()


def test_evidence_by_hand_and_far_beyond_rounding() -> None:
    p = torch.tensor([[0.7, 0.2, 0.1], [1 / 3, 1 / 3, 1 / 3]]).double()
    expected = [math.log(0.7 / 0.3) + math.log(2), 0.0]
    assert evidence(p).tolist() == pytest.approx(expected, abs=1e-6)
    sure = torch.tensor([[400.0, 0.0, 0.0], [300.0, 0.0, 0.0]]).double().softmax(1)
    assert evidence(sure).tolist() == pytest.approx([400, 300], rel=1e-9)
    assert evidence(torch.tensor([[1.0, 0.0]]).double()).isfinite().all()


def test_the_identity_is_the_identity() -> None:
    p = random_probabilities(30, 5, 0)
    torch.testing.assert_close(calibrated(p, p, 1.0), p)


def test_the_fit_is_the_best_of_a_grid() -> None:
    """Right answers with known odds: no point of a grid explains them better."""
    p = random_probabilities(5000, 4, 1)
    o = evidence(p)
    chance = torch.sigmoid(0.6 * o - math.log(3))
    right = torch.rand(5000, generator=torch.Generator().manual_seed(0)).double() < chance
    target = torch.where(right, p.argmax(1), (p.argmax(1) + 1) % 4)

    def value(stretch: float) -> float:
        g = torch.sigmoid(stretch * o - math.log(3))
        return float(torch.where(right, g, 1 - g).log().mean())

    stretch = float(fit_calibration(p, p, target))
    assert stretch == pytest.approx(0.6, abs=0.05)
    assert value(stretch) >= max(value(i / 100) for i in range(1, 300)) - 1e-5


def test_all_right_is_not_certainty() -> None:
    """With nothing but right answers the best fit without smoothing would be infinite."""
    p = random_probabilities(250, 10, 1)
    stretch = float(fit_calibration(p, p, p.argmax(1)))
    q = calibrated(p, p, stretch)
    assert q.amax(1).median() < 0.9999
    weak = torch.full((1, 10), 0.1).double()
    weak[0, 0] = 0.12
    weak = weak / weak.sum()
    assert calibrated(weak, weak, stretch).max() < 0.6


@pytest.mark.parametrize("n_samples", [1, 2, 10, 100, 101])
def test_guesses_are_no_evidence(n_samples: int) -> None:
    """The most uneven that a mean of one-hot samples, each class in turn, can be."""
    most = math.ceil(n_samples / 3)
    rest = (n_samples - most) / 2
    p = torch.tensor([[most, rest, rest]]).double() / n_samples
    assert float(evidence(p, n_samples)) == pytest.approx(0, abs=1e-12)
    assert n_samples % 3 == 0 or float(evidence(p)) > 0


@pytest.fixture
def model(digits: Task) -> rgpr.RGPR:
    return rgpr.RGPR(digits.network).fit(digits.loader())


@pytest.fixture
def validation(digits: Task) -> DataLoader:
    return DataLoader(TensorDataset(digits.x[:250], digits.y[:250]), batch_size=64)


@pytest.mark.parametrize("link", ["probit", "mc"])
def test_adaptive_on_digits(
    model: rgpr.RGPR, digits: Task, validation: DataLoader, link: str
) -> None:
    x, y = digits.x[250:], digits.y[250:]
    options = {"link_approx": link, "n_samples": 200}
    strange = {
        "uniform": noise.uniform(x, generator=torch.Generator().manual_seed(1)),
        "permuted": noise.permuted(x, scale=(1, 1), generator=torch.Generator().manual_seed(2)),
        "ten times": 10 * x,
    }

    @torch.no_grad()
    def predict(x: Tensor) -> Tensor:
        return model(x, generator=torch.Generator().manual_seed(0), **options)

    model.sigma2 = 0.0
    before = predict(x)
    confident = {name: confidence(predict(z)).mean() for name, z in strange.items()}
    result = model.tune(validation)
    assert result.objective == "ood"
    assert result.calibration is not None
    assert 0 < result.ood_weight <= 32
    p = predict(x)
    # The same classes win, as well calibrated as before, and less is claimed about the strange.
    assert accuracy(p, y) >= accuracy(before, y) - (0.02 if link == "mc" else 0)
    assert ece(p, y) <= ece(before, y) + (0.02 if link == "probit" else 0.04)
    for name, z in strange.items():
        assert confidence(predict(z)).mean() < confident[name] - 0.1, name
    far = predict(1e12 * x)
    assert (far.amax(1) - 0.1).abs().max() < 0.01


def test_the_budget_holds_through_the_calibration(
    model: rgpr.RGPR, digits: Task, validation: DataLoader
) -> None:
    model.sigma2 = 0.0
    x, y = digits.x[:250], digits.y[:250]
    with torch.no_grad():
        base = ece(model(x), y)
    result = model.tune(validation)
    with torch.no_grad():
        assert ece(model(x), y) <= base + 0.005 + 1e-6
    assert result.metrics["validation ECE"][1] <= base + 0.005
    plain = model.tune(validation, calibrate=False)
    assert plain.calibration is None
    assert model.calibration is None
    assert plain.ood_weight < 32  # without the calibration the budget allows far less


def test_what_was_fitted_to_other_predictions_is_dropped(
    model: rgpr.RGPR, validation: DataLoader, digits: Task
) -> None:
    changes = {
        "sigma2": lambda: setattr(model, "sigma2", 0.5),
        "temperature": lambda: setattr(model, "temperature", 2.0),
        "tune": lambda: model.tune(validation, calibrate=False),
        "fit": lambda: model.fit(digits.loader()),
    }
    for name, change in changes.items():
        model.tune(validation)
        model.set_threshold(validation, progress=False)
        assert model.calibration is not None
        change()
        assert model.calibration is None, name
        with pytest.raises(RuntimeError, match="set_threshold"):
            model.flag(digits.x)
    assert float(model.temperature) == 1
    model.sigma2 = 0.0
    x = torch.rand(5, 64)
    torch.testing.assert_close(model(x), model.posterior.network(x).softmax(1))


def test_it_travels_in_a_state_dict(model: rgpr.RGPR, digits: Task, validation: DataLoader) -> None:
    model.tune(validation)
    model.set_threshold(validation, progress=False)
    fresh = rgpr.RGPR(digits.network).fit(digits.loader())
    before = {name: t.clone() for name, t in fresh.state_dict().items()}
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(digits.x), model(digits.x))
    assert torch.equal(fresh.flag(2 * digits.x), model.flag(2 * digits.x))
    fresh.load_state_dict(before)
    assert fresh.calibration is None
    for bad in (0.0, -1.0, float("inf")):
        with pytest.raises(ValueError, match="calibration"):
            fresh.calibration = bad


@pytest.mark.parametrize("n_samples", [7, 25, 100])
def test_tuned_monte_carlo_goes_to_the_limit_too(
    model: rgpr.RGPR, digits: Task, validation: DataLoader, n_samples: int
) -> None:
    """Also where the classes do not divide the samples."""
    for link in ("probit", "mc"):
        model.tune(validation, link_approx=link)
        p = model(1e13 * digits.x, link_approx="mc", n_samples=n_samples)
        torch.testing.assert_close(p, torch.full_like(p, 0.1), atol=2e-3, rtol=0)


def test_validation_data_without_an_error(model: rgpr.RGPR, digits: Task) -> None:
    """Nothing but right answers must not make it certain of noise."""
    with torch.no_grad():
        right = digits.network(digits.x).argmax(1) == digits.y
    noisy = noise.uniform(digits.x, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        bare = digits.network(noisy).softmax(1).amax(1).mean()
        model.tune([(digits.x[right], digits.y[right])])
        tuned = model(noisy).amax(1)
        known = model(digits.x).amax(1)
    assert tuned.mean() < 0.2 < bare
    assert (known == 1).float().mean() < 0.3  # 1 - 6e-8 is the last number below it


def test_it_is_saved(
    model: rgpr.RGPR, digits: Task, validation: DataLoader, tmp_path: Path
) -> None:
    model.tune(validation)
    model.save(tmp_path / "m")
    again = rgpr.load(tmp_path / "m", mlp(64, 10, width=64))
    assert torch.equal(again(digits.x), model(digits.x))
    assert again.recipe == model.recipe


def test_shares_are_held_together(model: rgpr.RGPR, validation: DataLoader) -> None:
    """What the recipe ties: the mean contributions of the layers at the data."""
    tied = model.tune(validation)
    typical = [tied.share[layer][0] for layer in model.layers]
    hidden = sorted(typical[1:])
    assert hidden[-1] < 50 * hidden[0]
    assert typical[0] > 0


def test_adaptive_regression_uses_the_likelihood() -> None:
    x = torch.randn(80, 4)
    y = x[:, :2] + 0.1 * torch.randn(80, 2)
    model = rgpr.RGPR(mlp(4, 2), likelihood="regression").fit([(x, y)])
    result = model.tune([(x, y)])
    assert result.objective == "likelihood"
    with pytest.raises(ValueError, match="is a regression"):
        model.tune([(x, y)], "ood", calibrate=True)
    again = model.tune([(x, y)], "ood")
    assert again.objective == "ood"
    assert again.after >= again.before
