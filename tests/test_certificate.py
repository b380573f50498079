"""Certificates: their bounds are reached where they are tight, and attacks do not break them."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import rgpr
from networks import Task, convolutional, laplace_over_blobs, mlp
from rgpr.guarantee import NotBoundedError
from rgpr.guarantee.bounds import HeadBound, InputKernel, LipschitzBound
from rgpr.guarantee.certificate import lipschitz_bound
from rgpr.guarantee.growth import growth
from rgpr.guarantee.head import _widest, head_bound
from rgpr.guarantee.inputs import at_distance
from rgpr.guarantee.lipschitz import lipschitz
from rgpr.posteriors import Posterior, SWAGCollector, Temperature
from rgpr.posteriors.gaussian import DiagonalGaussian, Gaussian
from rgpr_paper.training import lenet

# -- where a bound is reached ---------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.9, 1.0])
def test_the_bound_is_reached_where_it_is_tight(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One input, two opposite outputs: a constant that is ten per cent too small is caught."""
    network = nn.Linear(1, 2, bias=False).double()
    network.weight.data = torch.tensor([[1.0], [-1.0]]).double()
    model = rgpr.RGPR(network, layers="input", residual="paper").fit([torch.randn(200, 1).double()])
    true = lipschitz

    def scaled(*args, **kwargs):  # type: ignore[no-untyped-def]
        slope, start, affine = true(*args, **kwargs)
        return factor * slope, start, affine

    monkeypatch.setattr("rgpr.guarantee.growth.lipschitz", scaled)
    certificate = model.certify(0.05)
    assert certificate.by == "lipschitz"
    with torch.no_grad():
        measured = model(
            at_distance(model._extension(), torch.ones(1, 1).double(), certificate.radius)
        ).max()
    # Its outputs are as far apart as their length allows, so nothing is given away.
    assert (float(measured) <= 0.55) == (factor == 1.0)


class Told(nn.Linear):
    """A hidden layer that gives what it is told to, once it is told anything."""

    told: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.told is None else self.told


class Beside(nn.Module):
    """Outputs that are linear in the input, and a hidden layer that they do not depend on."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.beside, self.last = nn.Linear(inputs, 2), nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        self.beside(x)
        return self.last(x)


class Steered(nn.Module):
    """The input of the head can be told, and another hidden layer does not matter."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.beside, self.hidden = nn.Linear(inputs, 2), Told(inputs, width)
        self.last = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        self.beside(x)
        return self.last(self.hidden(x))


def silence(model: rgpr.RGPR, index: int = 1) -> None:
    """Let a layer find every input usual: nothing is left of a geometric mean that it is in."""
    coordinates = model._fitted().at(index)
    coordinates.offset = torch.full_like(coordinates(torch.zeros(1, 2).double())[0], 1e300)


def at_corner(model: rgpr.RGPR, signs: Tensor, distance: float) -> Tensor:
    """The input at this distance whose coordinates are equally large: its cubes are smallest."""
    coordinates = model._fitted().at(0)
    z = distance * signs.double() / math.sqrt(len(signs))
    return (coordinates.mean + coordinates.scale * z)[None]


def signs_of(count: int) -> Tensor:
    return torch.randint(0, 2, (count,)).double() * 2 - 1


@pytest.mark.parametrize("residual", ["paper", "onset"])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize(
    ("entries", "offset", "scale", "temperature"),
    [
        (1, 0.0, 1.0, 1.0),
        (2, 0.0, 100.0, 0.5),
        (64, 0.0, 1.0, 1.0),
        (64, 0.0, 0.01, 3.0),
        (1, 50.0, 1.0, 1.0),
        (9, 50.0, 7.0, 0.2),
        (64, 400.0, 1.0, 1.0),
    ],
)
def test_the_lipschitz_bound_is_reached(
    entries: int, offset: float, scale: float, temperature: float, outputs: int, residual: str
) -> None:
    """Opposite outputs, all entries equally far out, all offsets equal: no step gives away."""
    network = Beside(entries, outputs).double()
    model = rgpr.RGPR(network, layers=["beside"], residual=residual)
    model.fit([(torch.randn(50, entries).double() * 3 + 1, torch.arange(50) % 2)])
    model.sigma2, model.temperature = scale * model.sigma2, temperature
    silence(model)
    inputs = model._fitted().at(0)
    inputs.offset = torch.full((entries,), offset).double() if offset else None
    signs, poles = signs_of(entries), torch.tensor([1.0, -1.0]).double()[:outputs, None]
    network.last.weight.data = poles * (signs / inputs.scale) * 4
    network.last.bias.data = poles[:, 0] * 2 - network.last.weight.data @ inputs.mean
    certificate = model.certify(0.1)
    assert certificate.by == "lipschitz"
    assert "none of the layers" in certificate.obstacles["head"]
    with torch.no_grad():
        measured = model(at_corner(model, signs, certificate.radius)).max()
        assert 0.6 - 1e-5 < measured <= 0.6
        # Beyond the peak it is reached at every distance, and before the peak it is kept.
        for factor in (1e-3, 1e-2, 0.1, 0.5, 2.0, 100.0):
            distance = factor * certificate.radius
            measured = float(model(at_corner(model, signs, distance)).max())
            bound = certificate.bound(distance)
            assert measured <= bound + 1e-12
            if distance > certificate.bounds["lipschitz"]._peak:  # type: ignore[attr-defined]
                assert measured == pytest.approx(bound, abs=1e-5)


class Unlike(Posterior):
    """A network whose outputs have variances of their own, unlike for each class."""

    def __init__(self, network: nn.Module, variances: Sequence[float]) -> None:
        super().__init__(network)
        self.register_buffer("variances", torch.tensor(variances, dtype=torch.float64))

    def forward(self, x: Tensor) -> Gaussian:
        return DiagonalGaussian(self.point(x), self.variances)

    def mean_parts(self) -> list[tuple[nn.Module, float]]:
        return [(self.network, 1.0)]


# Coordinates of the head's input, its width, entries of the input, offsets of both, factor on
# sigma2, temperature, size of the head's weights, what is allowed.
CASES = {
    "one number": ("prototypes", 1, 1, 0.0, 0.0, 1.0, 1.0, 1.0, 0.1),
    "many entries": ("prototypes", 1, 40, 0.0, 0.0, 1.0, 1.0, 1.0, 0.1),
    "a wide layer": ("prototypes", 12, 3, 0.0, 0.0, 1.0, 1.0, 1.0, 0.1),
    "near the onset": ("prototypes", 12, 3, 0.0, 0.0, 1.0, 1.0, 0.03, 0.25),
    "near the onset, another scale": ("prototypes", 5, 3, 0.0, 0.0, 30.0, 0.6, 0.03, 0.3),
    "strong weights": ("prototypes", 4, 3, 0.0, 0.0, 1.0, 1.0, 40.0, 0.05),
    "an offset of the input": ("prototypes", 4, 30, 60.0, 0.0, 1.0, 1.0, 0.2, 0.2),
    "an offset of the last layer": ("prototypes", 4, 3, 0.0, 20.0, 1.0, 1.0, 0.3, 0.2),
    "scale and temperature": ("prototypes", 4, 3, 0.0, 0.0, 50.0, 2.5, 1.0, 0.1),
    "a low temperature": ("prototypes", 4, 3, 0.0, 0.0, 0.02, 0.3, 1.0, 0.1),
    "all of it": ("prototypes", 7, 20, 30.0, 5.0, 0.1, 1.7, 0.5, 0.15),
    "whitened": ("whitened", 6, 5, 0.0, 3.0, 2.0, 1.3, 0.5, 0.15),
    "moments": ("moments", 8, 5, 0.0, 0.0, 2.0, 1.3, 0.5, 0.15),
    "moments with offsets": ("moments", 8, 5, 10.0, 20.0, 2.0, 1.3, 0.5, 0.15),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("combine", ["sum", "onset"])
@pytest.mark.parametrize("outputs", [1, 2, 4])
@pytest.mark.parametrize("certain", [True, False])
def test_the_head_bound_is_reached(
    case: tuple[str, int, int, float, float, float, float, float, float],
    combine: str,
    outputs: int,
    certain: bool,
) -> None:
    """The head's input goes where its logits are furthest apart, at every distance in turn."""
    kind, width, entries, offset, offset_of_last, scale, temperature, size, eps = case
    network = Steered(entries, width, outputs).double()
    if not certain and outputs > 2:
        return  # no more than two logits can be as far from zero as the bound says
    base = network if certain else Unlike(network, [0.0] * outputs)
    recipe = rgpr.ResidualRecipe(hidden=rgpr.Strategy(kind, "pooled"), combine=combine)
    model = rgpr.RGPR(base, layers=["beside", "hidden"], residual=recipe)
    x, y = torch.randn(60, entries).double() * 2 - 1, torch.arange(60) % max(2, outputs)
    model.fit([(x, y)])
    with torch.no_grad():
        h = network.hidden(x)
    model.sigma2, model.temperature = scale * model.sigma2, temperature
    silence(model)
    inputs, last = model._fitted().at(0), model._fitted().at(2)
    if offset:
        inputs.offset = torch.full((entries,), offset).double()
    if offset_of_last:
        last.offset = torch.full_like(last(h)[0], offset_of_last)
    # The points from which the last layer is measured, and the direction of the largest growth.
    if kind == "prototypes":
        anchors = torch.stack([h[y == k].mean(0) for k in range(max(2, outputs))])
    else:
        anchors = h.mean(0)[None]
    signs = signs_of(width)
    weight = signs / h.std(0, correction=0) if kind == "moments" else torch.randn(width).double()
    if kind == "moments":
        lead = signs * h.std(0, correction=0)
    else:
        lead = torch.linalg.solve(last.axes @ last.axes.T, weight)
    # One class against all others, which are alike.
    poles = torch.tensor([1.0] + [-1.0] * (outputs - 1)).double()[:, None]
    network.last.weight.data = size * poles * weight
    network.last.bias.data = poles[:, 0] * (1.5 - size * (anchors @ weight).mean())
    start = anchors[(anchors @ weight).argmax()]
    with torch.no_grad():
        lead = lead / float(last((start + 1e6 * lead)[None]).abs().max()) * 1e6

    classes = max(2, outputs)
    certificate = model.certify(eps)
    radius, bound = certificate.radii["head"], certificate.bounds["head"]
    assert isinstance(bound, HeadBound)
    corner = at_corner(model, signs_of(entries), radius)
    steps = torch.logspace(-6, 10, 3000, dtype=torch.float64)
    network.hidden.told = start + (steps[:, None] + offset_of_last) * lead
    with torch.no_grad():
        measured = model(corner.expand(len(steps), -1))[:, -1 if outputs == 1 else 0].max()
    limit = 1 / classes + eps
    assert measured <= limit
    if radius > bound.kernel.distance(0.0):  # before the onset, something is given away
        assert measured > limit - 1e-4
    # The two methods are inverse to each other.
    for distance in (radius, 3 * radius, 100 * radius):
        assert bound.radius(bound.gap(distance)) == pytest.approx(distance, rel=1e-6)


@pytest.mark.parametrize("combine", ["sum", "onset"])
def test_common_parts_of_logits_count_where_variances_differ(combine: str) -> None:
    """Equal logits whose variances are unlike are not equal after the probit."""
    network = Steered(3, 4, 2).double()
    recipe = rgpr.ResidualRecipe(hidden=rgpr.Strategy("prototypes", "pooled"), combine=combine)
    model = rgpr.RGPR(Unlike(network, [0.0, 1e12]), layers=["beside", "hidden"], residual=recipe)
    model.fit([(torch.randn(60, 3).double(), torch.arange(60) % 2)])
    silence(model)
    # The second logit is nearly the first, and vanishes under its variance.
    weight = torch.randn(4).double()
    network.last.weight.data = torch.stack([weight, 0.99 * weight])
    network.last.bias.data = torch.tensor([1.0, 1.0]).double()
    certificate = model.certify(0.1)
    axes = model._fitted().at(2).axes
    lead = torch.linalg.solve(axes @ axes.T, weight)
    corner = at_corner(model, signs_of(3), certificate.radii["head"])
    network.hidden.told = torch.logspace(-6, 10, 2000, dtype=torch.float64)[:, None] * lead
    with torch.no_grad():
        measured = model(corner.expand(2000, -1)).max()
    assert 0.54 < measured <= 0.6
    sure = rgpr.RGPR(network, layers=["beside", "hidden"], residual=recipe)
    sure.posterior.network.hidden.told = None
    sure.fit([(torch.randn(60, 3).double(), torch.arange(60) % 2)])
    assert sure.certify(0.1).radii["head"] < 1e-2 * certificate.radii["head"]


@settings(max_examples=200)
@given(
    st.integers(1, 5000),
    st.floats(1e-6, 1e3),
    st.floats(0, 20),
    st.floats(0, 100),
    st.floats(0, 1e4),
    st.floats(0, 1e4),
    st.floats(1e-6, 1e3),
    st.floats(1e-3, 10),
)
def test_radii_are_the_last_points_where_the_gap_is_exceeded(
    entries: int, weight: float, kappa: float, offset: float, slope: float, start: float,
    last: float, gap: float,
) -> None:  # fmt: skip
    """Both bounds against the quotients that they are about, on grids of numbers."""
    kernel = InputKernel(entries, weight, kappa, offset)
    distances = torch.logspace(-3, 12, 4000, dtype=torch.float64)
    u = (entries ** (-1 / 6) * distances - offset).clamp_min(0) ** 3 / (3 * entries)

    lipschitz = LipschitzBound(kernel, slope, start)
    radius = lipschitz.radius(gap)
    quotients = (start + slope * distances) / (1 + (weight * u - kappa).clamp_min(0)).sqrt()
    assert (quotients[distances >= radius] <= gap * (1 + 1e-9)).all()
    beyond = (quotients > gap).nonzero()
    if len(beyond) and radius < 1e12:
        assert radius <= distances[min(len(distances) - 1, int(beyond[-1]) + 1)] * (1 + 1e-9)
    for distance in (0.0, 1.0, 1e3, 1e6):
        later = quotients[distances >= distance].max()
        assert later <= lipschitz.gap(distance) * (1 + 1e-9)

    head = HeadBound(kernel, slope, start, last)
    radius = head.radius(gap)
    t = torch.cat([torch.zeros(1).double(), torch.logspace(-9, 30, 6000, dtype=torch.float64)])
    if radius < 1e25:
        for factor in (1.0, 2.0, 1e3):
            total = (kernel.at(factor * radius) + last * t**3 / 3).clamp_min(0)
            assert ((start + slope * t) / (1 + total).sqrt() <= gap * (1 + 1e-9)).all()
        # It is reached, unless that is before the onset.
        total = kernel.at(radius * (1 - 1e-3)) + last * t**3 / 3
        reached = ((start + slope * t) / (1 + total.clamp_min(0)).sqrt() >= gap * (1 - 1e-2)).any()
        assert reached or radius <= kernel.distance(0.0) * (1 + 1e-5)


# -- attacks --------------------------------------------------------------------------------------


def directions(model: rgpr.RGPR, shape: tuple[int, ...], n: int) -> Tensor:
    """Where to look, in standardised units, ``(n + ..., entries)``.

    Random directions, single entries up and down, and those in which the first layer changes most
    and least: in its null space, if it has one, no hidden layer notices anything.
    """
    entries = math.prod(shape)
    found = [torch.randn(n, entries).double()]
    single = torch.eye(entries).double()[torch.randperm(entries)[:4]]
    found += [single, -single]
    network = model.posterior.network
    first = next(m for m in network.modules() if isinstance(m, nn.Linear | nn.Conv2d))
    if entries <= 200:
        jacobian = torch.autograd.functional.jacobian(
            lambda z: first(from_standardised(model, z[None], shape))[0].flatten(),
            torch.zeros(entries).double(),
        )
        rows = torch.linalg.svd(jacobian.double()).Vh
        found += [rows[:2], -rows[:2], rows[-4:], -rows[-4:]]
    return torch.cat(found)


def from_standardised(model: rgpr.RGPR, z: Tensor, shape: tuple[int, ...]) -> Tensor:
    inputs = model._fitted().at(0)
    x = inputs.mean.double() + inputs.scale.double() * z
    return x.reshape(-1, *shape).to(next(model.posterior.network.parameters()).dtype)


def attack(model: rgpr.RGPR, shape: tuple[int, ...], radius: float, limit: float, n: int) -> None:
    """Gradient ascent on the confidence, from many directions, at the radius and beyond."""
    begin = directions(model, shape, n)
    for factor in (1.0, 1.5, 10.0, 1e3):
        unit = begin / begin.norm(dim=1, keepdim=True)
        for step in range(4):
            z = (unit * radius * factor * (1 + 1e-6)).requires_grad_()
            p = model(from_standardised(model, z, shape)).amax(1)
            assert p.double().max() <= limit, (factor, step)
            [gradient] = torch.autograd.grad(p.double().log().sum(), z)
            # Ascent along the sphere: step in proportion to the distance, then back onto it.
            unit = unit + 0.7 * gradient / gradient.norm(dim=1, keepdim=True).clamp_min(1e-30)
            unit = unit / unit.norm(dim=1, keepdim=True)


RECIPES = {
    "onset": "onset",
    "paper": "paper",
    "paper with an offset": rgpr.ResidualRecipe(input=rgpr.Strategy(offset=0.9)),
    "onset with offsets": rgpr.ResidualRecipe(
        input=rgpr.Strategy(offset=0.5),
        hidden=rgpr.Strategy("prototypes", "pooled", offset=0.9),
        combine="onset",
    ),
    "whitened": rgpr.ResidualRecipe(hidden=rgpr.Strategy("whitened", "pooled", offset=1.0)),
    "pooled moments": rgpr.ResidualRecipe(
        hidden=rgpr.Strategy("moments", "pooled", offset=1.0), combine="onset"
    ),
}


class Attention(nn.Module):
    """Two blocks over five tokens, with a narrow embedding; nothing in them is Lipschitz."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embed, self.last = nn.Linear(8, 6), nn.Linear(6, outputs)
        self.attend = nn.ModuleList(nn.MultiheadAttention(6, 2, batch_first=True) for _ in "ab")
        self.widen, self.narrow = nn.Linear(6, 12), nn.Linear(12, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for attend in self.attend:
            z = self.norm(h)
            h = h + attend(z, z, z, need_weights=False)[0]
            h = h + self.narrow(F.gelu(self.widen(h)))
        return self.last(h.mean(1))


BUILDS = {
    "mlp": ((7,), lambda outputs, depth: mlp(7, outputs, width=5, hidden=depth)),
    "convolutional": ((2, 8, 8), lambda outputs, depth: convolutional(outputs)),
    "attention": ((5, 8), lambda outputs, depth: Attention(outputs)),
}


@pytest.mark.parametrize("kind", BUILDS)
@settings(max_examples=25)
@given(
    st.integers(0, 10**6),
    st.integers(1, 8),
    st.sampled_from([1, 2, 3, 10]),
    st.floats(0.02, 0.3),
    st.sampled_from(sorted(RECIPES)),
)
def test_random_networks_keep_the_promise(
    kind: str, seed: int, depth: int, outputs: int, eps: float, recipe: str
) -> None:
    torch.manual_seed(seed)
    shape, build = BUILDS[kind]
    network = build(outputs, depth).double()
    for parameter in network.parameters():
        parameter.data *= 1 + 2 * torch.rand(())
    entries, classes = math.prod(shape), max(2, outputs)
    x = (torch.randn(60, entries).double() @ torch.randn(entries, entries).double()).reshape(
        60, *shape
    )
    labels = torch.arange(60) % classes
    model = rgpr.RGPR(network, residual=RECIPES[recipe]).fit([(x, labels) if seed % 2 else x])
    model.temperature = 0.3 + torch.rand(()).item()
    certificate = model.certify(eps)
    assert "head" in certificate.radii
    assert certificate.bound(certificate.radius) <= 1 / classes + eps + 1e-6
    attack(model, shape, certificate.radius, 1 / classes + eps, 15)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 8), st.sampled_from([1, 2, 3]))
def test_what_is_left_out_is_larger(seed: int, depth: int, outputs: int) -> None:
    """Both radii hold, and a Lipschitz bound that is not computed would not have been smaller."""
    torch.manual_seed(seed)
    network = mlp(4, outputs, width=8, hidden=depth).double()
    for parameter in network.parameters():
        parameter.data *= 0.2 + 3 * torch.rand(())
    residual = "paper" if seed % 2 else "onset"
    model = rgpr.RGPR(network, residual=residual).fit([torch.randn(60, 4).double()])
    certificate = model.certify(0.1)
    classes = max(2, outputs)
    gap = math.log((classes - 1) * (1 / classes + 0.1) / (1 - 1 / classes - 0.1))
    with torch.no_grad():
        whole = lipschitz_bound(model._extension())[0].radius(gap)
    if "lipschitz" in certificate.radii:
        assert certificate.radii["lipschitz"] == pytest.approx(whole, rel=1e-6)
        assert certificate.radius == pytest.approx(min(certificate.radii.values()), rel=1e-6)
    else:
        least = float(certificate.obstacles["lipschitz"].rpartition(" ")[2])
        assert certificate.radius < least < whole * 1.01
    for radius in certificate.radii.values():
        attack(model, (4,), radius, 1 / classes + 0.1, 5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["fitted", "calibrated", "paper", "tuned"])
def test_the_digits_model_keeps_it(digits: Task, how: str) -> None:
    residual = "paper" if how in ("paper", "tuned") else "onset"
    model = rgpr.RGPR(digits.network, residual=residual).fit(digits.loader())
    if how == "calibrated":
        model.calibrate([(digits.x, digits.y)])
    if how == "tuned":
        model.tune([(digits.x, digits.y)], temperature=True)
    certificate = model.certify(0.05)
    attack(model, (64,), certificate.radius, 0.15, 50)
    assert not certificate.covers(digits.x).any()
    assert certificate.covers(
        at_distance(model._extension(), digits.x, 2 * certificate.radius)
    ).all()
    distances = certificate.distance(digits.x)
    assert 4 < distances.median() < 12  # eight is typical of 64 standardised pixels
    # Below the bound at every distance, not only at the radius.
    for distance in (1.0, 100.0, 1e4, 1e6):
        with torch.no_grad():
            measured = model(at_distance(model._extension(), digits.x, distance)).amax()
        assert measured <= certificate.bound(distance) + 1e-6


@pytest.fixture(scope="module")
def by_depth(digits: Task) -> dict[int, nn.Module]:
    """Networks of 1, 2, 4 and 8 hidden layers, trained on digits."""
    x, y = digits.train.tensors
    networks: dict[int, nn.Module] = {}
    for hidden in (1, 2, 4, 8):
        torch.manual_seed(0)
        network = mlp(64, 10, width=64, hidden=hidden)
        for parameter in network.parameters():
            if parameter.dim() == 2:
                nn.init.kaiming_normal_(parameter, nonlinearity="relu")
        optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
        for _ in range(20):
            for batch in torch.randperm(len(x)).split(64):
                optimizer.zero_grad()
                F.cross_entropy(network(x[batch]), y[batch]).backward()
                optimizer.step()
        with torch.no_grad():
            assert (network(digits.x).argmax(1) == digits.y).double().mean() > 0.92
        networks[hidden] = network.eval()
    return networks


@pytest.mark.parametrize("residual", ["paper", "onset"])
def test_the_radius_stays_moderate_with_depth(
    by_depth: dict[int, nn.Module], digits: Task, residual: str
) -> None:
    """From one hidden layer to eight it grows by less than 20; by the Lipschitz constant, 1e4."""
    head, lipschitz = {}, {}
    for hidden, network in by_depth.items():
        model = rgpr.RGPR(network, residual=residual).fit(digits.loader())
        if residual == "paper":
            model.sigma2 = 1.0
        certificate = model.certify(0.05)
        assert certificate.by == "head"
        if hidden == 8:
            assert "it is at least" in certificate.obstacles["lipschitz"]
        head[hidden] = certificate.radius
        with torch.no_grad():
            bound = lipschitz_bound(model._extension())[0]
        lipschitz[hidden] = bound.radius(math.log(9 * 0.15 / 0.85))
        attack(model, (64,), certificate.radius, 0.15, 10)
    assert head[8] < 20 * head[1]
    assert lipschitz[8] > 1e4 * lipschitz[1]


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


@pytest.mark.parametrize("size", [3, 4])
def test_the_head_is_found_behind_a_last_stage_of_any_size(size: int) -> None:
    """Images of one pixel are pooled to the same numbers, which are not the same memory."""
    network = nn.Sequential(
        nn.Conv2d(2, 8, 2), nn.ReLU(), nn.Conv2d(8, 6, 2), nn.Sigmoid(), Pooled(), nn.Linear(6, 3)
    )
    model = rgpr.RGPR(network).fit([torch.randn(80, 2, size, size)])
    assert model.layers == ["input", "1", "5:input"]
    assert "head" in model.certify(0.05).radii


class Pooled(nn.Module):
    """The mean over positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def test_other_bases() -> None:
    x = torch.randn(60, 4)
    members = [mlp(), mlp()]
    single = [rgpr.RGPR(m).fit([x]) for m in members]
    ensemble = rgpr.RGPR(members).fit([x])
    both = ensemble.certify(0.1)
    assert both.by == "lipschitz"
    assert "Ensemble" in both.obstacles["head"]
    with torch.no_grad():
        slopes = [growth(model._extension())[0] for model in single]
        assert growth(ensemble._extension())[0] == pytest.approx(sum(slopes) / 2)
    attack(ensemble, (4,), both.radius, 1 / 3 + 0.1, 20)
    warm, cold = rgpr.RGPR(Temperature(members[0], 4.0)).fit([x]), single[0]
    with torch.no_grad():
        assert growth(warm._extension())[0] == pytest.approx(slopes[0] / 4)
    for name in ("slope", "start"):
        ours, theirs = (getattr(m.certify(0.1).bounds["head"], name) for m in (warm, cold))
        assert ours == pytest.approx(theirs / 4)
    attack(warm, (4,), warm.certify(0.1).radius, 1 / 3 + 0.1, 20)
    one = rgpr.RGPR(mlp(4, 1)).fit([x])
    attack(one, (4,), one.certify(0.1).radius, 0.6, 20)
    collector = SWAGCollector(members[0])
    for _ in range(3):
        collector.collect()
    with pytest.raises(NotBoundedError, match="SWAG"):
        rgpr.RGPR(collector.posterior()).fit([x]).certify()


@pytest.mark.parametrize("residual", ["paper", "onset"])
@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_a_laplace_base_keeps_it(residual: str, structure: str) -> None:
    """Its variances differ from class to class."""
    la, x, y = laplace_over_blobs("classification", structure)
    model = rgpr.RGPR(la, residual=residual).fit([(x, y)])
    certificate = model.certify(0.1)
    assert "head" in certificate.radii
    assert not model.posterior.is_certain
    attack(model, (4,), certificate.radius, 1 / 3 + 0.1, 20)


# -- whose input the head's is --------------------------------------------------------------------


class Between(nn.Module):
    """Something between the hidden layer and the head."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.hidden, self.last, self.between = nn.Linear(4, 6), nn.Linear(6, 3), between
        # So far up that a ReLU changes nothing at any input that one might try.
        self.hidden.bias.data += 1e6

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.hidden(x)))


def add_sliver(h: Tensor) -> Tensor:
    h += 1e-30
    return h


SAME = {
    "nothing": nn.Identity(),
    "dropout": nn.Dropout(),
    "a view": lambda h: h.reshape(-1, 6, 1, 1).flatten(1),
}
OTHER = {
    "a function": F.relu,
    "a function in place": F.relu_,
    "a module in place": nn.ReLU(inplace=True),
    "an assignment in place": add_sliver,
    "another order": lambda h: h.flip(1),
}


@pytest.mark.parametrize("between", [*SAME, *OTHER])
def test_the_head_must_be_given_what_was_measured(between: str) -> None:
    """Equal values at some inputs are no proof for others: it must be the same memory."""
    network = Between((SAME | OTHER)[between])
    model = rgpr.RGPR(network, layers=["hidden"]).fit([torch.randn(60, 4)])
    if between in SAME:
        assert "head" in model.certify(0.1).bounds
    else:
        with pytest.raises(NotBoundedError, match=r"fit with layers=\['hidden', 'last:input'\]"):
            head_bound(model._extension())
    named = rgpr.RGPR(network, layers=["last:input"]).fit([torch.randn(60, 4)])
    assert "head" in named.certify(0.1).bounds


class Scaled(nn.Module):
    """Changes what its linear layer made, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.hidden(x))).mul_(100)


def test_what_happens_after_the_head_counts() -> None:
    x = torch.randn(60, 4)
    with pytest.raises(NotBoundedError, match="not those of a linear layer"):
        rgpr.RGPR(Scaled()).fit([x]).certify(0.1)
    hooked = mlp()
    hooked[-1].register_forward_hook(lambda module, args, output: 100 * output)
    with pytest.raises(NotBoundedError, match="remove its hooks"):
        rgpr.RGPR(hooked).fit([x]).certify(0.1)


def test_layers_that_bound_nothing() -> None:
    x = torch.randn(60, 4)
    recipe = rgpr.ResidualRecipe(hidden=rgpr.Strategy("prototypes", "normalised"))
    bounded = rgpr.RGPR(mlp(), residual=recipe).fit([x]).certify(0.1)
    assert "bounded coordinates" in bounded.obstacles["head"]
    model = rgpr.RGPR(mlp()).fit([x])
    model.sigma2 = [1.0, 1.0, 0.0]
    assert "sigma2 is zero" in model.certify(0.1).obstacles["head"]


@pytest.mark.parametrize("recipe", ["onset", "paper", "pooled moments", "whitened"])
@pytest.mark.parametrize("classes", [2, 7, 40])
def test_the_widest_pair_of_many(
    recipe: str, classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pairs at once against one pair after another."""
    monkeypatch.setattr("rgpr.guarantee.head._ROWS", 16)
    model = rgpr.RGPR(mlp(4, classes), residual=RECIPES[recipe]).fit([torch.randn(60, 4)])
    coordinates, W = model._fitted().at(2), 100 + torch.randn(classes, 16).double()
    one_by_one = max(float(coordinates.spread_of(W - row).max()) for row in W)
    with torch.no_grad():
        found = float(_widest(W, coordinates))
    assert found == pytest.approx(one_by_one, rel=1e-9)


@pytest.mark.parametrize("residual", ["paper", "onset"])
def test_a_constant_network_has_a_near_radius(residual: str) -> None:
    network = mlp()
    network[-1].weight.data *= 0
    network[-1].bias.data = torch.tensor([3.0, 0.0, 0.0])
    model = rgpr.RGPR(network, residual=residual).fit([torch.randn(60, 4)])
    radius = model.certify(0.05).radius
    assert 1 < radius < 1e4
    attack(model, (4,), radius, 1 / 3 + 0.05, 20)


def test_nothing_to_fear_at_all(tmp_path: Path) -> None:
    """A network that is never sure, and a promise that nothing can break."""
    network = mlp()
    network[-1].weight.data *= 0
    network[-1].bias.data *= 0
    model = rgpr.RGPR(network).fit([torch.randn(60, 4)])
    certificate = model.certify(0.05)
    assert certificate.radius == 0
    assert certificate.covers(torch.randn(5, 4)).all()
    certificate.plot(torch.randn(5, 4), tmp_path / "c.png")
    sure = rgpr.RGPR(mlp()).fit([torch.randn(60, 4)]).certify(0.9)
    assert sure.radius < 1e3
    assert sure.bound(sure.radius) <= 1


def test_under_inference_mode_and_in_half_precision() -> None:
    model = rgpr.RGPR(convolutional()).fit([torch.rand(30, 2, 8, 8)])
    with torch.inference_mode():
        assert model.certify(0.1).radius > 1
        made_inside = rgpr.RGPR(mlp().double()).fit([torch.randn(60, 4).double()])
        assert copy.deepcopy(made_inside).certify(0.1).radius > 1
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
    import matplotlib.pyplot as plt

    plt.close("all")
    certificate.plot(digits.x[:20], tmp_path / "new.png")
    assert plt.get_fignums() == []
    # The figure of Axes that are passed stays as open as it was, also if this library made them.
    for own in (plt.subplots()[1], certificate.plot(digits.x[:20])):
        assert certificate.plot(digits.x[:20], tmp_path / "c.png", ax=own) is own
        assert plt.fignum_exists(own.figure.number)
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    plt.close("all")
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
