"""Tuning against a reference that knows nothing of it: grids over sigma2, in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rgpr
from networks import blobs, mlp
from references import unit_variance
from rgpr.posteriors import Posterior

pytestmark = pytest.mark.filterwarnings("ignore:sigma2")
GRID = [0.0, *(10 ** (p / 4) for p in range(-24, 21))]


def overconfident(classes: int = 3) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A network that is too sure of itself, and data that say so."""
    x, y = blobs(classes, n=150)
    network = mlp(4, classes, width=12, hidden=1).double()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x[:60].double()), y[:60]).backward()
        optimizer.step()
    with torch.no_grad():
        network[-1].weight *= 3
        network[-1].bias *= 3
    flipped = torch.where(torch.arange(len(y)) % 10 == 0, (y + 1) % classes, y)
    return network, x.double(), flipped


class Reference:
    """The objectives from the paper's formulas: one network pass by hand, plain float64."""

    def __init__(self, network: nn.Sequential, training: Tensor, layers: int) -> None:
        self.network, self.training, self.layers = network, training, layers

    def u(self, x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            pairs = [(x, self.training), (self.network[:2](x), self.network[:2](self.training))]
        return [unit_variance(h, t) for h, t in pairs[: self.layers]]

    def log_probabilities(self, x: Tensor, sigma2: tuple[float, ...], T: float = 1.0) -> Tensor:
        v = sum(s * u for s, u in zip(sigma2, self.u(x), strict=True))
        with torch.no_grad():
            logits = self.network(x)
        return (logits / (1 + math.pi / 8 * v[:, None]).sqrt() / T).log_softmax(1)

    def likelihood(self, x: Tensor, y: Tensor, sigma2: tuple[float, ...], T: float = 1.0) -> float:
        return float(self.log_probabilities(x, sigma2, T)[range(len(y)), y].mean())

    def ood(
        self, x: Tensor, y: Tensor, out: Tensor, sigma2: tuple[float, ...], weight: float
    ) -> float:
        # Sums over both sets of the same size, as the paper writes it, divided by that size.
        log_p = self.log_probabilities(out, sigma2)
        uniform = weight / log_p.shape[1] * log_p.sum()
        return self.likelihood(x, y, sigma2) + float(uniform) / len(x)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("objective", ["likelihood", "ood"])
def test_no_point_of_a_grid_is_better(layers: int, objective: str) -> None:
    network, x, y = overconfident()
    reference = Reference(network, x[:60], layers)
    model = rgpr.RGPR(network, layers="input" if layers == 1 else "auto", residual="paper").fit(
        [x[:60]]
    )
    val, labels, out = x[60:], y[60:], 2 * torch.randn(90, 4).double()

    def value(sigma2: tuple[float, ...]) -> float:
        if objective == "likelihood":
            return reference.likelihood(val, labels, sigma2)
        return reference.ood(val, labels, out, sigma2, 0.5)

    before = value(tuple(model.sigma2.tolist()))
    result = model.tune(
        [(val, labels)], objective, **({"ood": [out]} if objective == "ood" else {})
    )
    grid = max(value(point) for point in itertools.product(GRID, repeat=layers))
    # The input's floor may cost a likelihood that wants none of it a sliver.
    assert result.after >= grid - 1e-4
    assert result.before == pytest.approx(before, abs=1e-9)
    assert result.after == pytest.approx(value(tuple(model.sigma2.tolist())), abs=1e-9)
    assert result.after > result.before
    assert result.converged


def test_joint_temperature_against_a_grid() -> None:
    network, x, y = overconfident()
    reference = Reference(network, x[:60], 1)
    model = rgpr.RGPR(network, layers="input", residual="paper").fit([x[:60]])
    val, labels = x[60:], y[60:]
    result = model.tune([(val, labels)], temperature=True)
    temperatures = [math.exp(t / 8) for t in range(-16, 25)]
    grid = max(
        reference.likelihood(val, labels, (s,), t) for s, t in itertools.product(GRID, temperatures)
    )
    assert result.after >= grid - 1e-4
    assert float(model.temperature) == result.temperature > 1  # it was three times too sure


class Widened(Posterior):
    """Correlated samples around the network's outputs."""

    def forward(self, x: Tensor) -> rgpr.posteriors.gaussian.Gaussian:
        root = torch.tril(torch.ones(3, 3)).double() / 2
        return rgpr.posteriors.gaussian.DenseGaussian(
            self.point(x), (root @ root.T).expand(len(x), 3, 3)
        )


@pytest.mark.parametrize("objective", ["likelihood", "ood"])
def test_monte_carlo_against_a_grid_with_its_own_samples(objective: str) -> None:
    """The same estimator with 4000 other samples finds no better scale."""
    network, x, y = overconfident()
    model = rgpr.RGPR(Widened(network), layers="input", residual="paper").fit([x[:60]])
    val, labels, out = x[60:], y[60:], 2 * torch.randn(90, 4).double()
    ood = {"ood": [out]} if objective == "ood" else {}
    result = model.tune([(val, labels)], objective, link_approx="mc", n_samples=1000, **ood)

    @torch.no_grad()
    def value(sigma2: float) -> float:
        model.sigma2 = sigma2
        options = {"link_approx": "mc", "n_samples": 4000}
        p = model(val, generator=torch.Generator().manual_seed(9), **options).log()
        total = float(p[range(len(labels)), labels].mean())
        if objective == "ood":
            q = model(out, generator=torch.Generator().manual_seed(9), **options).log()
            total += 0.5 * float(q.mean())
        return total

    [found] = result.sigma2.values()
    grid = max(value(found * 2.0**power) for power in range(-4, 5))
    assert value(found) >= grid - 0.02
    assert result.after == pytest.approx(value(found), abs=0.03)


@pytest.mark.parametrize("objective", ["likelihood", "ood"])
def test_regression_against_a_grid(objective: str) -> None:
    x = torch.randn(160, 2).double()
    y = torch.stack([x[:, 0].sin(), x[:, 1]], 1) + 0.2 * torch.randn(160, 2).double()
    network = mlp(2, 2, width=8, hidden=1).double()
    model = rgpr.RGPR(network, layers="input", likelihood="regression", residual="paper")
    model.fit([x[:80]])
    val, target, out = x[80:], y[80:], 4 * torch.randn(70, 2).double()
    u, u_out = unit_variance(val, x[:80]), unit_variance(out, x[:80])
    with torch.no_grad():
        f, f_out = network(val), network(out)

    def value(sigma2: float, noise: float) -> float:
        def log_density(error: Tensor, v: Tensor) -> float:
            s = v[:, None] + noise
            return float((-0.5 * (2 * math.pi * s).log() - error / (2 * s)).sum(1).mean())

        total = log_density((target - f) ** 2, sigma2 * u)
        if objective == "ood":
            spread, center = target.var(0, correction=0), target.mean(0)
            total += 0.5 * log_density((f_out - center) ** 2 + spread, sigma2 * u_out)
        return total

    ood = {"ood": [out]} if objective == "ood" else {}
    result = model.tune([(val, target)], objective, **ood)
    noises = [10 ** (p / 8) for p in range(-24, 17)]
    assert result.after >= max(value(s, n) for s in GRID for n in noises) - 1e-4
    assert result.after == pytest.approx(value(float(model.sigma2), result.noise), abs=1e-9)
    known = model.tune([(val, target)], objective, noise=0.04, **ood)
    assert known.noise == 0.04
    assert known.after >= max(value(s, 0.04) for s in GRID) - 1e-4


@settings(max_examples=15)
@given(
    st.integers(0, 10**6),
    st.sampled_from(["likelihood", "ood"]),
    st.lists(st.floats(0, 1e6), min_size=2, max_size=2),
    st.booleans(),
)
def test_never_worse_and_the_same_again(
    seed: int, objective: str, start: list[float], temperature: bool
) -> None:
    """Whatever the network, the labels and the start."""
    torch.manual_seed(seed)
    network, x, y = mlp(3, 4, width=6, hidden=1), torch.randn(50, 3), torch.randint(4, (50,))
    model = rgpr.RGPR(network, residual="paper").fit([x])
    runs = []
    for _ in range(2):
        model.sigma2, model.temperature = start, 1.0
        result = model.tune([(x, y)], objective, temperature=temperature)
        assert result.after >= result.before
        runs.append((result.sigma2, result.temperature, result.history))
    assert runs[0] == runs[1]


def test_two_inputs_one_output_is_a_binary_classifier() -> None:
    network, x, y = mlp(2, 1, width=8, hidden=1), torch.randn(80, 2), torch.randint(2, (80,))
    model = rgpr.RGPR(network, residual="paper").fit([x])
    result = model.tune([(x, y)], "ood", ood=[3 * torch.randn(80, 2)])
    p = model(x)
    expected = float(p.log().gather(1, y[:, None]).mean())
    assert result.metrics["validation NLL"][1] == pytest.approx(-expected, abs=1e-5)


def test_the_budget_is_about_the_network_itself_whatever_temperature_was_set() -> None:
    """A temperature that makes answers worthless must not make room for worse ones."""
    network, x, _ = overconfident()
    x = x[:40].double()
    y = network(x).argmax(1)  # it is right, and sure of it
    model = rgpr.RGPR(network, layers="input", residual="paper").fit([x], progress=False)
    own = float(nn.functional.cross_entropy(network(x), y).detach())
    model.temperature = 15.0
    # Outliers that are the data: only the budget keeps the answers from knowing nothing.
    options = {"ood": [x], "temperature": True, "max_nll_increase": 0.02}
    model.tune([(x, y)], "ood", **options, progress=False)
    with torch.no_grad():
        spent = float(nn.functional.nll_loss(model(x).log(), y)) - own
    assert spent <= 0.02 + 1e-4


def test_outliers_are_made_of_data_that_can_be_read_again() -> None:
    x, y = blobs(3)
    model = rgpr.RGPR(mlp(), layers=["1"], residual="paper").fit([x], progress=False)
    with pytest.raises((TypeError, ValueError), match="making outliers from the validation data"):
        model.tune(iter([(x, y)]), "ood", progress=False)
    model.tune(iter([(x, y)]), "ood", ood=[3 * x], progress=False)
