from __future__ import annotations

import unittest
from typing import Any

import gpytorch
import pytest
import torch
from gpytorch.test.base_kernel_test_case import BaseKernelTestCase

from rgpr.integrations.gpytorch import DSCSKernel
from rgpr.kernels import dscs, dscs_diag, dscs_gram


class TestConformance(BaseKernelTestCase, unittest.TestCase):
    """gpytorch's own suite for kernels."""

    def create_kernel_no_ard(self, **kwargs: Any) -> DSCSKernel:
        return DSCSKernel(**kwargs)


@pytest.mark.parametrize("offset", [0.0, 0.5])
def test_values(offset: float) -> None:
    kernel, x, y = DSCSKernel(offset=offset), torch.randn(6, 3), torch.randn(6, 3)
    kernel.variance = 2.5
    torch.testing.assert_close(kernel.variance, torch.tensor(2.5))
    torch.testing.assert_close(
        kernel(x, y).to_dense(), dscs_gram(x, y, variance=2.5, offset=offset)
    )
    torch.testing.assert_close(kernel(x, y, diag=True), dscs(x, y, variance=2.5, offset=offset))
    torch.testing.assert_close(kernel(x, diag=True), dscs_diag(x, variance=2.5, offset=offset))


def test_batches_have_their_own_variance() -> None:
    kernel, x = DSCSKernel(batch_shape=torch.Size([2])), torch.randn(2, 5, 3)
    kernel.variance = torch.tensor([1.0, 3.0])
    expected = torch.stack([dscs_gram(x[0]), 3 * dscs_gram(x[1])])
    torch.testing.assert_close(kernel(x).to_dense(), expected)
    torch.testing.assert_close(kernel(x, diag=True), expected.diagonal(dim1=1, dim2=2))


def test_last_dim_is_batch_gives_a_kernel_per_dimension() -> None:
    kernel, x = DSCSKernel(), torch.randn(5, 3)
    kernel.variance = 1.0
    per_dimension = kernel.forward(x, x, last_dim_is_batch=True)
    assert per_dimension.shape == (3, 5, 5)
    torch.testing.assert_close(per_dimension.mean(0), dscs_gram(x))
    diagonals = kernel.forward(x, x, diag=True, last_dim_is_batch=True)
    torch.testing.assert_close(diagonals, per_dimension.diagonal(dim1=1, dim2=2))


def test_prior_and_constraint() -> None:
    kernel = DSCSKernel(
        variance_prior=gpytorch.priors.GammaPrior(2.0, 1.0),
        variance_constraint=gpytorch.constraints.GreaterThan(0.1),
    )
    assert float(kernel.variance) > 0.1
    _name, module, _prior, closure, setting = next(iter(kernel.named_priors()))
    assert closure(module) is not None
    setting(module, torch.tensor(0.7))
    torch.testing.assert_close(kernel.variance, torch.tensor(0.7))


class Process(gpytorch.models.ExactGP):
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        super().__init__(x, y, gpytorch.likelihoods.GaussianLikelihood())
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), DSCSKernel()

    def forward(self, x: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def test_an_exact_process_learns_its_variance() -> None:
    """The marginal likelihood finds the scale that made the data, within sampling error."""
    x = torch.linspace(-3, 3, 200)[:, None]
    true = 4.0
    root = torch.linalg.cholesky(dscs_gram(x, variance=true) + 1e-4 * torch.eye(200))
    y = root @ torch.randn(200) + 0.01 * torch.randn(200)
    model = Process(x, y)
    model.likelihood.noise = 1e-3
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model.train()
    for _ in range(150):
        optimizer.zero_grad()
        loss = -objective(model(x), y)
        loss.backward()
        optimizer.step()
    assert 1.0 < float(model.covar_module.variance) < 16.0
    model.eval()
    with torch.no_grad():
        far = model(torch.tensor([[30.0], [300.0], [3000.0]])).variance
    slopes = far.log10().diff()
    assert (slopes > 2.5).all()  # cubic, as the prior: conditioning takes off only a part
