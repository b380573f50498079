from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rgpr
from networks import blobs, mlp
from references import dscs_sum
from rgpr.baselines.gp_residual import GPDSCS, RIO, BlightOtt, GPResidual


def data(n: int = 60) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 2)
    return x, torch.stack([3 * x[:, 0].sin(), 50 * x[:, 1] ** 2], dim=1) + 0.1 * torch.randn(n, 2)


def fit(kind: type[GPResidual], network: nn.Module, x: Tensor, y: Tensor, **options) -> GPResidual:  # type: ignore[no-untyped-def]
    arguments = () if kind is BlightOtt else (network,)
    return kind.fit(*arguments, [(x[:40], y[:40]), (x[40:], y[40:])], progress=False, **options)


def gram(posterior: GPResidual, c: int, a: list[Tensor], b: list[Tensor]) -> Tensor:
    """The sum of kernels on inputs and outputs, entry by entry."""
    kernel = posterior.gps.kernel
    parts = kernel.kernels if hasattr(kernel, "kernels") else [kernel]
    total = torch.zeros(len(a[0]), len(b[0]), dtype=torch.float64)
    for part, left, right in zip(parts, a, b, strict=False):
        if isinstance(posterior, GPDSCS):
            values = [[dscs_sum(p, q) for q in right] for p in left]
            total += part.variance[c] * torch.tensor(values, dtype=torch.float64)
        else:
            squares = (left[:, None] - right[None]).square().sum(-1)
            lengthscale = part.base_kernel.lengthscale[c]
            total += part.outputscale[c] * (-0.5 * squares / lengthscale**2).exp()
    return total


@pytest.mark.parametrize("kind", [GPDSCS, RIO, BlightOtt])
def test_exact_regression_is_the_textbooks(kind: type[GPResidual]) -> None:
    # In float64 throughout: float32 outputs, rounded one way in the fit and another way here,
    # differ by more than the small variance that is left of a large one.
    x, y = (t.double() for t in data())
    network = mlp(2, 2).double()
    posterior = fit(kind, network, x, y, likelihood="regression")
    network = posterior.network
    new = torch.randn(9, 2).double()

    def standardised(inputs: Tensor) -> list[Tensor]:
        pairs = [(inputs, x), (network(inputs), network(x))]
        return [((h - ref.mean(0)) / ref.std(0, correction=0)).detach() for h, ref in pairs]

    train, test = standardised(x), standardised(new)
    residual = (y - network(x)).detach()
    gaussian = posterior(new)
    for c in range(2):
        # The GPs live in units of the root mean square of the residuals.
        unit = residual[:, c].square().mean()
        K = unit * gram(posterior, c, train, train)
        # Not by an explicit inverse: where the kernel is large and smooth it has no digits left.
        factor = torch.linalg.cholesky(K + posterior.gps.noise[c] * torch.eye(len(x)).double())
        cross = unit * gram(posterior, c, train, test)
        solved = torch.cholesky_solve(cross, factor)
        mean = network(new)[:, c] + solved.T @ residual[:, c]
        variance = unit * gram(posterior, c, test, test) - cross.T @ solved
        torch.testing.assert_close(gaussian.mean[:, c], mean, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            gaussian.variance[:, c], variance.diagonal(), rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize("kind", [GPDSCS, RIO, BlightOtt])
@pytest.mark.parametrize("exact", [True, False])
def test_regression_learns_and_goes_below_the_residual(kind: type[GPResidual], exact: bool) -> None:
    (x, y), network = data(150), mlp(2, 2)
    posterior = fit(kind, network, x, y, likelihood="regression", exact=exact)
    gaussian = posterior(x)
    assert ((gaussian.mean - y).square().mean(0) < 0.1 * y.var(0)).all()
    model = rgpr.RGPR(posterior).fit([x])
    assert model.likelihood == "regression"
    assert model.layers[0] == "input"
    model.sigma2 = 1.0
    small, large = (model(a * x[:1], diagonal_output=True)[1] for a in (1e6, 1e8))
    torch.testing.assert_close(large / small, torch.full((1, 2), 1e6).double(), rtol=1e-2, atol=0)
    model.sigma2 = 0.0
    mean, variance = model(x, diagonal_output=True)
    assert torch.equal(mean, gaussian.mean)
    assert torch.equal(variance, gaussian.variance)


def test_hyperparameters_raise_the_marginal_likelihood() -> None:
    (x, y), network = data(), mlp(2, 2)
    posteriors = [fit(RIO, network, x, y, likelihood="regression", epochs=n) for n in (1, 5, 50)]
    values = []
    for posterior in posteriors:
        gps = posterior.gps
        logs = gps.cholesky.diagonal(dim1=-2, dim2=-1).log().sum()
        values.append(float(0.5 * gps.weights.square().sum() + logs))
    assert values[0] > values[1] > values[2]


@pytest.mark.parametrize("kind", [GPDSCS, RIO])
def test_classification(kind: type[GPResidual]) -> None:
    x, y = blobs()
    network = mlp().train()  # untrained, and in a mode that must come back
    state = {name: t.clone() for name, t in network.state_dict().items()}
    generator = torch.get_rng_state()
    posterior = fit(kind, network, x, y, inducing=30, epochs=200)
    assert torch.equal(torch.get_rng_state(), generator)
    gaussian = posterior(x)
    assert (gaussian.mean.argmax(1) == y).float().mean() > 0.95
    model = rgpr.RGPR(posterior).fit([x])
    assert model.likelihood == "classification"
    model.sigma2 = 1.0
    torch.testing.assert_close(model(1e9 * x), torch.full((120, 3), 1 / 3), atol=1e-3, rtol=0)
    model.sigma2 = 0.0
    kappa = (1 + math.pi / 8 * gaussian.variance).rsqrt()
    torch.testing.assert_close(model(x), (gaussian.mean * kappa).softmax(-1).float())
    assert network.training
    assert all(torch.equal(t, state[name]) for name, t in network.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())
    assert all(p.requires_grad and p.grad is None for p in network.parameters())


def test_dscs_alone_grows_cubically_and_rbf_levels_off() -> None:
    (x, y), network = data(), mlp(2, 2)
    ratios = []
    for kind in (GPDSCS, BlightOtt):
        posterior = fit(kind, network, x, y, likelihood="regression")
        small, large = (posterior(a * x[:1]).variance for a in (1e6, 1e8))
        ratios.append(large / small)
    torch.testing.assert_close(ratios[0], torch.full((1, 2), 1e6).double(), rtol=1e-2, atol=0)
    torch.testing.assert_close(ratios[1], torch.ones(1, 2).double())


def test_seed() -> None:
    (x, y), network = blobs(), mlp()
    first, again, other = (
        fit(RIO, network, x, y, inducing=10, epochs=2, seed=s)(x).mean for s in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_polynomial_is_numpys() -> None:
    x = torch.randn(50, 1).double()
    y = x[:, 0] ** 3 - 2 * x[:, 0] + torch.randn(50)
    posterior = BlightOtt.fit([(x, y)], degree=3, progress=False)
    expected = np.polyval(np.polyfit(x[:, 0].numpy(), y.numpy(), 3), x[:, 0].numpy())
    torch.testing.assert_close(posterior.network(x)[:, 0], torch.tensor(expected))
    assert rgpr.RGPR(posterior).fit([x]).layers == ["input"]


def test_errors() -> None:
    (x, y), network = data(), mlp(2, 2)
    labels = torch.zeros(60, dtype=torch.long)
    with pytest.raises(ValueError, match=r"likelihood='classification'.*GPDSCS or RIO"):
        BlightOtt.fit([(x, labels)], "classification")
    with pytest.raises(ValueError, match="degree = -1"):
        BlightOtt.fit([(x, y)], degree=-1)
    with pytest.raises(TypeError, match=r"dtype torch.int64"):
        BlightOtt.fit([(x.long(), y)])
    with pytest.raises(ValueError, match="likelihood='poisson'"):
        fit(RIO, network, x, y, likelihood="poisson")
    with pytest.raises(ValueError, match="exact=True is for regression"):
        fit(RIO, network, x, labels, exact=True)
    with pytest.raises(ValueError, match="the network has one output"):
        fit(RIO, mlp(2, 1), x, labels)
    with pytest.raises(ValueError, match="labels run from 0 to 5 with 2 classes"):
        fit(RIO, network, x, labels + torch.arange(60) % 6)
    with pytest.raises(ValueError, match=r"targets have shape \(60, 1\)"):
        fit(RIO, network, x, y[:, 0], likelihood="regression")
    with pytest.raises(ValueError, match="batch 0: the network's outputs are not finite"):
        fit(RIO, nn.Sequential(mlp(2, 2), Infinite()), x, y, likelihood="regression")
    model = rgpr.RGPR(fit(RIO, network, x, y, likelihood="regression", epochs=1)).fit([x])
    with pytest.raises(TypeError, match="RIO cannot be saved: it predicts through an object"):
        model.save("never.safetensors")


class Infinite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 0
