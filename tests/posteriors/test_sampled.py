"""Ensembles, dropout, functions of samples, temperature."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import rgpr
from networks import LeNet, Task, mlp
from rgpr.metrics import nll
from rgpr.posteriors import MAP, Ensemble, FunctionPosterior, MCDropout, Temperature
from rgpr.posteriors.gaussian import DiagonalGaussian, Gaussian
from rgpr.posteriors.links import probit


def test_an_ensemble_is_a_list() -> None:
    networks, x = [mlp() for _ in range(4)], torch.randn(9, 4)
    for members in (networks, tuple(networks)):
        posterior = rgpr.as_posterior(members)
        assert isinstance(posterior, Ensemble)
        assert posterior.network is networks[0]
    outputs = torch.stack([network(x) for network in networks])
    torch.testing.assert_close(posterior(x).mean, outputs.mean(0))
    torch.testing.assert_close(posterior(x).variance, outputs.double().var(0))
    assert torch.equal(posterior.sample(x, 8), torch.cat([outputs, outputs]))
    assert torch.equal(posterior.sample(x, 2), outputs[:2])
    model = rgpr.RGPR(networks).fit([x])
    model.sigma2 = 0
    expected = outputs.softmax(-1).mean(0)
    torch.testing.assert_close(model(x, link_approx="mc", n_samples=4), expected)


def test_bad_ensembles() -> None:
    with pytest.raises(ValueError, match="an ensemble of 1 networks"):
        rgpr.RGPR([mlp()])
    with pytest.raises(TypeError, match="member 1 of the ensemble is a str"):
        rgpr.RGPR([mlp(), "network"])
    with pytest.raises(ValueError, match="member 1 of the ensemble has 5 outputs and the first"):
        rgpr.RGPR([mlp(), mlp(4, 5)]).fit([torch.randn(9, 4)])(torch.randn(2, 4))


def dropout_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3)
    )


def test_dropout_against_the_bernoulli_noise_written_out() -> None:
    network, x = dropout_network().eval(), torch.randn(5, 4)
    posterior = MCDropout(network)
    with torch.no_grad():
        hidden = network[:3](x)
        mask = (torch.rand(20_000, 1, 32) > 0.3) / 0.7
        by_hand = network[4](hidden * mask)
        ours = posterior.sample(x, 20_000)
    torch.testing.assert_close(ours.mean(0), by_hand.mean(0), atol=0.02, rtol=0)
    torch.testing.assert_close(ours.std(0), by_hand.std(0), atol=0.02, rtol=0.05)


def test_dropout_leaves_modes_and_the_random_state() -> None:
    network, x = dropout_network().train(), torch.randn(5, 4)
    statistics = network[1].running_mean.clone()
    model = rgpr.RGPR(MCDropout(network)).fit([x])
    state = torch.get_rng_state()
    first = model(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model(x), first)
    assert all(module.training for module in network.modules())
    assert torch.equal(network[1].running_mean, statistics)
    # The twin follows what happens to the network.
    with torch.no_grad():
        network[4].weight.zero_()
        network[4].bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(model.posterior.sample(x, 1)[0], torch.tensor([[1.0, 2.0, 3.0]] * 5))
    moved = copy.deepcopy(model).double()
    assert moved(x.double()).dtype == torch.float64


def test_dropout_needs_dropout() -> None:
    with pytest.raises(ValueError, match="no dropout module"):
        MCDropout(mlp())


def test_a_function_of_samples() -> None:
    network, x = mlp(), torch.randn(9, 4)

    def draw(x: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
        return network(x) + torch.randn(n, 1, 3, generator=generator)

    model = rgpr.RGPR(FunctionPosterior(network, draw)).fit([x])
    model.sigma2 = 1
    torch.testing.assert_close(model(1e9 * x), torch.full((9, 3), 1 / 3), atol=1e-3, rtol=0)
    bad = FunctionPosterior(network, lambda x, n, g: network(x))
    with pytest.raises(ValueError, match=r"the function gave \(9, 3\).*\(20, 9, C\)"):
        bad(x)
    with pytest.raises(ValueError, match="the function gave list"):
        FunctionPosterior(network, lambda x, n, g: [network(x)])(x)
    with pytest.raises(TypeError, match="cannot be saved"):
        model.save("never.safetensors")


def test_temperature_finds_the_likelihoods_optimum(digits: Task) -> None:
    from scipy.optimize import minimize_scalar

    hot = nn.Sequential(*copy.deepcopy(digits.network))
    hot[-1].weight.data *= 4
    hot[-1].bias.data *= 4
    loader = DataLoader(TensorDataset(digits.x, digits.y), batch_size=100)
    posterior = Temperature(hot).fit(loader)
    with torch.no_grad():
        logits = hot(digits.x).double()

    def loss(t: float) -> float:
        return nll((logits / t).softmax(-1), digits.y)

    best = minimize_scalar(loss, bounds=(0.05, 50), method="bounded", options={"xatol": 1e-8})
    assert float(posterior.temperature) == pytest.approx(best.x, rel=1e-3)
    assert loss(float(posterior.temperature)) <= best.fun + 1e-9
    # The arg max stays; so does the network.
    p = rgpr.RGPR(posterior).fit(digits.loader())(digits.x)
    assert torch.equal(p.argmax(1), logits.argmax(1))


def test_temperature_below_any_posterior() -> None:
    networks, x = [mlp() for _ in range(3)], torch.randn(9, 4)
    base = rgpr.as_posterior(networks)
    posterior = Temperature(base, 2.0)
    torch.testing.assert_close(posterior(x).mean, base(x).mean / 2)
    torch.testing.assert_close(posterior(x).covariance, base(x).covariance / 4)
    torch.testing.assert_close(posterior(x).row_sums, base(x).row_sums / 4)
    torch.testing.assert_close(posterior.sample(x, 3), base.sample(x, 3) / 2)
    noise = posterior(x).noise(50_000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(noise.var(0), posterior(x).variance, rtol=0.05, atol=1e-3)
    zero = torch.zeros(9).double()
    assert torch.equal(probit(Temperature(MAP(networks[0]))(x), zero), networks[0](x).softmax(-1))


def test_a_temperature_at_the_edge_is_said() -> None:
    class Wide(rgpr.Posterior):
        def forward(self, x: Tensor) -> Gaussian:
            return DiagonalGaussian(self.point(x), torch.full((), 1e8))

    x = torch.randn(50, 4)
    network = mlp()
    with pytest.warns(UserWarning, match="ran to the edge.*prior precision"):
        Temperature(Wide(network)).fit([(x, network(x).argmax(1))])


def test_bad_temperatures() -> None:
    with pytest.raises(ValueError, match="temperature = 0"):
        Temperature(mlp(), 0.0)
    with pytest.raises(TypeError, match="no targets"):
        Temperature(mlp()).fit([torch.randn(9, 4)])
    network = LeNet()
    x, y = torch.randn(20, 1, 8, 8), torch.arange(20) % 10
    network.train()
    Temperature(network).fit([{"image": x, "label": y}])
    assert network.training
