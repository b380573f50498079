"""Bounds that are attacked, and promises that are kept."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import rgpr
from networks import LeNet, Task, convolutional, mlp
from rgpr.certificate import at_distance
from rgpr.lipschitz import NotBoundedError, _convolution, lipschitz
from rgpr.posteriors import SWAGCollector, Temperature
from rgpr.training import lenet, resnet18


def stretch(network: nn.Module, x: Tensor) -> float:
    """The largest singular value of the Jacobian at x: no Lipschitz constant is smaller."""
    jacobian = torch.autograd.functional.jacobian(lambda z: network(z[None])[0], x)
    return float(torch.linalg.matrix_norm(jacobian.flatten(1).double(), 2))


@settings(max_examples=40)
@given(
    st.sampled_from([1, 2, 3, 5]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from([(2, 3), (4, 4), (6, 2)]),
    st.sampled_from(["zeros", "circular", "reflect"]),
)
def test_convolutions_never_stretch_more_than_the_bound(
    kernel: int, stride: int, padding: int, dilation: int, groups: int, channels: tuple[int, int],
    mode: str,
) -> None:  # fmt: skip
    inputs, outputs = channels
    if inputs % groups or outputs % groups or (mode != "zeros" and padding > 1):
        return
    layer = nn.Conv2d(
        inputs, outputs, kernel, stride, padding, dilation, groups, padding_mode=mode
    ).double()
    size = (inputs, 10, 9)
    identity = torch.eye(math.prod(size)).double().reshape(-1, *size)
    with torch.no_grad():
        matrix = (layer(identity) - layer(torch.zeros(1, *size).double())).flatten(1)
    true = float(torch.linalg.matrix_norm(matrix, 2))
    bound = _convolution(layer)
    assert true <= bound * (1 + 1e-9)
    if mode == "zeros" and stride == 1 and groups == 1:
        assert bound <= 3.5 * true + 1e-9  # and it is not a silly one


class Residuals(nn.Module):
    """Sums, concatenations, scalings, functional calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(4), nn.Linear(8, 3)
        self.norm.running_var.uniform_(0.2, 3.0)
        self.norm.weight.data.uniform_(-2, 2)
        self.register_buffer("shift", torch.randn(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x)) + self.shift
        h = h + 0.5 * self.norm(self.second(h)) / 2 - h
        h = torch.cat([F.max_pool2d(h, 3, 2), F.avg_pool2d(h, 3, 2)], 1)
        h = F.adaptive_avg_pool2d(h, 1).flatten(1)
        return self.last(h * 3 + torch.flatten(h, 1))


class Doubled(nn.Module):
    """One tensor more than once, and broadcasting."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.value, self.last = nn.Linear(4, 6), nn.Linear(4, 1), nn.Linear(12, 3)
        self.shift = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor, factor: float | None = None) -> Tensor:
        h = self.first(x + x.mean(1, keepdim=True))
        h = h + h + self.value(x) + (self.value(x) + self.shift)
        if factor is None:
            h = 2 * h
        return self.last(torch.cat([h, h], 1)).relu_() + 1


NETWORKS = {
    "one tensor twice": (Doubled, (4,)),
    "a bare layer": (lambda: nn.Linear(4, 3), (4,)),
    "mlp": (mlp, (4,)),
    "convolutional": (convolutional, (2, 8, 8)),
    "lenet with batch normalisation": (LeNet, (1, 8, 8)),
    "residual connections": (Residuals, (2, 8, 8)),
    "resnet": (lambda: torchvision.models.resnet18(num_classes=4), (3, 16, 16)),
    "our resnet": (resnet18, (3, 16, 16)),
    "gelu and the like": (
        lambda: nn.Sequential(
            nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 9), nn.LeakyReLU(-1.5), nn.Linear(9, 9),
            nn.ELU(2.0), nn.Linear(9, 9), nn.PReLU(), nn.Tanh(), nn.Dropout(), nn.Linear(9, 3),
        ),
        (4,),
    ),
    "one dimension": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 5, 3), nn.ReLU(), nn.AvgPool1d(2, ceil_mode=True), nn.MaxPool1d(2, 1),
            nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(10, 2),
        ),
        (2, 17),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("build", "shape"), NETWORKS.values(), ids=NETWORKS)
def test_no_jacobian_exceeds_the_bound(build, shape: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
    network = build().eval()
    center, scale = torch.randn(shape), torch.rand(shape) + 0.1
    bound, start, _ = lipschitz(network, center, scale)
    torch.testing.assert_close(start, network(center[None])[0].detach())
    moved = lambda z: network(center + scale * z)  # noqa: E731
    for _ in range(3):
        assert stretch(moved, 3 * torch.randn(shape)) <= bound
    # Differences of outputs, along directions that climb.
    z = torch.randn(5, *shape, requires_grad=True)
    for _ in range(10):
        gap = (moved(z) - start).norm(dim=1) / z.flatten(1).norm(dim=1)
        assert (gap <= bound).all()
        [gradient] = torch.autograd.grad(gap.sum(), z)
        z = z + 0.5 * gradient / gradient.flatten(1).norm(dim=1).reshape(-1, *[1] * len(shape))
        z = z.detach().requires_grad_()


def test_a_linear_network_is_bounded_exactly() -> None:
    network, scale = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), torch.rand(3, 4)
    bound, _, affine = lipschitz(network, torch.zeros(3, 4), scale)
    exact = torch.linalg.matrix_norm(network[1].weight.double() * scale.double().reshape(-1), 2)
    assert bound == pytest.approx(float(exact), rel=1e-5)
    assert affine


class Hooked(nn.Sequential):
    """A hook on the whole network is part of it."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 3))
        self.register_forward_hook(lambda module, args, output: 5 * output)


def test_hooks_of_the_network_count() -> None:
    network = Hooked()
    bound, _, _ = lipschitz(network, torch.zeros(4), torch.ones(4))
    assert bound == pytest.approx(
        5 * float(torch.linalg.matrix_norm(network[0].weight, 2)), rel=1e-4
    )


@pytest.mark.parametrize("factor", [0.9, 1.0])
def test_the_bound_is_reached_where_it_is_tight(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One input, two opposite outputs: a constant that is ten per cent too small is caught."""
    network = nn.Linear(1, 2, bias=False).double()
    network.weight.data = torch.tensor([[1.0], [-1.0]]).double()
    model = rgpr.RGPR(network, layers="input").fit([torch.randn(200, 1).double()])
    true = rgpr.certificate.lipschitz

    def scaled(*args):  # type: ignore[no-untyped-def]
        slope, start, affine = true(*args)
        return factor * slope, start, affine

    monkeypatch.setattr("rgpr.certificate.lipschitz", scaled)
    certificate = model.certify(0.05)
    with torch.no_grad():
        measured = model(at_distance(model, torch.ones(1, 1).double(), certificate.radius)).max()
    # Its outputs are as far apart as their length allows, so nothing is given away.
    assert (float(measured) <= 0.55) == (factor == 1.0)


class Squares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x**2


class Alias(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(x) + x


class Dropped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.9)


class Asks(nn.Module):
    """Whether its input is a tensor, which a traced one is not."""

    def forward(self, x: Tensor) -> Tensor:
        return 100 * x if isinstance(x, Tensor) else x


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (nn.LayerNorm(4), "'0' is a LayerNorm"),
        (nn.Softmax(-1), "'0' is a Softmax"),
        (nn.BatchNorm1d(4, track_running_stats=False), "'0' is a BatchNorm1d without running"),
        (Squares(), "calls pow"),
        (Branches(), "cannot be traced"),
        (Alias(), "in place and uses it again"),
        (Dropped(), "calls dropout"),
        (Asks(), "traced graph does not compute"),
        (nn.LSTM(4, 4), "'0' is a LSTM"),
    ],
)
def test_what_has_no_bound_is_named(part: nn.Module, message: str) -> None:
    with pytest.raises(NotBoundedError, match=message):
        lipschitz(nn.Sequential(part, nn.Linear(4, 2)), torch.zeros(4), torch.ones(4))


def attack(model: rgpr.RGPR, shape: tuple[int, ...], radius: float, limit: float, n: int) -> None:
    """Random directions, and gradient ascent on the confidence, at the radius and beyond."""
    directions = torch.randn(n, *shape, dtype=torch.float64)
    directions = directions.to(next(model.posterior.network.parameters()).dtype)
    for factor in (1.0, 1.5, 10.0, 1e3):
        z = directions.clone()
        for step in range(4):
            x = at_distance(model, z, radius * factor * 1.001).requires_grad_()
            p = model(x).amax(1)
            assert p.double().max() <= limit, (factor, step)
            [gradient] = torch.autograd.grad(p.double().log().sum(), x)
            # Ascent along the sphere: step in proportion to the distance, then back onto it.
            size = gradient.flatten(1).norm(dim=1).clamp_min(1e-30)
            lead = (gradient.flatten(1) / size[:, None]).reshape(z.shape)
            unit = z / z.flatten(1).norm(dim=1).reshape(-1, *[1] * len(shape))
            z = unit + 0.7 * lead


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.sampled_from([2, 3, 10]), st.floats(0.02, 0.3), st.booleans())
def test_random_networks_keep_the_promise(
    seed: int, classes: int, eps: float, offset: bool
) -> None:
    torch.manual_seed(seed)
    network = mlp(4, classes, width=8).double()
    for parameter in network.parameters():
        parameter.data *= 1 + 2 * torch.rand(())
    x = torch.randn(60, 4).double() @ torch.randn(4, 4).double()
    recipe = rgpr.ResidualRecipe(input=rgpr.Strategy(offset=0.9 if offset else None))
    model = rgpr.RGPR(network, residual=recipe).fit([x])
    model.temperature = 0.3 + torch.rand(()).item()
    certificate = model.certify(eps)
    assert certificate.bound(certificate.radius) <= 1 / classes + eps + 1e-6
    attack(model, (4,), certificate.radius, 1 / classes + eps, 20)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tuned", [False, True])
def test_the_digits_model_keeps_it(digits: Task, tuned: bool) -> None:
    model = rgpr.RGPR(digits.network).fit(digits.loader())
    if tuned:
        model.tune([(digits.x, digits.y)])
        assert model.calibration is not None
    certificate = model.certify(0.05)
    attack(model, (64,), certificate.radius, 0.15, 50)
    assert not certificate.covers(digits.x).any()
    assert certificate.covers(at_distance(model, digits.x, 2 * certificate.radius)).all()
    distances = certificate.distance(digits.x)
    assert 4 < distances.median() < 12  # eight is typical of 64 standardised pixels
    # Below the bound at every distance, not only at the radius.
    for distance in (1.0, 100.0, 1e4, 1e6):
        with torch.no_grad():
            measured = model(at_distance(model, digits.x, distance)).amax()
        assert measured <= certificate.bound(distance) + 1e-6


def test_an_image_network_keeps_it() -> None:
    """The LeNet of the experiments, trained on a stand-in for MNIST."""
    torch.manual_seed(0)
    patterns = torch.rand(10, 1, 28, 28)
    y = torch.arange(300) % 10
    x = (patterns[y] + 0.2 * torch.randn(300, 1, 28, 28)).clamp(0, 1)
    network = lenet()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(6):
        for batch, labels in zip(x.split(50), y.split(50), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(network(batch), labels).backward()
            optimizer.step()
    model = rgpr.RGPR(network).fit([(x, y)])
    certificate = model.certify(0.1)
    attack(model, (1, 28, 28), certificate.radius, 0.2, 10)


def test_other_bases() -> None:
    x = torch.randn(60, 4)
    members = [mlp(), mlp()]
    single = [rgpr.RGPR(m).fit([x]).certify(0.1) for m in members]
    ensemble = rgpr.RGPR(members).fit([x])
    both = ensemble.certify(0.1)
    assert both.lipschitz == pytest.approx(sum(c.lipschitz for c in single) / 2)
    attack(ensemble, (4,), both.radius, 1 / 3 + 0.1, 20)
    warm = rgpr.RGPR(Temperature(members[0], 4.0)).fit([x])
    assert warm.certify(0.1).lipschitz == pytest.approx(single[0].lipschitz / 4)
    one = rgpr.RGPR(mlp(4, 1)).fit([x])
    attack(one, (4,), one.certify(0.1).radius, 0.6, 20)
    collector = SWAGCollector(members[0])
    for _ in range(3):
        collector.collect()
    with pytest.raises(NotBoundedError, match="SWAG"):
        rgpr.RGPR(collector.posterior()).fit([x]).certify()


def test_a_constant_network_has_a_near_radius() -> None:
    network = mlp()
    network[-1].weight.data *= 0
    network[-1].bias.data = torch.tensor([3.0, 0.0, 0.0])
    model = rgpr.RGPR(network).fit([torch.randn(60, 4)])
    radius = model.certify(0.05).radius
    assert 1 < radius < 1e4
    attack(model, (4,), radius, 1 / 3 + 0.05, 20)


def test_under_inference_mode_and_in_half_precision() -> None:
    model = rgpr.RGPR(convolutional()).fit([torch.rand(30, 2, 8, 8)])
    with torch.inference_mode():
        assert model.certify(0.1).radius > 1
    with pytest.raises(ValueError, match=r"bfloat16.*roundings"):
        model.bfloat16().certify(0.01)


def test_refusals() -> None:
    x = torch.randn(60, 4)
    model = rgpr.RGPR(mlp()).fit([x])
    for eps in (0.0, 1.0, -0.1):
        with pytest.raises(ValueError, match="eps"):
            model.certify(eps)
    model.sigma2 = [0.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="sigma2 of the input is zero"):
        model.certify()
    with pytest.raises(ValueError, match="regression"):
        rgpr.RGPR(mlp(), likelihood="regression").fit([x]).certify()
    model.sigma2 = [1e-70, 1.0, 1.0]
    with pytest.raises(ValueError, match="raise sigma2"):
        model.certify(1e-4)


def test_it_reads_and_draws(digits: Task, tmp_path: Path) -> None:
    model = rgpr.RGPR(digits.network).fit(digits.loader())
    certificate = model.certify(0.05)
    text = str(certificate)
    assert "Every input at least" in text
    assert "0.15 = 1/10 + 0.05" in text
    certificate.plot(digits.x[:20], tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    wider, narrower = model.certify(0.1), model.certify(0.01)
    assert wider.radius < certificate.radius < narrower.radius


@pytest.mark.skipif(
    "RGPR_DATA" not in os.environ, reason="RGPR_DATA names no folder with mnist.npz"
)
def test_a_network_trained_on_mnist_keeps_it() -> None:
    with np.load(Path(os.environ["RGPR_DATA"]) / "mnist.npz") as file:
        x = torch.from_numpy(file["x_train"][:10_000]).float()[:, None] / 255
        y = torch.from_numpy(file["y_train"][:10_000]).long()
    network = lenet()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for batch, labels in zip(x.split(64), y.split(64), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(network(batch), labels).backward()
        optimizer.step()
    model = rgpr.RGPR(network).fit(list(zip(x.split(500), y.split(500), strict=True)))
    certificate = model.certify(0.05)
    attack(model, (1, 28, 28), certificate.radius, 0.15, 50)
