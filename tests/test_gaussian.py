from __future__ import annotations

import pytest
import torch

from rgpr.gaussian import DenseGaussian, DiagonalGaussian, Gaussian


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
