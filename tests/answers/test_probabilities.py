"""What ``model(x)`` promises: the base's answer at the data, continuous, and 1/C far away."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rgpr
from networks import Task, blobs, convolutional, laplace_over_blobs, mlp
from rgpr.metrics import confidence, ece, nll
from rgpr.posteriors import Ensemble

seeds = st.integers(0, 10**6)


def probit_of_base(model: rgpr.RGPR, x: Tensor) -> Tensor:
    """The base's own probabilities, by the same call without the residual."""
    kept, onset = model.residual.sigma2, model.residual.onset
    model.residual.sigma2 = torch.zeros_like(kept)
    with torch.no_grad():
        answer = model(x)
    model.residual.sigma2, model.residual.onset = kept, onset
    return answer


def random_model(seed: int, classes: int, depth: int) -> tuple[rgpr.RGPR, Tensor]:
    torch.manual_seed(seed)
    x, y = blobs(classes)
    network = mlp(4, classes, hidden=depth)
    for parameter in network.parameters():
        parameter.data *= 3  # large logits, so that a jump would show
    return rgpr.RGPR(network).fit([(x, y)], progress=False), x


@torch.no_grad()
def largest_change(model: rgpr.RGPR, start: Tensor, end: Tensor, steps: int) -> float:
    t = torch.linspace(0, 1, steps + 1, dtype=torch.float64)[:, None]
    p = model((start.double() + t * (end - start).double()).float()).double()
    return float((p[1:] - p[:-1]).abs().max())


@settings(max_examples=12)
@given(seeds, st.integers(2, 5), st.integers(1, 3))
def test_continuous_on_segments_across_decision_boundaries(
    seed: int, classes: int, depth: int
) -> None:
    """A jump keeps its size however small the steps are; a continuous answer's changes vanish."""
    model, x = random_model(seed, classes, depth)
    for i, j in ((0, 1), (1, 2)):
        start, end = 2 * x[i], 2 * x[j]
        coarse, fine = (largest_change(model, start, end, steps) for steps in (500, 16_000))
        assert fine <= max(coarse / 8, 1e-4)


def test_continuous_from_a_three_to_a_nine(digits: Task) -> None:
    """The way on which the answer of version 0.1 jumped from .981/.018 to .004/.996."""
    model = rgpr.RGPR(digits.network).fit(digits.loader())
    model.calibrate([(digits.x[:250], digits.y[:250])])
    threes, nines = (digits.x[digits.y == label] for label in (3, 9))
    for three, nine in zip(threes[:8], nines[:8], strict=True):
        assert largest_change(model, three, nine, 20_000) < 2e-3


@settings(max_examples=40)
@given(seeds, st.integers(2, 6), st.floats(0.1, 1e4))
def test_equal_classes_stay_equal_and_the_order_is_the_bases(
    seed: int, classes: int, factor: float
) -> None:
    model, x = random_model(seed, classes, 2)
    head: Any = model.posterior.network[-1]
    head.weight.data[1], head.bias.data[1] = head.weight.data[0], head.bias.data[0]
    with torch.no_grad():
        p = model(factor * x)
        logits = model.posterior.network(factor * x)
    assert torch.equal(p[:, 0], p[:, 1])
    order = logits.argsort(dim=1, stable=True)
    ordered = p.gather(1, order)
    assert bool((ordered.diff(dim=1) >= 0).all())


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_the_order_is_the_bases_with_unequal_variances(structure: str) -> None:
    la, x, y = laplace_over_blobs("classification", structure)
    model = rgpr.RGPR(la).fit([(x, y)])
    for factor in (1, 3, 30, 1e4):
        base, p = probit_of_base(model, factor * x).double(), model(factor * x).double()
        # Where rounding does not decide.
        apart = base[:, :, None] - base[:, None] > 1e-6
        assert not bool((apart & (p[:, :, None] - p[:, None] < -1e-7)).any())


@settings(max_examples=25)
@given(seeds, st.integers(2, 5), st.integers(1, 3))
def test_below_the_onset_it_is_the_base_bit_by_bit(seed: int, classes: int, depth: int) -> None:
    model, x = random_model(seed, classes, depth)
    with torch.no_grad():
        quiet = model.variance(x) == 0
        assert float(quiet.double().mean()) > 0.9
        expected = model.posterior.network(x).softmax(1)
        assert torch.equal(model(x)[quiet], expected[quiet])
    for link in ("mc", "bridge"):
        generator = torch.Generator().manual_seed(0)
        ours = model(x, link_approx=link, generator=generator)
        model.sigma2, scales = 0.0, model.sigma2
        alone = model(x, link_approx=link, generator=generator.manual_seed(0))
        model.sigma2 = scales
        assert torch.equal(ours[quiet], alone[quiet])


def test_held_out_digits_keep_likelihood_calibration_and_caution(digits: Task) -> None:
    model = rgpr.RGPR(digits.network).fit(digits.loader())
    x, y = digits.x[200:], digits.y[200:]

    def at_data() -> tuple[float, float, float]:
        with torch.no_grad():
            p = model(x).double()
        wrong = p.argmax(1) != y
        return nll(p, y), ece(p, y), float((confidence(p)[wrong] > 0.9).double().mean())

    base_p = probit_of_base(model, x).double()
    wrong = base_p.argmax(1) != y
    base = nll(base_p, y), ece(base_p, y), float((confidence(base_p)[wrong] > 0.9).double().mean())
    fitted = at_data()
    model.calibrate([(digits.x[:200], digits.y[:200])])
    for found in (fitted, at_data()):
        assert found[0] <= base[0] + 0.005
        assert found[1] <= base[1] + 0.005
        assert found[2] <= base[2]


@settings(max_examples=20)
@given(seeds, st.integers(2, 5))
def test_the_variance_sets_in_at_once_and_grows_cubically(seed: int, classes: int) -> None:
    model, x = random_model(seed, classes, 2)
    residual = model.residual
    direction = x[:8]
    with torch.no_grad():
        factors = torch.logspace(0, 3, 300)
        v = torch.stack([model.variance(a * direction) for a in factors])
        R = torch.stack([residual.joint(model._extension().read(a * direction).u) for a in factors])
        assert torch.equal(v > 0, residual.onset < R)
        far = [model.variance(a * direction) for a in (1e5, 1e6)]
    slopes = (far[1] / far[0]).log10()
    torch.testing.assert_close(slopes, torch.full_like(slopes, 3.0), rtol=0, atol=0.01)


class Dead(nn.Module):
    """A network with a layer that never fires on its data, a constant one, and a null space."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.first.weight.data[:, 3] = 0  # the last input is never looked at
        self.dead = nn.Linear(8, 8)
        self.dead.bias.data.fill_(-1e4)
        self.relu = nn.ReLU()
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.first(x))
        return self.last(torch.cat([h, self.relu(self.dead(h))], 1))


def directions() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    alone = torch.zeros(4)
    alone[3] = 1.0
    narrow = mlp(4, 3, width=2, hidden=1)
    null = torch.linalg.svd(narrow[0].weight.detach())[2][-1]
    silent = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    silent[0].bias.data.fill_(-1e3)
    return {
        "random": (mlp(), torch.randn(4)),
        "an input that the network ignores": (Dead(), alone),
        "a layer that is dead at the data": (Dead(), torch.randn(4)),
        "the null space of the first layer": (narrow, null),
        "all units dead": (silent, torch.randn(4)),
    }


@pytest.mark.parametrize("which", list(directions()))
@pytest.mark.parametrize("residual", ["onset", "paper"])
@pytest.mark.parametrize("link", ["probit", "mc", "bridge"])
def test_the_limit_in_every_direction(which: str, residual: str, link: str) -> None:
    network, direction = directions()[which]
    x, y = blobs()
    model = rgpr.RGPR(network, residual=residual).fit([(x, y)])
    with torch.no_grad():
        for alpha in (1e12, 1e20, 1e30):
            p = model((x[:3] + alpha * direction).float(), link_approx=link, n_samples=30)
            assert bool(p.isfinite().all())
            torch.testing.assert_close(p, torch.full_like(p, 1 / 3), rtol=0, atol=0.01)


def test_images_and_laplace_have_the_limit_too() -> None:
    x = torch.rand(64, 2, 8, 8)
    model = rgpr.RGPR(convolutional()).fit([x])
    la, z, y = laplace_over_blobs("classification", "kron")
    with torch.no_grad():
        for wrapped, inputs in ((model, x), (rgpr.RGPR(la).fit([(z, y)]), z)):
            for link in ("probit", "mc", "bridge"):
                p = wrapped(1e15 * inputs, link_approx=link, n_samples=30)
                torch.testing.assert_close(p, torch.full_like(p, 1 / 3), rtol=0, atol=0.01)


def test_zero_scales_are_the_base_exactly(digits: Task) -> None:
    model = rgpr.RGPR(digits.network).fit(digits.loader())
    model.sigma2 = 0.0
    with torch.no_grad():
        for factor in (1, 100):
            expected = digits.network(factor * digits.x).softmax(1)
            assert torch.equal(model(factor * digits.x), expected)
            assert not bool(model.variance(factor * digits.x).any())


def test_a_temperature_is_about_labels_and_not_about_numbers() -> None:
    x = torch.randn(20, 4)
    for likelihood, factor in (("classification", 2.0), ("regression", 1.0)):
        model = rgpr.RGPR(mlp(), likelihood=likelihood).fit(x, progress=False)
        drawn = []
        for temperature in (1.0, 2.0):
            model.temperature = temperature
            drawn.append(model.predictive_samples(x, 3, torch.Generator().manual_seed(0)))
        torch.testing.assert_close(drawn[0], factor * drawn[1])


@pytest.mark.parametrize("residual", ["onset", "paper"])
def test_variances_are_the_diagonal_of_covariances(residual: str) -> None:
    """Near and far away, with the base's variance and the residual's added to it."""
    x = torch.randn(80, 4)
    base = Ensemble([nn.Linear(4, 2), nn.Linear(4, 2)])
    model = rgpr.RGPR(base, likelihood="regression", residual=residual).fit(x, progress=False)
    rows = torch.cat([x[:3], 50 * x[:3]])
    with torch.no_grad():
        mean, covariance = model(rows)
        again, variance = model(rows, diagonal_output=True)
        base_variance = base.eval()(rows).variance
    assert torch.equal(mean, again)
    torch.testing.assert_close(variance, covariance.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(variance, base_variance + model.variance(rows)[:, None])


@pytest.mark.parametrize("residual", ["onset", "paper"])
def test_labels_at_the_limit_are_even(residual: str) -> None:
    x = torch.randn(80, 4)
    model = rgpr.RGPR(nn.Linear(4, 3), likelihood="multilabel", residual=residual)
    model.fit(x, progress=False)
    p = model(torch.cat([x[:1], torch.full((1, 4), torch.inf)]))
    assert p[1].tolist() == [0.5, 0.5, 0.5]
    assert (p[0] != 0.5).all()
