from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rgpr
from networks import LeNet, mlp
from rgpr.posteriors import SWAG, SWAGCollector


def iterates(network: nn.Module, n: int = 12) -> list[dict[str, torch.Tensor]]:
    """State after state of a network that wanders."""
    states = []
    for _ in range(n):
        for p in network.parameters():
            p.data += 0.1 * torch.randn_like(p)
        states.append(copy.deepcopy(network.state_dict()))
    return states


def flat(state: dict[str, torch.Tensor], network: nn.Module) -> torch.Tensor:
    return torch.cat([state[name].flatten().double() for name, _ in network.named_parameters()])


def test_moments_against_the_formula() -> None:
    """Mean, diagonal and low-rank part from the raw iterates; then the samples' covariance."""
    network = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1)).double()
    collector = SWAGCollector(network, rank=5)
    rows, deviations = [], []
    for state in iterates(network):
        network.load_state_dict(state)
        collector.collect()
        rows.append(flat(state, network))
        deviations.append(rows[-1] - torch.stack(rows).mean(0))
    theta, D = torch.stack(rows), torch.stack(deviations[-5:])
    mean = theta.mean(0)
    diagonal = theta.square().mean(0) - mean.square()
    for scale in (1.0, 0.25):
        swag = collector.posterior(scale=scale)
        torch.testing.assert_close(flat(swag.network.state_dict(), network), mean)
        expected = scale * (diagonal.diag() / 2 + D.T @ D / (2 * 4))
        source = swag.weights(torch.Generator().manual_seed(0))
        samples = torch.stack([flat(next(source), network) for _ in range(20_000)])
        torch.testing.assert_close(
            samples.T.cov(), expected, atol=0.05 * float(expected.max()), rtol=0
        )
        torch.testing.assert_close(samples.mean(0), mean, atol=0.02, rtol=0)


def test_checkpoints_give_the_same_as_collecting() -> None:
    network = mlp()
    states = iterates(network)
    before = copy.deepcopy(network.state_dict())
    a = SWAGCollector.from_checkpoints(network, states, rank=4).posterior()
    assert all(torch.equal(t, before[n]) for n, t in network.state_dict().items())
    collector = SWAGCollector(network, rank=4)
    for state in states:
        network.load_state_dict(state)
        collector.collect()
    b = collector.posterior()
    x = torch.randn(6, 4)
    torch.testing.assert_close(a(x).mean, b(x).mean)
    assert a.get_buffer("deviations_0").shape == (4, 16, 4)


def test_batch_normalisation_is_estimated_for_every_sample() -> None:
    network = LeNet()
    x = torch.randn(60, 1, 8, 8)
    loader = DataLoader(TensorDataset(x, torch.zeros(60)), batch_size=20)
    collector = SWAGCollector(network)
    for state in iterates(network, 4):
        network.load_state_dict(state)
        collector.collect()
    with pytest.raises(ValueError, match="pass the training loader"):
        collector.posterior()
    swag = collector.posterior(loader, n_samples=3)
    # By hand: the weights of each sample, and its statistics over the data in training mode.
    order = torch.randperm(3, generator=torch.Generator().manual_seed(5))
    samples = swag.sample(x, 3, torch.Generator().manual_seed(5))
    for index, ours in zip(order.tolist(), samples, strict=True):
        twin = copy.deepcopy(swag.network)
        weights = swag._draw(torch.Generator().manual_seed(swag.seed + index))
        twin.load_state_dict(weights, strict=False)
        for module in twin.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_running_stats()
                module.momentum = None
        twin.train()
        for batch, _ in loader:
            twin(batch)
        twin.eval()
        torch.testing.assert_close(ours, twin(x), rtol=1e-4, atol=1e-4)
    # The bank is all there is: six samples are the three, twice.
    again = swag.sample(x, 6, torch.Generator().manual_seed(5))
    assert torch.equal(again[:3], samples)
    torch.testing.assert_close(again[3:].sort(0).values, again[:3].sort(0).values)


def test_in_a_training_loop() -> None:
    x = torch.randn(200, 4)
    y = (x[:, 0] > 0).long()
    network = mlp(4, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.3)
    collector = SWAGCollector(network)
    for epoch in range(40):
        for batch, labels in zip(x.split(50), y.split(50), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(batch), labels).backward()
            optimizer.step()
        if epoch >= 30:
            collector.collect()
    model = rgpr.RGPR(collector.posterior()).fit([x])
    assert (model(x).argmax(1) == y).double().mean() > 0.9
    assert collector.count == 10


def test_what_is_missing_is_said() -> None:
    collector = SWAGCollector(mlp())
    with pytest.raises(ValueError, match=r"0 SWAG iterates.*collector\.collect\(\)"):
        collector.posterior()
    with pytest.raises(ValueError, match="rank = 1"):
        SWAGCollector(mlp(), rank=1)
    collector.collect()
    collector.collect()
    with pytest.raises(ValueError, match="scale = -1"):
        collector.posterior(scale=-1)
    assert isinstance(collector.posterior(scale=0), SWAG)
