"""The marginal likelihood against dense linear algebra, quadrature, grids and differences."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import rgpr
from networks import blobs, laplace_over_blobs, mlp
from references import dscs_sum, jacobian, standardised
from rgpr.answers.examples import Parameters
from rgpr.posteriors import FunctionPosterior, Temperature
from rgpr.tuning.objectives.marginal import (
    KernelMatrices,
    MarginalLikelihood,
    _cholesky,
    collect_matrices,
    laplace_evidence,
    regression_evidence,
)
from rgpr.tuning.options import Options

pytestmark = pytest.mark.filterwarnings("ignore")


def random_kernel(classes: int, n: int, scale: float = 1.0) -> Tensor:
    root = torch.randn(classes, n, n, dtype=torch.float64) / n**0.5
    return scale * root @ root.mT


def dense_laplace(K: Tensor, mean: Tensor, target: Tensor) -> float:
    """Newton's method on all outputs at once, and the determinant of the whole matrix."""
    C, n, _ = K.shape
    K = torch.block_diag(*K).numpy()
    mu = mean.T.reshape(-1).numpy()
    y = torch.nn.functional.one_hot(target, C).T.reshape(-1).numpy()
    g = np.zeros(C * n)
    for _ in range(200):
        f = (mu + g).reshape(C, n)
        p = np.exp(f - f.max(0)) / np.exp(f - f.max(0)).sum(0)
        stacked = np.concatenate([np.diag(row) for row in p])
        W = np.diag(p.reshape(-1)) - stacked @ stacked.T
        new = K @ np.linalg.solve(np.eye(C * n) + W @ K, W @ g + y - p.reshape(-1))
        step = np.abs(new - g).max()
        g = g + (new - g) * (1.0 if step < 1 else 0.3)
        if step < 1e-12:
            break
    f = (mu + g).reshape(C, n)
    log_p = (y * f.reshape(-1)).sum() - np.log(np.exp(f).sum(0)).sum()
    p = np.exp(f) / np.exp(f).sum(0)
    stacked = np.concatenate([np.diag(row) for row in p])
    W = np.diag(p.reshape(-1)) - stacked @ stacked.T
    quadratic = g @ np.linalg.pinv(K) @ g
    return log_p - quadratic / 2 - np.linalg.slogdet(np.eye(C * n) + K @ W)[1] / 2


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_laplace_is_the_dense_one(classes: int, scale: float) -> None:
    K, mean = random_kernel(classes, 7, scale), 2 * torch.randn(7, classes).double()
    target = torch.randint(classes, (7,))
    value, mode = laplace_evidence(K, mean, target)
    assert float(value) == pytest.approx(dense_laplace(K, mean, target), rel=1e-6)
    again, _ = laplace_evidence(K, mean, target, start=mode)
    assert float(again) == pytest.approx(float(value), rel=1e-9)


def test_laplace_is_near_the_truth() -> None:
    """One input, two classes: the integral over both outputs by quadrature."""
    mean, target = torch.tensor([[0.5, -0.3]]).double(), torch.tensor([1])
    K = torch.tensor([[[0.4]], [[0.7]]]).double()
    value = float(laplace_evidence(K, mean, target)[0])
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / math.sqrt(2 * math.pi)
    first = 0.5 + math.sqrt(0.4) * nodes[:, None]
    second = -0.3 + math.sqrt(0.7) * nodes[None, :]
    truth = (weights[:, None] * weights[None, :] / (1 + np.exp(first - second))).sum()
    assert value == pytest.approx(math.log(truth), abs=0.02)


def test_regression_is_a_multivariate_normal() -> None:
    from scipy.stats import multivariate_normal

    K, mean = random_kernel(2, 6), torch.randn(6, 2).double()
    target, noise = torch.randn(6, 2).double(), torch.tensor(0.3, dtype=torch.float64)
    expected = sum(
        multivariate_normal(mean[:, c], K[c].numpy() + 0.3 * np.eye(6)).logpdf(target[:, c])
        for c in range(2)
    )
    assert float(regression_evidence(K, mean, target, noise)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("likelihood", ["classification", "regression", "one output"])
def test_gradients_are_finite_differences(likelihood: str) -> None:
    n, C = 8, 1 if likelihood == "one output" else 3
    target = torch.randn(n, C).double() if likelihood == "regression" else torch.randint(2, (n,))
    data = KernelMatrices(
        random_kernel(2, n), random_kernel(C, n, 0.3), torch.randn(n, C).double(), target
    )
    sigma2 = torch.tensor([0.7, 2.0]).double()
    noise = torch.tensor(0.4).double()

    def value(sigma2: Tensor) -> Tensor:
        return data.evidence(Parameters(sigma2, torch.ones(()), noise))

    point = sigma2.clone().requires_grad_()
    [gradient] = torch.autograd.grad(value(point), point)
    for i in range(2):
        step = torch.zeros(2).double()
        step[i] = 1e-5
        difference = float(value(sigma2 + step) - value(sigma2 - step)) / 2e-5
        assert float(gradient[i]) == pytest.approx(difference, rel=1e-5, abs=1e-9)


def fitted_laplace(structure: str, likelihood: str) -> tuple[nn.Module, Tensor, Tensor, Any]:
    from laplace import Laplace

    x, y = blobs(3, n=45)
    if likelihood == "regression":
        y = torch.stack([x[:, 0].sin(), x[:, 1], x[:, 2] * 0], 1)
    network = mlp(4, 3, width=5, hidden=1)
    la = Laplace(network, likelihood, "last_layer", structure, prior_precision=2.0)
    la.fit(DataLoader(TensorDataset(x, y), batch_size=45))
    return network, x, y, la


@pytest.mark.parametrize("structure", ["kron", "diag", "full", "all layers"])
def test_covariances_are_jacobians_times_the_posterior(structure: str) -> None:
    if structure == "all layers":
        x, y = blobs(3, n=45)
        network = mlp(4, 3, width=5, hidden=1)
        from laplace import Laplace

        la = Laplace(network, "classification", "all", "full", prior_precision=2.0)
        la.fit(DataLoader(TensorDataset(x, y), batch_size=45))
        covariance, J = la.posterior_covariance.double(), jacobian(network, x[:6]).double()
    else:
        network, x, _, la = fitted_laplace(structure, "classification")
        J = jacobian(network, x[:6]).double()[..., -18:]
        if structure == "kron":
            precision = la.posterior_precision.to_matrix().double()
            covariance = precision.inverse()
        elif structure == "diag":
            covariance = la.posterior_variance.double().diag()
        else:
            covariance = la.posterior_covariance.double()
    expected = torch.einsum("bcp,pq,dcq->cbd", J, covariance, J)
    posterior = rgpr.as_posterior(la)
    found = posterior.eval().covariances(x[:6]).double()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    warm = Temperature(posterior, 2.0).covariances(x[:6]).double()
    torch.testing.assert_close(warm, expected / 4, rtol=1e-4, atol=1e-5)


def test_an_ensembles_covariances_are_those_of_its_members() -> None:
    members, x = [mlp() for _ in range(4)], torch.randn(5, 4)
    outputs = torch.stack([m(x) for m in members]).detach().double()
    found = rgpr.as_posterior(members).covariances(x).detach()
    for c in range(3):
        torch.testing.assert_close(found[c], torch.cov(outputs[:, :, c].T), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_no_point_of_a_grid_is_better(layers: int, likelihood: str) -> None:
    """The whole way, from loaders, against matrices formed pair by pair."""
    from scipy.stats import multivariate_normal

    network, x, y, la = fitted_laplace("full", likelihood)
    model = rgpr.RGPR(la, layers="input" if layers == 1 else "auto", residual="paper").fit([x[:30]])
    data, target = x[30:], y[30:]
    n = len(data)

    def gram(h: Tensor, training: Tensor) -> Tensor:
        z = standardised(h, training)
        pairs = [[dscs_sum(a, b) for b in z] for a in z]
        return torch.tensor(pairs, dtype=torch.float64)

    with torch.no_grad():
        grams = [gram(data, x[:30]), gram(network[:2](data), network[:2](x[:30]))][:layers]
        mean = network(data).double()
    J = jacobian(network, data).double()[..., -18:]
    base = torch.einsum("bcp,pq,dcq->cbd", J, la.posterior_covariance.double(), J)
    noise = 0.5

    def value(sigma2: tuple[float, ...]) -> float:
        K = base + sum(s * g for s, g in zip(sigma2, grams, strict=True))
        if likelihood == "classification":
            return dense_laplace(K, mean, target) / n
        return sum(
            multivariate_normal(mean[:, c], K[c].numpy() + noise * np.eye(n)).logpdf(target[:, c])
            for c in range(3)
        ) / n  # fmt: skip

    known = {"noise": noise} if likelihood == "regression" else {}
    result = model.tune([(data, target)], "marginal-likelihood", **known)
    assert result.after == pytest.approx(value(tuple(model.sigma2.tolist())), abs=1e-4)
    assert result.after >= result.before
    powers = range(-4, 4) if layers == 1 else range(-4, 4, 2)
    scales = [0.0, *(10.0**p for p in powers)]
    assert result.after >= max(value(p) for p in itertools.product(scales, repeat=layers)) - 1e-3


def test_the_noise_is_found_too() -> None:
    x = torch.randn(60, 2)
    network = nn.Linear(2, 1)
    with torch.no_grad():
        y = network(x) + 0.5 * torch.randn(60, 1)
    model = rgpr.RGPR(network, layers="input", likelihood="regression", residual="paper").fit([x])
    result = model.tune([(x, y)], "marginal-likelihood")
    assert result.noise == pytest.approx(0.25, rel=0.4)


def test_too_many_examples_are_refused_with_advice() -> None:
    network, x, y = mlp(4, 10), torch.randn(2001, 4), torch.randint(10, (2001,))
    model = rgpr.RGPR(network, residual="paper").fit([x])
    before = model.sigma2
    with pytest.raises(ValueError, match=r"10 outputs allow 2000.*Subset.*objective='likelihood'"):
        model.tune([(x, y)], "marginal-likelihood")
    assert torch.equal(model.sigma2, before)


def test_a_base_without_covariances_is_refused_by_name() -> None:
    network, x, y = mlp(), torch.randn(20, 4), torch.randint(3, (20,))
    base = FunctionPosterior(network, lambda x, n, generator: network(x).expand(n, -1, -1))
    with warnings.catch_warnings(), pytest.raises(TypeError, match=r"FunctionPosterior.*'ood'"):
        rgpr.RGPR(base, residual="paper").fit([x]).tune([(x, y)], "marginal-likelihood")


def test_one_output_stands_for_two_of_which_the_first_is_certain() -> None:
    matrices = KernelMatrices(
        random_kernel(2, 6), random_kernel(1, 6), torch.randn(6, 1).double(), torch.arange(6) % 2
    )
    K = matrices.covariance(torch.tensor([0.3, 2.0]).double())
    assert (K[0] == 0).all()
    expected = matrices.base[1] + 0.3 * matrices.residual[0] + 2 * matrices.residual[1]
    torch.testing.assert_close(K[1], expected)


@pytest.mark.parametrize("shared", [True, False])
def test_labels_are_processes_of_their_own(shared: bool) -> None:
    """Each of them has the evidence of a classification by its own output."""
    residual, base = random_kernel(2, 6), random_kernel(1 if shared else 3, 6)
    mean, target = torch.randn(6, 3).double(), torch.randint(0, 2, (6, 3))
    parameters = Parameters(
        torch.tensor([0.3, 2.0]).double(), torch.ones(()).double(), torch.zeros(()).double()
    )
    parts = KernelMatrices(residual, base, mean, target).of_each_output()
    assert len(parts) == 3
    for i, part in enumerate(parts):
        own = base if shared else base[i][None]
        alone = KernelMatrices(residual, own, mean[:, i][:, None], target[:, i])
        torch.testing.assert_close(part.evidence(parameters), alone.evidence(parameters))


def test_a_matrix_is_mended_where_rounding_made_it_indefinite_and_refused_elsewhere() -> None:
    root = torch.randn(6, 2).double()
    singular = root @ root.T - 1e-13 * torch.eye(6)
    factor = _cholesky(singular)
    torch.testing.assert_close(factor @ factor.T, singular, atol=1e-9, rtol=0)
    with pytest.raises(ValueError, match="not positive definite"):
        _cholesky(-torch.eye(3).double())


def test_batches_of_one_example_and_of_none() -> None:
    x, y = torch.randn(9, 4), torch.arange(9) % 3
    model = rgpr.RGPR(laplace_over_blobs("classification", "kron")[0], residual="paper").fit([x])
    batches = [(x[rows], y[rows]) for rows in (slice(0, 8), slice(8, 8), slice(8, 9))]
    assert len(collect_matrices(model._extension(), batches, False)) == 9


def test_the_evidence_of_labels_is_that_of_each_label() -> None:
    x, y = torch.randn(12, 4), torch.randint(0, 2, (12, 3)).float()
    model = rgpr.RGPR(mlp(), likelihood="multilabel", residual="paper").fit([x], progress=False)
    with torch.no_grad():
        objective = MarginalLikelihood(model._extension(), [(x, y)], Options(progress=False))
        parameters = Parameters(model.sigma2, torch.ones(()).double(), torch.zeros(()).double())
        parts = list(objective.parts(parameters, 0.0))
        K = objective.matrices.covariance(model.sigma2)[0]
        for part, f, target in zip(parts, model.posterior.network(x).double().T, y.T, strict=True):
            pair = torch.stack([torch.zeros_like(K), K])
            mean = torch.stack([torch.zeros_like(f), f], 1)
            assert float(part) == pytest.approx(dense_laplace(pair, mean, target.long()) / 12)
