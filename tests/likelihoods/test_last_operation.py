"""A network that squashes its outputs is caught, and one whose logits are small is not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import rgpr
from networks import InPlace, mlp


class Ends(nn.Module):
    """A network with a function behind it."""

    def __init__(self, network: nn.Module, function: object) -> None:
        super().__init__()
        self.network, self.function = network, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.network(x))


SIGMOIDS = {
    "module": nn.Sigmoid(),
    "function": torch.sigmoid,
    "in place": lambda f: f.sigmoid_(),
    "another shape": lambda f: torch.sigmoid(f).view(len(f), -1).double().float(),
    "hard": nn.Hardsigmoid(),
    "logarithm": nn.LogSigmoid(),
}


@pytest.mark.parametrize("end", SIGMOIDS)
@pytest.mark.parametrize(
    ("outputs", "likelihood"), [(1, "classification"), (3, "classification"), (3, "multilabel")]
)
def test_a_sigmoid_at_the_end(end: str, outputs: int, likelihood: str) -> None:
    network = Ends(mlp(4, outputs), SIGMOIDS[end])
    network.train()
    with pytest.raises(ValueError, match=r"ends in .*sigmoid.*works on logits\. Leave it out"):
        rgpr.RGPR(network, likelihood=likelihood).fit([torch.randn(30, 4)])
    assert network.training
    assert all(p.grad is None for p in network.parameters())
    rgpr.RGPR(network, likelihood="regression").fit([torch.randn(30, 4)])


def test_one_column() -> None:
    network = Ends(mlp(4, 1), lambda f: torch.sigmoid(f).squeeze(1))
    with pytest.raises(ValueError, match=r"ends in a sigmoid.*works on logits"):
        rgpr.RGPR(network).fit([torch.randn(30, 4)])
    several = nn.Sequential(mlp(), nn.Sigmoid())
    with pytest.raises(ValueError, match="say likelihood='multilabel'"):
        rgpr.RGPR(several).fit([torch.randn(30, 4)])


@pytest.mark.parametrize("likelihood", ["classification", "multilabel"])
def test_small_logits_are_no_alarm(likelihood: str) -> None:
    """All outputs lie in (0, 1), or below zero, by chance or by an activation further in."""
    for network in (
        Ends(mlp(4, 3), lambda f: 0.4 + 0.01 * f),
        Ends(mlp(4, 3), lambda f: f - 100),
        nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 3).requires_grad_(False)),
        Ends(mlp(4, 1), lambda f: 0.2 + 0.6 * torch.sigmoid(f)),
        InPlace(),
    ):
        rgpr.RGPR(network, likelihood=likelihood).fit([torch.randn(40, 4)])


def test_a_log_softmax_is_for_classes_alone() -> None:
    network, x = nn.Sequential(mlp(), nn.LogSoftmax(1)), torch.randn(40, 4)
    model = rgpr.RGPR(network).fit([x])
    model.sigma2 = 0.0
    torch.testing.assert_close(model(x), network[0](x).softmax(1))
    with pytest.raises(ValueError, match=r"log-softmax.*likelihood='classification'"):
        rgpr.RGPR(network, likelihood="multilabel").fit([x])
