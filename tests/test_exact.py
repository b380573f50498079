from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from references import jacobian
from rgpr.kernels import dscs_gram
from rgpr.residual.exact import ResidualProcess


def problem() -> tuple[nn.Module, Tensor, Tensor, Tensor, Tensor]:
    """A small regression network, its weights' covariance, data, and points of the same law."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 1)).double()
    parameters = sum(p.numel() for p in network.parameters())
    root = torch.randn(parameters, parameters).double()
    covariance = root @ root.T / parameters
    X, x = torch.rand(12, 2).double() * 2 - 1, torch.rand(5, 2).double() * 2 - 1
    return network, covariance, X, X.sin().sum(1), x


def errors(delta: float) -> tuple[Tensor, Tensor]:
    """Mean and variance errors of Proposition 1 when the residual sees the data times delta.

    Standardising by ``r = 1 / delta`` does just that, and leaves the network's part as it is.
    """
    network, covariance, X, y, x = problem()
    process = ResidualProcess(
        network, covariance, lambda a, b: dscs_gram(delta * a, delta * b), noise=0.1
    )
    exact, approximate = process.exact(x, X, y), process.approximate(x, X, y)
    return (exact[0] - approximate[0]).abs().max(), (exact[1] - approximate[1]).abs().max()


@pytest.mark.parametrize("moment", [0, 1])
def test_proposition_1_has_an_error_of_third_order(moment: int) -> None:
    """Not of sixth: see the errata in the documentation."""
    deltas = [0.1, 0.03, 0.01, 0.003]
    sizes = torch.stack([errors(delta)[moment] for delta in deltas])
    logs = torch.tensor(deltas, dtype=torch.float64).log10()
    slopes = sizes.log10().diff() / logs.diff()
    torch.testing.assert_close(slopes, torch.full_like(slopes, 3.0), atol=0.05, rtol=0)


def test_against_the_formulas_with_everything_written_out() -> None:
    network, covariance, X, y, x = problem()
    process = ResidualProcess(network, covariance, noise=0.1)
    g, G = jacobian(network, x)[:, 0], jacobian(network, X)[:, 0]
    C = G @ covariance @ G.T
    h = g @ covariance @ G.T
    for mean_variance, cross, inner in (
        (process.exact(x, X, y), h + dscs_gram(x, X), C + dscs_gram(X)),
        (process.approximate(x, X, y), h, C),
    ):
        inverse = torch.linalg.inv(inner + 0.1 * torch.eye(12).double())
        mean = network(x)[:, 0] + cross @ inverse @ (y - network(X)[:, 0])
        prior = (g @ covariance * g).sum(1) + dscs_gram(x).diagonal()
        variance = prior - (cross @ inverse * cross).sum(1)
        torch.testing.assert_close(mean_variance[0], mean.detach(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(mean_variance[1], variance)


def test_far_away_both_are_the_network_plus_the_residual() -> None:
    """The term that conditioning takes off is quadratic, the residual cubic."""
    network, covariance, X, y, x = problem()
    process = ResidualProcess(network, covariance, noise=0.1)
    far = 1e6 * x
    exact, approximate = process.exact(far, X, y)[1], process.approximate(far, X, y)[1]
    torch.testing.assert_close(exact, dscs_gram(far).diagonal(), rtol=1e-2, atol=0)
    torch.testing.assert_close(exact, approximate, rtol=1e-2, atol=0)


def test_dropout_is_off() -> None:
    network, covariance, X, y, x = problem()
    with_dropout = nn.Sequential(*network[:2], nn.Dropout(), network[2]).train()
    for a, b in zip(
        ResidualProcess(with_dropout, covariance, noise=0.1).exact(x, X, y),
        ResidualProcess(network, covariance, noise=0.1).exact(x, X, y),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    assert with_dropout.training


def test_without_noise_and_with_too_much_data_it_says_so() -> None:
    network, covariance, X, y, x = problem()
    many = torch.cat([X, X])
    process = ResidualProcess(network, covariance, lambda a, b: 0 * dscs_gram(a, b))
    with pytest.raises(ValueError, match=r"24 inputs is not positive definite.*25 parameters"):
        process.exact(x, many, torch.cat([y, y]))
