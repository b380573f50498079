from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rgpr.gaussian import DenseGaussian, DiagonalGaussian
from rgpr.predictive import bridge, monte_carlo, probit


def random_gaussian(classes: int, seed: int = 0, spread: float = 1.0) -> DenseGaussian:
    generator = torch.Generator().manual_seed(seed)
    mean = 3 * torch.randn(6, classes, generator=generator, dtype=torch.float64)
    root = spread * torch.randn(6, classes, classes, generator=generator, dtype=torch.float64)
    return DenseGaussian(mean, root @ root.mT / classes)


def test_probit_is_the_papers_formula() -> None:
    gaussian, v = random_gaussian(4), torch.rand(6).double()
    variance = gaussian.covariance + v[:, None, None] * torch.eye(4)
    expected = torch.empty(6, 4, dtype=torch.float64)
    for b in range(6):
        kappa = [1 / math.sqrt(1 + math.pi / 8 * variance[b, i, i]) for i in range(4)]
        weights = [math.exp(gaussian.mean[b, i] * kappa[i]) for i in range(4)]
        expected[b] = torch.tensor(weights) / sum(weights)
    torch.testing.assert_close(probit(gaussian, v), expected, rtol=1e-6, atol=1e-9)


def test_probit_of_a_point_is_its_softmax_bit_by_bit() -> None:
    mean = torch.randn(6, 4)
    gaussian = DiagonalGaussian(mean, torch.zeros(()))
    assert torch.equal(probit(gaussian, torch.zeros(6).double()), mean.softmax(-1))


def test_monte_carlo_is_the_mean_of_softmaxes() -> None:
    samples = torch.randn(7, 5, 3)
    torch.testing.assert_close(monte_carlo(samples), samples.softmax(-1).mean(0))


def laplace_torch_bridge(gaussian: DenseGaussian, v: Tensor, normalise: bool) -> Tensor:
    """The formula as laplace-torch writes it, covariance matrices and all."""
    mean, K = gaussian.mean.clone(), gaussian.mean.shape[1]
    f_var = gaussian.covariance + v[:, None, None] * torch.eye(K)
    mean -= f_var.sum(-1) * mean.sum(-1)[:, None] / f_var.sum((1, 2))[:, None]
    f_var = (
        f_var
        - torch.einsum("bi,bj->bij", f_var.sum(-1), f_var.sum(-2))
        / f_var.sum((1, 2))[:, None, None]
    )
    diagonal = f_var.diagonal(dim1=1, dim2=2)
    if normalise:
        scale = diagonal.mean(1) / math.sqrt(K / 2)
        mean, diagonal = mean / scale.sqrt()[:, None], diagonal / scale[:, None]
    alpha = (1 - 2 / K + mean.exp() / K**2 * (-mean).exp().sum(1)[:, None]) / diagonal
    return alpha / alpha.sum(1)[:, None]


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_bridge_is_laplace_torchs_bridge_for_small_and_bridge_norm_for_large_variance(
    classes: int,
) -> None:
    small, zero = random_gaussian(classes, spread=0.1), torch.zeros(6).double()
    torch.testing.assert_close(bridge(small, zero), laplace_torch_bridge(small, zero, False))
    large, v = random_gaussian(classes, spread=5.0), torch.full((6,), 100.0).double()
    torch.testing.assert_close(bridge(large, v), laplace_torch_bridge(large, v, True))


def test_bridge_far_away_where_laplace_torch_gives_ones() -> None:
    gaussian = DenseGaussian(1e20 * torch.randn(6, 10).double(), torch.zeros(6, 10, 10))
    p = bridge(gaussian, torch.full((6,), 1e60, dtype=torch.float64))
    torch.testing.assert_close(p, torch.full((6, 10), 0.1).double(), rtol=1e-6, atol=0)


def test_bridge_of_a_covariance_that_the_projection_takes_away() -> None:
    """All logits shift together: no uncertainty about the class at all."""
    covariance = torch.rand(6, 1, 1).double().expand(6, 3, 3)
    p = bridge(DenseGaussian(torch.randn(6, 3).double(), covariance), torch.zeros(6).double())
    assert p.isfinite().all()
    torch.testing.assert_close(p.sum(1), torch.ones(6).double())


def test_bridge_without_variance_is_the_softmax() -> None:
    mean = torch.randn(6, 4)
    gaussian = DiagonalGaussian(mean, torch.zeros(()))
    torch.testing.assert_close(bridge(gaussian, torch.zeros(6).double()), mean.softmax(-1))


@pytest.mark.parametrize("link", [probit, bridge])
def test_one_output_means_two_classes(link) -> None:  # type: ignore[no-untyped-def]
    mean, v = torch.linspace(-4, 4, 9)[:, None], torch.linspace(0.1, 8, 9).double()
    p = link(DiagonalGaussian(mean, torch.ones(())), v)
    assert p.shape == (9, 2)
    torch.testing.assert_close(p.sum(1), torch.ones(9))
    # Positive outputs speak for class 1, in proportion; zero for neither.
    assert torch.equal(p[:, 1] > 0.5, mean[:, 0] > 0)
    torch.testing.assert_close(p[4], torch.tensor([0.5, 0.5]))
    # Mirror images.
    torch.testing.assert_close(link(DiagonalGaussian(-mean, torch.ones(())), v), p.flip(1))
    samples = monte_carlo(mean.double() + 3 * torch.randn(20_000, 9, 1).double())
    assert samples.shape == (9, 2)
    assert torch.equal(samples[:4, 1] < 0.5, torch.ones(4, dtype=torch.bool))


@given(st.integers(2, 12), st.integers(0, 1000), st.sampled_from([0.01, 1.0, 30.0]))
def test_all_links_give_distributions_and_are_exact_together_for_equal_means(
    classes: int, seed: int, spread: float
) -> None:
    gaussian = random_gaussian(classes, seed, spread)
    v = torch.rand(6).double()
    for p in (probit(gaussian, v), bridge(gaussian, v), monte_carlo(gaussian.sample(10))):
        assert (p >= 0).all()
        torch.testing.assert_close(p.sum(1), torch.ones(6).double())
    flat = DiagonalGaussian(torch.zeros(6, classes).double(), torch.full((), spread).double())
    for p in (probit(flat, v), bridge(flat, v)):
        torch.testing.assert_close(p, torch.full((6, classes), 1 / classes).double())


def test_probit_and_monte_carlo_agree_for_two_classes() -> None:
    """For one output the probit is known to be within 0.02 of the integral."""
    mean = torch.linspace(-3, 3, 7)[:, None].double()
    gaussian = DiagonalGaussian(mean, torch.tensor(4.0))
    sampled = monte_carlo(gaussian.sample(200_000, torch.Generator().manual_seed(0)))
    torch.testing.assert_close(probit(gaussian, torch.zeros(7)), sampled, atol=0.02, rtol=0)
