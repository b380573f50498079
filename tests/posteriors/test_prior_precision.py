"""The search for a prior precision: within its grid, beyond it, and where it ends."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss
from torch.utils.data import DataLoader, TensorDataset

import rgpr
from networks import blobs, mlp
from references import search_prior_precision
from rgpr.posteriors import LaplacePosterior, choose_prior_precision
from rgpr.posteriors.prior_precision import NEGLIGIBLE, find_prior_precision

Pair = tuple[Tensor, Tensor]


def trained(
    *, wrong: int = 6, steps: int = 100, gain: float = 1.0, sure: float = 1.0
) -> tuple[nn.Module, Pair, Pair]:
    """A network on blobs, its training data, and validation data of which some labels are wrong.

    ``gain`` multiplies the features and divides the last layer's weights, so that the outputs stay
    and the best prior precision of the last layer's weights grows by its square. ``sure``
    multiplies the outputs.
    """
    torch.manual_seed(0)
    x, y = blobs(n=240)
    network = mlp()
    network[4] = nn.Linear(16, 3, bias=False)
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(network(x[:120]), y[:120]).backward()
        optimizer.step()
    with torch.no_grad():
        for parameter, factor in (
            (network[2].weight, gain),
            (network[2].bias, gain),
            (network[4].weight, sure / gain),
        ):
            parameter.mul_(factor)
    labels = y[120:].clone()
    labels[:wrong] = (labels[:wrong] + 1) % 3
    return network, (x[:120], y[:120]), (x[120:], labels)


def fitted(network: nn.Module, data: Pair, structure: str, subset: str = "last_layer") -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la = Laplace(
            network, "classification", subset_of_weights=subset, hessian_structure=structure
        )
        la.fit(DataLoader(TensorDataset(*data), batch_size=40))
    return la


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_within_the_grid_it_is_what_laplace_torch_finds(structure: str) -> None:
    network, train, validation = trained()
    la = fitted(network, train, structure)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior = choose_prior_precision(la, [validation], grid_size=9, progress=False)
    found = float(la.prior_precision)
    search_prior_precision(la, DataLoader(TensorDataset(*validation), batch_size=120), 9)
    assert 1e-4 < found < 1e4
    assert found == pytest.approx(float(la.prior_precision))
    x = validation[0]
    assert torch.equal(posterior(x).variance, rgpr.as_posterior(la)(x).variance)


def test_of_all_layers() -> None:
    network, train, (x, y) = trained()
    la = fitted(network, train, "diag", "all")
    posterior = choose_prior_precision(la, [(x, y)], grid_size=5, progress=False)
    found = float(la.prior_precision)
    losses = {}
    for precision in torch.logspace(-4, 4, 5).tolist():
        la.prior_precision = precision
        p = la(x, pred_type="glm", link_approx="probit")
        losses[precision] = float(nll_loss(p.log(), y))
    assert isinstance(posterior, LaplacePosterior)
    assert found == pytest.approx(min(losses, key=losses.__getitem__))


@pytest.mark.parametrize("gain", [1e3, 1e-4])
def test_beyond_an_end_it_goes_on_until_the_likelihood_falls(gain: float) -> None:
    network, train, validation = trained(gain=gain)
    la = fitted(network, train, "kron")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose_prior_precision(la, [validation], grid_size=9, progress=False)
    found = float(la.prior_precision)
    _, choice = find_prior_precision(la, [validation], grid_size=9, progress=False)
    assert choice.extended
    assert choice.stop == "fell"
    assert not choice.at_an_end
    assert not choice.equals_map
    assert choice.verdict == ""
    assert found == pytest.approx(choice.precision)
    assert choice.nll < choice.map_nll
    assert found > 1e4 if gain > 1 else found < 1e-4
    # Laplace's own losses are larger one step to either side.
    losses = []
    for factor in (0.1, 1.0, 10.0):
        la.prior_precision = factor * found
        p = la(validation[0], pred_type="glm", link_approx="probit")
        losses.append(float(nll_loss(p.log(), validation[1])))
    assert losses[1] == min(losses)


def test_data_that_prefer_no_variance_get_map_and_a_warning() -> None:
    # After a few steps all answers are right and none is sure, so every variance makes it worse.
    network, train, validation = trained(wrong=0, steps=15)
    la = fitted(network, train, "kron")
    with pytest.warns(UserWarning, match=r"prefer no variance: this is MAP.*Wrap the network"):
        posterior = choose_prior_precision(la, [validation], grid_size=9, progress=False)
    x, _ = validation
    assert float(la.prior_precision) > 1e4
    assert float(posterior(x).variance.detach().max()) <= NEGLIGIBLE
    model = rgpr.RGPR(posterior, layers="input").fit([x], progress=False)
    model.sigma2 = 0.0
    with torch.no_grad():
        assert torch.allclose(model(x), network(x).softmax(1), atol=1e-4)
    _, choice = find_prior_precision(la, [validation], grid_size=9, progress=False)
    assert choice.equals_map
    assert choice.stop == "no variance"
    assert choice.at_an_end
    assert choice.nll == pytest.approx(choice.map_nll, abs=1e-4)


# The precision of ``full`` has no inverse below some prior precision, which depends on rounding,
# and so does what stops the search there. With a gain of 1000 that lies inside the grid.
@pytest.mark.parametrize(
    ("structure", "gain"), [("kron", 1.0), ("diag", 1.0), ("full", 1.0), ("full", 1e3)]
)
def test_labels_that_are_all_wrong_end_below(structure: str, gain: float) -> None:
    network, train, (x, y) = trained(gain=gain)
    la = fitted(network, train, structure)
    # The more variance, the better, up to the uniform distribution.
    wrong = [(x, (y + 1) % 3)]
    with pytest.warns(UserWarning, match=r"as much variance as there can be.* la.prior_precision"):
        choose_prior_precision(la, wrong, grid_size=9, progress=False)
    _, choice = find_prior_precision(la, wrong, grid_size=9, progress=False)
    assert choice.at_an_end
    assert choice.nll < choice.map_nll


@pytest.mark.parametrize(("structure", "stop"), [("kron", "bound"), ("diag", "flat")])
def test_what_stops_the_search_below(structure: str, stop: str) -> None:
    network, train, (x, y) = trained()
    la = fitted(network, train, structure)
    _, choice = find_prior_precision(la, [(x, (y + 1) % 3)], grid_size=9, progress=False)
    assert choice.stop == stop


def test_a_bound_below_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    network, train, (x, y) = trained()
    la = fitted(network, train, "kron")
    monkeypatch.setattr("rgpr.posteriors.prior_precision.LOWEST", 0.9e-5)
    with pytest.warns(UserWarning, match=r"no smaller one is tried.* set la.prior_precision"):
        choose_prior_precision(la, [(x, (y + 1) % 3)], grid_size=9, progress=False)
    assert float(la.prior_precision) == pytest.approx(1e-5, rel=1e-2)


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_a_label_that_is_surely_wrong_has_a_finite_likelihood(structure: str) -> None:
    # The right class lies more than a thousand below the answer; exp(-104) is zero in float32.
    network, train, (x, y) = trained(wrong=1, gain=1e-4, sure=100.0)
    la = fitted(network, train, structure)
    _, choice = find_prior_precision(la, [(x, y)], grid_size=9, progress=False)
    with torch.no_grad():
        mean = network(x).double()
    losses = []
    for factor in (0.1, 1.0, 10.0):
        la.prior_precision = factor * choice.precision
        variance = la._glm_predictive_distribution(x)[1].diagonal(dim1=1, dim2=2).double()
        losses.append(float(cross_entropy(mean / (1 + math.pi / 8 * variance).sqrt(), y)))
    assert losses[1] == min(losses)
    assert choice.nll == pytest.approx(losses[1], rel=1e-6)
    assert choice.map_nll == pytest.approx(float(cross_entropy(mean, y)), rel=1e-6)


def test_every_precision_takes_one_pass() -> None:
    network, train, validation = trained()
    la = fitted(network, train, "diag", "all")
    passes, predict = [], la._glm_predictive_distribution
    la._glm_predictive_distribution = lambda x: (passes.append(len(x)), predict(x))[1]
    _, choice = find_prior_precision(la, [validation], grid_size=5, progress=False)
    assert not choice.extended
    assert len(passes) == 5


def test_a_bound_above_is_named_where_variance_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    network, train, validation = trained(wrong=0, steps=15, gain=1e3)
    la = fitted(network, train, "kron")
    monkeypatch.setattr("rgpr.posteriors.prior_precision.HIGHEST", 1.01e5)
    with pytest.warns(UserWarning, match=r"largest prior precision .* still have variances"):
        choose_prior_precision(la, [validation], grid_size=9, progress=False)


def test_a_grid_of_one_is_taken_as_it_is() -> None:
    network, train, validation = trained()
    la = fitted(network, train, "kron")
    _, choice = find_prior_precision(la, [validation], grid_size=1, progress=False)
    assert math.isclose(choice.precision, 1e-4, rel_tol=1e-5)
    assert not choice.extended
    assert choice.stop == "grid"
    assert choice.verdict == ""
