"""How calibrating chooses: the parts of the rules, each by itself."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import rgpr
from rgpr.answers.calibration import calibrate, held_out
from rgpr.answers.conformal import check_level
from rgpr.answers.examples import Examples
from rgpr.answers.onset import _between, _NumberLosses, _onset_and_slope
from rgpr.answers.probabilities import check_link
from rgpr.likelihoods import likelihood_named
from rgpr.residual.coordinates import Standardizer
from rgpr.residual.variance import Residual

ONES = torch.ones(1)


def test_slopes_go_from_the_largest_to_the_smallest_by_equal_factors() -> None:
    slopes = _between(12.0, 0.75)
    assert slopes[0] == pytest.approx(12)
    assert slopes[-1] == pytest.approx(0.75)
    factors = [b / a for a, b in itertools.pairwise(slopes)]
    assert factors == pytest.approx([factors[0]] * len(factors))


@pytest.mark.parametrize("kappa", [1.0, 50.0])
def test_where_the_cost_is_no_number_nothing_is_paid(kappa: float) -> None:
    """The variance sets in beyond every example, and is not weaker than it was."""
    R = torch.linspace(0, 10, 1000).double()
    q, c = _onset_and_slope(R, kappa, lambda beyond: beyond * math.nan, 0.01)
    assert q == max(kappa, 10)
    assert c * (2 * q - q) >= (2 * q - kappa) * (1 - 1e-12)  # at twice the onset


def test_one_example_shows_nothing() -> None:
    R = torch.tensor([5.0]).double()
    assert _onset_and_slope(R, 1.0, lambda beyond: 1e3 * beyond, 0.01) == (1.0, 1.0)


def overconfident(rows: int) -> tuple[rgpr.RGPR, Tensor, Tensor]:
    """A network that is sure of everything and wrong about a third of it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 2, generator=generator)
    network = nn.Linear(2, 2)
    network.weight.data, network.bias.data = 20 * torch.eye(2), torch.zeros(2)
    y = network(x).argmax(1)
    y[::3] = 1 - y[::3]
    model = rgpr.RGPR(network, layers="input").fit(torch.randn(200, 2), progress=False)
    return model, x, y


@pytest.mark.parametrize(("rows", "warmer"), [(99, False), (100, True)])
@pytest.mark.filterwarnings("ignore:only")
def test_a_temperature_takes_a_hundred_labels(rows: int, warmer: bool) -> None:
    model, x, y = overconfident(rows)
    model.calibrate(x, y, progress=False)
    assert (float(model.temperature) > 1) == warmer


def test_the_temperature_is_that_of_the_base_alone() -> None:
    """What the residual adds is chosen afterwards, and must not be paid for twice."""
    found = []
    for factor in (1.0, 1e4):
        model, x, y = overconfident(300)
        model.sigma2 = factor * model.sigma2
        model.calibrate(3 * x, y, progress=False)
        found.append(float(model.temperature))
    assert found[0] == found[1] > 1


def test_inputs_that_overflow_the_network_are_references_too() -> None:
    model, x, y = overconfident(150)
    x[7] = 3e38
    report = model.calibrate(x, y, progress=False)
    assert report.examples == 150
    assert float(model.p_value(x[7:8])) == pytest.approx(2 / 151)


def test_a_model_that_does_not_know_what_it_was_fitted_on() -> None:
    model, x, y = overconfident(150)
    with torch.no_grad():
        shard = held_out(model._extension(), None, False)
        calibrated, _ = calibrate(shard, [(x, y)], None, max_nll_increase=0.01)
    assert len(calibrated.references) == 150


def test_the_report_tells_which_share_has_no_variance() -> None:
    model, x, y = overconfident(1200)
    before = float((model.variance(x) == 0).double().mean())
    report = model.calibrate(x, y, progress=False)
    after = float((model.variance(x) == 0).double().mean())
    assert report.onset == pytest.approx((before, after))
    assert before != after
    paper = rgpr.RGPR(nn.Linear(2, 2), residual="paper").fit(3 * x[:50], progress=False)
    assert paper.calibrate(x, y, progress=False).onset is None


def test_of_several_labels_all_count() -> None:
    network = nn.Linear(2, 3)
    x, y = torch.randn(150, 2), torch.randint(0, 2, (150, 3)).float()
    model = rgpr.RGPR(network, likelihood="multilabel", layers="input")
    model.fit(torch.randn(100, 2), progress=False)
    report = model.calibrate(x, y, progress=False)
    each = nn.functional.binary_cross_entropy_with_logits(network(x), y, reduction="none")
    assert report.nll is not None
    assert report.nll[0] == pytest.approx(float(each.detach().sum(1).mean()), rel=1e-5)
    assert model._label_scores is not None
    assert len(model._label_scores) == 150
    assert model(x, link_approx="mc", n_samples=4).shape == (150, 3)


def test_the_noise_that_fits_a_regression() -> None:
    """All of the error without a variance of the base, and next to none beside a large one."""
    error, residual = torch.randn(500, 1).double(), Residual([Standardizer(ONES, ONES)])
    for variance, expected in ((0.0, 1.0), (100.0, 1e-4)):
        second = torch.full_like(error, variance)
        examples = Examples(error.square(), 0 * error, second, error, 500)
        noise = _NumberLosses(examples, residual)._noise
        assert float(noise / error.square().mean()) == pytest.approx(expected, rel=1e-6)


def test_training_inputs_among_more_inputs_than_were_trained_on_are_noticed() -> None:
    train = torch.randn(40, 2)
    model = rgpr.RGPR(nn.Linear(2, 2), layers="input").fit(train, progress=False)
    mixed = torch.cat([train[:25], torch.randn(75, 2)])
    with pytest.warns(UserWarning, match="at least 25 of these 100 inputs are training inputs"):
        model.calibrate(mixed, progress=False)


def test_a_regression_may_have_targets_that_are_all_the_same() -> None:
    model = rgpr.RGPR(nn.Linear(2, 1), likelihood="regression", layers="input")
    model.fit(torch.randn(100, 2), progress=False)
    report = model.calibrate(torch.randn(50, 2), torch.ones(50, 1), progress=False)
    assert report.warnings == []


class Breaking(nn.Linear):
    """Gives no numbers beyond a hundred, and infinite ones where its weights overflow."""

    def forward(self, x: Tensor) -> Tensor:
        middling = (x.abs() > 100).any(1, keepdim=True) & (x.abs() < 1e5).all(1, keepdim=True)
        return torch.where(middling, torch.nan, super().forward(x))


def test_a_broken_network_is_shown_and_an_overflow_far_away_is_the_limit() -> None:
    network = Breaking(2, 3)
    network.weight.data *= 1e32
    model = rgpr.RGPR(network, layers="input").fit(torch.randn(100, 2), progress=False)
    x = torch.tensor([[300.0, 300.0], [1e8, 1e8], [math.inf, 0.0], [1e8, math.nan]])
    with torch.no_grad():
        assert not network(x[1:2]).isfinite().all()
        p, score = model(x), model.score(x)
    assert p[0].isnan().all()  # broken, and not far enough away to be excused
    assert torch.equal(p[1:3], torch.full((2, 3), 1 / 3))
    assert p[3].isnan().all()
    assert score[1:3].tolist() == [math.inf] * 2


@pytest.mark.parametrize("level", [-0.1, 0.0, 1.0, 1.5, math.nan])
def test_a_level_is_a_share(level: float) -> None:
    with pytest.raises(ValueError, match=r"alpha = .* must lie between 0 and 1"):
        check_level("alpha", level, torch.zeros(1000))


def test_links_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"link_approx='bridge' is for classes of which one"):
        check_link("bridge", likelihood_named("multilabel"))
    with pytest.raises(ValueError, match=r"link_approx='bridge' is not one of 'probit', 'mc'"):
        check_link("bridge", likelihood_named("classification"), diagonal=True)
    with pytest.raises(ValueError, match=r"'odd' is not one of 'bridge', 'probit', 'mc'"):
        check_link("odd", likelihood_named("classification"))
    for name in ("probit", "mc"):
        check_link(name, likelihood_named("multilabel"), diagonal=True)
