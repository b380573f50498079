"""No network stretches its input by more than its Lipschitz bound, and what has none is refused."""

from __future__ import annotations

import math

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from networks import LeNet, convolutional, mlp
from rgpr.guarantee import Call, NotBoundedError
from rgpr.guarantee.lipschitz import lipschitz
from rgpr.guarantee.table import bound_of_module
from rgpr_paper.training import resnet18


def convolution_bound(layer: nn.Module, quick: bool) -> float:
    call = Call((1.0,), (), torch.Size(), module=layer, quick=quick)
    return bound_of_module(layer).after(call)


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
    bound = convolution_bound(layer, quick=False)
    assert true <= bound * (1 + 1e-9)
    assert convolution_bound(layer, quick=True) <= bound * (1 + 1e-9)
    if mode == "zeros" and stride == 1 and groups == 1:
        assert bound <= 3.5 * true + 1e-9  # and it is not a silly one


BETWEEN = {
    "one dimension": [(9, 6.5)],
    "a long kernel": [(15, 4.5)],
    "one frequency higher": [(11, 12.5)],
    "an even kernel": [(8, 5.5)],
    "two dimensions": [(9, 8.5), (9, 6.5)],
}


@pytest.mark.parametrize("waves", BETWEEN.values(), ids=BETWEEN)
def test_a_convolution_that_is_strongest_between_the_grid_points(
    waves: list[tuple[int, float]],
) -> None:
    """Kernels that are waves of a frequency half a step off the grid of the Fourier symbol."""
    phases = [2 * math.pi / 32 * step * torch.arange(n).double() for n, step in waves]
    kernel = torch.cos(torch.stack(torch.meshgrid(*phases, indexing="ij")).sum(0))
    build, size = (nn.Conv1d, (400,)) if len(waves) == 1 else (nn.Conv2d, (36, 36))
    layer = build(1, 1, kernel.shape, padding=tuple(n // 2 for n, _ in waves), bias=False).double()
    layer.weight.data = kernel[None, None]
    x = torch.eye(math.prod(size)).double().reshape(-1, 1, *size)
    with torch.no_grad():
        true = float(torch.linalg.matrix_norm(layer(x).flatten(1), 2))
    # At the points of the grid the symbol is smaller than the norm: only the slack covers it.
    assert torch.fft.fftn(kernel, s=[32] * len(waves)).abs().max() < 0.995 * true
    assert true <= convolution_bound(layer, quick=False) < 1.4 * true


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([1, 2]))
def test_no_signal_is_stretched_more_than_the_symbol_says(seed: int, dimensions: int) -> None:
    """Random kernels, also of several channels, on long signals, with strides and groups."""
    torch.manual_seed(seed)
    channels, kernel = 2 * int(torch.randint(1, 3, ())), int(torch.randint(2, 7, ()))
    stride, groups = int(torch.randint(1, 3, ())), int(torch.randint(1, 3, ()))
    build, size = ((nn.Conv1d, (90,)), (nn.Conv2d, (14, 14)))[dimensions - 1]
    layer = build(channels, 4, kernel, stride, kernel // 2, groups=groups, bias=False).double()
    layer.weight.data = torch.randn_like(layer.weight) * torch.rand(()).double().exp()
    x = torch.eye(channels * math.prod(size)).double().reshape(-1, channels, *size)
    with torch.no_grad():
        true = float(torch.linalg.matrix_norm(layer(x).flatten(1), 2))
    bound = convolution_bound(layer, quick=False)
    assert true <= bound * (1 + 1e-9)
    assert convolution_bound(layer, quick=True) <= bound * (1 + 1e-9)


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
    quick, again, _ = lipschitz(network, center, scale, quick=True)
    assert quick <= bound * (1 + 1e-9)
    torch.testing.assert_close(again, start)
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
    assert bound == pytest.approx(exact.item(), rel=1e-5)
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
        5 * torch.linalg.matrix_norm(network[0].weight, 2).item(), rel=1e-4
    )


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


# -- numbers, tuples and memory that a constant could get lost in ---------------------------------


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, 1)
        return 100 * first + second


class OwnFactor(nn.Module):
    """A number that depends on the input makes a square of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return x * F.relu(x).mean().item()


class ChangedView(nn.Module):
    """The sum of two tensors in the same memory: its slope is twice that of one."""

    def __init__(self) -> None:
        super().__init__()
        self.view, self.change = nn.Flatten(), nn.Hardswish(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.view(x)) + x


class Bits(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(torch.int32).float()


class IntoBuffer(nn.Module):
    """The buffer is the input's tanh after the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x, out=self.kept) + 100 * self.kept


class Weighted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, x, alpha=100)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Halves(), "calls chunk in '0', a Halves"),
        (OwnFactor(), "calls item"),
        (ChangedView(), "in place and uses it again"),
        (Bits(), "calls view"),
        (IntoBuffer(), "calls tanh"),
        (Weighted(), "calls add"),
        (nn.MaxPool1d(1, return_indices=True), "is a MaxPool1d"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_no_constant_gets_lost(part: nn.Module, message: str) -> None:
    with pytest.raises(NotBoundedError, match=message):
        lipschitz(nn.Sequential(part, nn.Identity()), torch.randn(4), torch.ones(4))


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def test_outputs_must_be_one_tensor() -> None:
    with pytest.raises(NotBoundedError, match="returns tuple, not a tensor"):
        lipschitz(Pair(), torch.randn(4), torch.ones(4))


class Functional(nn.Module):
    """Layers as functions of parameters, sizes, and a change in place of what is not read again."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(4, 2, 3, 3))
        self.weight = nn.Parameter(torch.randn(3, 4 * 2 * 2))

    def forward(self, x: Tensor) -> Tensor:
        h = F.conv2d(x, self.kernel, None, 2, padding=1).view(x.size(0), 4, x.shape[2] // 2, 4)
        h = F.hardswish(F.avg_pool2d(F.max_pool2d(h, 2, 1, 1), 2), inplace=True)
        return F.linear(F.dropout(h, training=False).flatten(1), self.weight)


def test_layers_as_functions_have_the_bounds_of_modules() -> None:
    network = Functional()
    convolution, linear = nn.Conv2d(2, 4, 3, 2, 1), nn.Linear(16, 3, bias=False)
    convolution.weight, linear.weight = network.kernel, network.weight
    modules = nn.Sequential(
        convolution, nn.MaxPool2d(2, 1, 1), nn.AvgPool2d(2), nn.Hardswish(), nn.Flatten(), linear
    )
    center, scale = torch.randn(2, 8, 8), torch.rand(2, 8, 8) + 0.1
    for quick in (True, False):
        ours, theirs = (lipschitz(n, center, scale, quick=quick)[0] for n in (network, modules))
        assert ours == pytest.approx(theirs, rel=1e-9)
    assert stretch(lambda z: network(center + scale * z), 3 * torch.randn(2, 8, 8)) <= ours
