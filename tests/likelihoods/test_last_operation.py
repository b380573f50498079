"""A network that squashes its outputs is caught, and one whose logits are small is not."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
    "heads": lambda f: torch.cat([column.sigmoid() for column in f.split(1, 1)], 1),
    "stacked": lambda f: torch.stack([column.sigmoid() for column in f.unbind(1)], 1),
    "transposed": lambda f: f.t().sigmoid().transpose(0, 1),
    "clamped": lambda f: f.sigmoid().clamp(1e-6, 1 - 1e-6),
    "no NaN": lambda f: f.sigmoid().nan_to_num(),
    "exponential": lambda f: F.logsigmoid(f).exp(),
    "times one": lambda f: f.sigmoid() * 1.0,
    "complement": lambda f: 1 - f.sigmoid(),
    "mean": lambda f: torch.stack([f, 2 * f]).sigmoid().mean(0),
    "detached": lambda f: f.sigmoid().detach().clone(),
    "no gradients": torch.no_grad()(torch.sigmoid),
    "inference mode": torch.inference_mode()(torch.special.expit),
    "behind a sparse matrix": lambda f: (torch.eye(len(f)).to_sparse() @ f).sigmoid(),
    "filled in": lambda f: fill(torch.zeros_like(f), f.sigmoid()),
}


def fill(buffer: Tensor, f: Tensor) -> Tensor:
    """Columns that are written one by one."""
    for column in range(f.shape[1]):
        buffer[:, column] = f[:, column]
    return buffer


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


@pytest.mark.parametrize(
    "end",
    [
        lambda f: f.softmax(1)[:, 1],
        lambda f: f.softmax(1)[:, 1:],
        lambda f: F.log_softmax(f, 1).exp()[:, :1],
        lambda f: 0.9 * f.softmax(1),
        torch.no_grad()(lambda f: torch.softmax(f, 1)[:, :2].clamp(1e-6, 1)),
    ],
)
def test_a_part_of_a_softmax(end: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(
        ValueError, match=r"ends in a softmax; the residual works on logits\. Leave"
    ):
        rgpr.RGPR(Ends(mlp(), end)).fit([torch.randn(30, 4)])


def test_one_column_of_a_log_softmax() -> None:
    network = Ends(mlp(), lambda f: F.log_softmax(f, 1)[:, 1])
    with pytest.raises(ValueError, match="one column of a log-softmax"):
        rgpr.RGPR(network).fit([torch.randn(30, 4)])


class Words(nn.Module):
    """Token ids to one probability, with nothing left to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.head = nn.Embedding(20, 8), nn.Linear(8, 1)
        self.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.e(ids).mean(1)).sigmoid()


def test_a_frozen_network_of_ids() -> None:
    network = Words()
    with pytest.raises(ValueError, match="ends in a sigmoid"):
        rgpr.RGPR(network, input="e").fit([torch.randint(20, (30, 5))])
    assert not any(p.requires_grad for p in network.parameters())


def in_place_on_a_part(f: Tensor) -> Tensor:
    f[:, :1].sigmoid_()
    return 0.01 * f[:, 1:] + 0.5


@pytest.mark.parametrize(
    "end",
    [
        torch.relu,
        torch.tanh,
        lambda f: f.clamp(0, 1),
        lambda f: f.clamp(-10, 0),
        lambda f: torch.stack([f, f]).mean(0).abs() / 100,
        lambda f: F.batch_norm(f, torch.zeros(3), torch.ones(3)) * 0.01 + 0.5,
        lambda f: f.sigmoid() @ torch.eye(3),
        lambda f: torch.cat([f[:, :1].sigmoid() + 0.1, f[:, 1:].relu()], 1) / 100,
        lambda f: f.softmax(1).logit(1e-6) / 100 + 0.5,
        in_place_on_a_part,
    ],
)
def test_other_ends_are_taken(end: Callable[[Tensor], Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rgpr.RGPR(Ends(mlp(), end)).fit([torch.randn(30, 4)])


@pytest.mark.parametrize(
    "end",
    [
        lambda f: torch.from_numpy(f.detach().sigmoid().numpy().copy()),
        lambda f: 1 / (1 + torch.exp(-f)),
        lambda f: torch.cat([f[:, :1].sigmoid(), 0.5 + f[:, 1:] / 100], 1),
        lambda f: f.sigmoid() * torch.tensor([0.5, 0.7, 0.9]),
    ],
)
def test_what_is_not_seen_is_warned_of(end: Callable[[Tensor], Tensor]) -> None:
    network, x = Ends(mlp(), end), torch.randn(30, 4)
    for likelihood in ("classification", "multilabel"):
        with pytest.warns(UserWarning, match="lie between 0 and 1") as seen:
            rgpr.RGPR(network, likelihood=likelihood).fit([x, x])
        assert len(seen) == 1
    text = str(seen[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rgpr.RGPR(network, likelihood="regression").fit([x])
        remedy = re.search(r"output=(lambda p: .*?)\)\. If", text)
        assert remedy is not None
        rgpr.RGPR(network, output=eval(remedy[1])).fit([x])
        silence = re.search(r"warnings\.filterwarnings\(.*?\)", text)
        assert silence is not None
        eval(silence[0])
        rgpr.RGPR(network).fit([x])


def test_a_compiled_end_is_seen_or_warned_of() -> None:
    """Some versions of torch let operations inside compiled parts be watched, and others do not."""
    compiled = torch.compile(torch.sigmoid, backend="eager", fullgraph=True)
    model = rgpr.RGPR(Ends(mlp(), compiled))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "all outputs of the first batch")
        with pytest.raises((ValueError, UserWarning), match=r"ends in|lie between 0 and 1"):
            model.fit([torch.randn(30, 4)])


def test_features_may_end_in_a_sigmoid() -> None:
    """What a posterior makes of its network's features is looked at, and not the features."""

    class Scaled(rgpr.Posterior):
        def forward(self, x: Tensor) -> rgpr.posteriors.Gaussian:
            mean = self.point(x) @ torch.eye(3) / 2 + 0.1
            return rgpr.posteriors.DiagonalGaussian(mean, torch.zeros(()))

    rgpr.RGPR(Scaled(nn.Sequential(mlp(), nn.Sigmoid()))).fit([torch.randn(30, 4)])
