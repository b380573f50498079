"""The theorem beyond ReLU networks, and the report about its assumptions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import rgpr
from networks import LeNet, mlp
from rgpr.guarantee.certificate import lipschitz_bound

both_residuals = pytest.mark.parametrize("residual", ["onset", "paper"])


class Attention(nn.Module):
    """One block over five tokens, with normalisation and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = h + self.attention(self.norm(h), self.norm(h), self.norm(h))[0]
        return self.last(h.mean(1))


class Cubes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x**3


def activated(activation: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 16), activation, nn.Linear(16, 16), activation, nn.Linear(16, 3)
    )


SMOOTH = {
    "gelu": (lambda: activated(nn.GELU()), (4,)),
    "tanh": (lambda: activated(nn.Tanh()), (4,)),
    "silu": (lambda: activated(nn.SiLU()), (4,)),
    "attention": (Attention, (5, 4)),
}


@pytest.mark.parametrize(("build", "shape"), SMOOTH.values(), ids=SMOOTH)
@both_residuals
def test_the_limit_needs_linear_growth_alone(build, shape: tuple[int, ...], residual: str) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(80, *shape)
    network = build()
    for parameter in network.parameters():
        parameter.data *= 3
    model = rgpr.RGPR(network, residual=residual).fit([x])
    with torch.no_grad():
        assert network(1e3 * x).softmax(1).amax(1).mean() > 0.6
        far = model(1e14 * x)
    torch.testing.assert_close(far, torch.full_like(far, 1 / 3), atol=1e-3, rtol=0)


@both_residuals
def test_a_relu_network_meets_all(residual: str) -> None:
    x = torch.randn(50, 4)
    model = rgpr.RGPR(mlp(), residual=residual).fit([x])
    report = rgpr.check(model)
    assert report.piecewise_affine is True
    assert report.holds is True
    assert report.mean_growth == pytest.approx(1, abs=0.01)
    assert report.variance_growth == pytest.approx(3, abs=0.01)
    # The bound is one, per standard deviation: no output grows faster from one input to another.
    with torch.no_grad():
        outputs = model.posterior.network(x).double()
    coordinates = model.residual.coordinates[0](x).double()
    slopes = torch.cdist(outputs, outputs) / torch.cdist(coordinates, coordinates).clamp_min(1e-9)
    assert 0 < slopes.max() <= report.lipschitz
    # It is the one that the certificate rests on: two logits are apart by the root of two as much.
    bound, _ = lipschitz_bound(model._extension())
    assert bound.slope == pytest.approx(2**0.5 * report.lipschitz, rel=1e-5)
    assert model.certify().radius < float("inf")
    assert "certify() says where" in str(report)
    images = rgpr.RGPR(LeNet().eval(), residual=residual).fit([torch.rand(30, 1, 8, 8)])
    images = rgpr.check(images)
    assert images.piecewise_affine
    assert images.holds


@both_residuals
def test_a_smooth_network_is_proved_too(residual: str) -> None:
    model = rgpr.RGPR(activated(nn.GELU()), residual=residual).fit([torch.randn(50, 4)])
    report = rgpr.check(model)
    assert report.piecewise_affine is False
    assert report.holds is True


@both_residuals
def test_what_cannot_be_bounded_is_measured(residual: str) -> None:
    model = rgpr.RGPR(Attention(), residual=residual).fit([torch.randn(50, 5, 4)])
    report = rgpr.check(model)
    assert report.lipschitz is None
    assert report.holds is None
    assert "'norm' is a LayerNorm" in report.obstacle
    assert report.mean_growth < 1.1
    assert "no proof" in str(report)


@both_residuals
def test_outputs_that_outgrow_the_residual_are_told(residual: str) -> None:
    network = nn.Sequential(nn.Linear(4, 8), Cubes(), nn.Linear(8, 3)).double()
    model = rgpr.RGPR(network, layers="input", residual=residual).fit([torch.randn(50, 4).double()])
    report = rgpr.check(model)
    assert report.mean_growth == pytest.approx(3, abs=0.05)
    assert report.holds is False
    with torch.no_grad():
        far = model(1e8 * torch.randn(50, 4).double())
    assert far.amax(1).median() > 0.9  # and it is true
    with pytest.raises(ValueError, match="regression"):
        rgpr.check(rgpr.RGPR(mlp(), likelihood="regression").fit([torch.randn(50, 4)]))
    silent = mlp()
    silent[-1].weight.data *= 0  # a constant has a bound, and nothing grows
    silent = rgpr.RGPR(silent, residual=residual).fit([torch.randn(50, 4)])
    assert rgpr.check(silent).holds is True
    off = rgpr.RGPR(mlp(), residual=residual).fit([torch.randn(50, 4)])
    off.sigma2 = 0.0
    assert rgpr.check(off).holds is False
    assert "Nothing makes" in str(rgpr.check(off))
