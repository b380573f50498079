from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from networks import mlp
from rgpr import RGPR, Posterior
from rgpr.posteriors.gaussian import (
    DenseGaussian,
    DiagonalGaussian,
    EmpiricalGaussian,
    Gaussian,
    ScaledGaussian,
)


def gaussians() -> list[Gaussian]:
    mean = torch.randn(4, 3)
    root = torch.randn(4, 3, 3, dtype=torch.float64)
    root[0, :, 1:] = 0  # of rank one
    return [DiagonalGaussian(mean, torch.rand(4, 3)), DenseGaussian(mean, root @ root.mT)]


@pytest.mark.parametrize("index", [0, 1])
def test_all_views_agree_with_the_covariance(index: int) -> None:
    gaussian = gaussians()[index]
    covariance = gaussian.covariance
    assert covariance.dtype == torch.float64
    torch.testing.assert_close(gaussian.variance, covariance.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(gaussian.row_sums, covariance.sum(-1))
    samples = gaussian.sample(200_000, torch.Generator().manual_seed(1))
    assert samples.shape == (200_000, 4, 3)
    assert samples.dtype == torch.float64
    torch.testing.assert_close(samples.mean(0), gaussian.mean.double(), atol=0.03, rtol=0)
    for b in range(4):
        torch.testing.assert_close(samples[:, b].T.cov(), covariance[b], atol=0.1, rtol=0.02)


@pytest.mark.parametrize("index", [0, 1])
def test_the_generator_decides(index: int) -> None:
    gaussian = gaussians()[index]
    first = gaussian.sample(5, torch.Generator().manual_seed(7))
    assert torch.equal(first, gaussian.sample(5, torch.Generator().manual_seed(7)))
    assert not torch.equal(first, gaussian.sample(5))


def test_a_bad_row_keeps_to_itself() -> None:
    covariance = torch.eye(3).repeat(2, 1, 1)
    covariance[1, 0, 0] = torch.nan
    samples = DenseGaussian(torch.zeros(2, 3), covariance).sample(4)
    assert samples[:, 0].isfinite().all()
    assert samples[:, 1].isnan().all()


def every_kind() -> dict[str, Gaussian]:
    diagonal, dense = gaussians()
    return {
        "diagonal": diagonal,
        "dense": dense,
        "empirical": EmpiricalGaussian(torch.randn(6, 4, 3)),
        "scaled": ScaledGaussian(dense, torch.tensor([0.5])),
    }


@pytest.mark.parametrize("kind", every_kind())
def test_another_mean_is_another_gaussian(kind: str) -> None:
    gaussian = every_kind()[kind]
    before, variance = gaussian.mean.clone(), gaussian.variance.clone()
    moved = gaussian.with_mean(gaussian.mean.double() + 1)
    assert type(moved) is type(gaussian)
    assert torch.equal(gaussian.mean, before)
    assert gaussian.mean.dtype == torch.float32
    assert torch.equal(moved.mean, before.double() + 1)
    assert torch.equal(moved.variance, variance)
    torch.testing.assert_close(moved.covariance, gaussian.covariance)
    draws = [g.noise(3, torch.Generator().manual_seed(0)) for g in (moved, gaussian)]
    assert torch.equal(*draws)


class Cached(Posterior):
    """Answers every call with one and the same object, whose mean is in another dtype."""

    def __init__(self, gaussian: Gaussian) -> None:
        super().__init__(mlp())
        self.gaussian = gaussian

    def forward(self, x: Tensor) -> Gaussian:
        self.point(x)  # the residual reads the network's layers in this pass
        return self.gaussian


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("residual", ["onset", "paper"])
@pytest.mark.parametrize("kind", every_kind())
def test_a_prediction_leaves_the_bases_gaussian_as_it_was(
    kind: str, residual: str, likelihood: str
) -> None:
    gaussian = every_kind()[kind]
    gaussian.mean = gaussian.mean.double()
    before = copy.deepcopy(gaussian)
    x = torch.randn(4, 4)
    model = RGPR(Cached(gaussian), likelihood=likelihood, residual=residual)
    model.fit([x])  # as many rows as the Gaussian has
    for call in (
        lambda: model(x),
        lambda: model(50 * x),
        lambda: model(x, link_approx="bridge"),
        lambda: model(x, link_approx="mc", n_samples=3),
        lambda: model(x, diagonal_output=True),
        lambda: model.score(x),
        lambda: model.explain(x),
        lambda: model.predictive_samples(x, 3),
    ):
        with torch.no_grad():
            call()
        assert model.posterior.gaussian is gaussian
        assert gaussian.mean.dtype == torch.float64
        assert torch.equal(gaussian.mean, before.mean)
        assert torch.equal(gaussian.variance, before.variance)
        assert torch.equal(gaussian.covariance, before.covariance)
    answer = model(x)
    answer = answer[0] if likelihood == "regression" else answer
    assert answer.dtype == torch.float32  # that of the input, whatever the base gave
