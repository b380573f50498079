"""Laplace over all layers by samples of weights: against laplace-torch, and written out."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from laplace import Laplace
from laplace.curvature import CurvlinopsGGN
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rgpr
from networks import LeNet, blobs, mlp
from references import jacobian
from rgpr.posteriors import KFL, DiagonalLaplace, LaplacePosterior, fit_laplace
from rgpr.posteriors.last_layer_curvature import _softmax_curvature
from rgpr_paper.training import lenet, resnet18

pytestmark = pytest.mark.filterwarnings("ignore")
BOTH = [KFL, DiagonalLaplace]


def data(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, DataLoader]:
    x, y = blobs()
    x = x.to(dtype)
    return x, DataLoader(TensorDataset(x, y), batch_size=40)


@pytest.mark.parametrize("posterior_class", BOTH)
def test_samples_have_the_fitted_covariance(posterior_class: type[KFL]) -> None:
    """For a linear network the outputs' covariance is exact: J Sigma J^T, written out."""
    x, loader = data(torch.float64)
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double()
    posterior = posterior_class.fit(network, loader, prior_precision=0.5)
    structure = "kron" if posterior_class is KFL else "diag"
    la = fit_laplace(network, loader, structure=structure, prior_precision=0.5)
    precision = la.posterior_precision
    dense = precision.to_matrix(exponent=1) if structure == "kron" else precision.diag()
    J = jacobian(network, x[:4])
    expected = J @ torch.linalg.inv(dense) @ J.mT
    samples = posterior.sample(x[:4], 40_000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(samples.mean(0), network(x[:4]), atol=0.05, rtol=0)
    for b in range(4):
        scale = float(expected[b].abs().max())
        torch.testing.assert_close(samples[:, b].T.cov(), expected[b], atol=0.04 * scale, rtol=0)


@pytest.mark.parametrize("posterior_class", BOTH)
def test_weights_spread_as_laplace_torchs_own_samples(posterior_class: type[KFL]) -> None:
    _, loader = data()
    structure = "kron" if posterior_class is KFL else "diag"
    la = fit_laplace(mlp(), loader, structure=structure)
    posterior = posterior_class.from_laplace(la)
    generator = torch.Generator().manual_seed(0)
    source = posterior.weights(generator)
    ours = torch.stack(
        [torch.cat([w.flatten() for w in next(source).values()]) for _ in range(4000)]
    )
    its = la.sample(4000)
    torch.testing.assert_close(ours.std(0), its.std(0), rtol=0.15, atol=0)
    torch.testing.assert_close(ours.mean(0), la.mean, atol=0.1, rtol=0)


def parameters_of(network: nn.Module) -> dict[str, Any]:
    return {n: (p.clone(), p.requires_grad) for n, p in network.named_parameters()}


@pytest.mark.parametrize("posterior_class", BOTH)
def test_networks_with_batch_normalisation(posterior_class: type[KFL]) -> None:
    """laplace-torch refuses their parameters; here they are held fixed, and nothing is changed."""
    network = LeNet()
    x = torch.randn(40, 1, 8, 8)
    network(x)
    network.train()
    loader = DataLoader(TensorDataset(x, torch.arange(40) % 10), batch_size=20)
    before = parameters_of(network)
    posterior = posterior_class.fit(network, loader, n_samples=5)
    assert network.training
    for name, (value, flag) in before.items():
        parameter = dict(network.named_parameters())[name]
        assert torch.equal(parameter, value)
        assert parameter.requires_grad == flag
    assert not any("features.1" in n or "features.5" in n for n in posterior.names)
    assert {"features.0.weight", "classifier.4.bias"} <= set(posterior.names)
    model = rgpr.RGPR(posterior).fit([x])
    model.sigma2 = 1
    assert model.layers == ["input", "features.3", "features.7", "classifier.2"]
    torch.testing.assert_close(model(1e12 * x), torch.full((40, 10), 0.1), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("build", "shape", "layers"),
    [
        (lenet, (1, 28, 28), 8),
        pytest.param(resnet18, (3, 32, 32), 22, marks=pytest.mark.slow),
    ],
)
def test_the_papers_networks(build: Any, shape: tuple[int, ...], layers: int) -> None:
    """KFL over the whole LeNet and the whole ResNet-18, batch normalisation and all."""
    x = torch.rand(8, *shape)
    loader = DataLoader(TensorDataset(x, torch.arange(8)), batch_size=8)
    posterior = KFL.fit(build(), loader, prior_precision=1000.0, n_samples=2)
    assert len(posterior.names) == layers
    model = rgpr.RGPR(posterior).fit([x])
    model.sigma2 = 1
    with torch.no_grad():
        far = model(1e12 * x)
    torch.testing.assert_close(far, torch.full((8, 10), 0.1), atol=1e-3, rtol=0)


def test_linearised_with_batch_normalisation() -> None:
    network = LeNet()
    x = torch.randn(40, 1, 8, 8)
    loader = DataLoader(TensorDataset(x, torch.arange(40) % 10), batch_size=20)
    la = fit_laplace(network, loader)
    model = rgpr.RGPR(la).fit([x])
    assert isinstance(model.posterior, LaplacePosterior)
    model.sigma2 = 0
    torch.testing.assert_close(model(x[:5]), la(x[:5]), rtol=1e-4, atol=1e-5)


def test_chunks_of_stacked_weights_agree_with_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    x, loader = data()
    posterior = KFL.fit(mlp(), loader)
    assert posterior._linear
    together = posterior.sample(x, 7, torch.Generator().manual_seed(1))
    monkeypatch.setattr("rgpr.posteriors.sampled._STACK_BYTES", 3 * 4 * 500)
    torch.testing.assert_close(posterior.sample(x, 7, torch.Generator().manual_seed(1)), together)
    monkeypatch.setattr(KFL, "_linear", False)
    torch.testing.assert_close(posterior.sample(x, 7, torch.Generator().manual_seed(1)), together)


def test_what_cannot_be_wrapped_is_refused() -> None:
    _, loader = data()
    la = Laplace(mlp(), "classification", "all", "diag")
    with pytest.raises(TypeError, match=r"KFL takes a KronLaplace .* not a DiagLaplace"):
        KFL.from_laplace(la)
    with pytest.raises(ValueError, match="not fitted"):
        DiagonalLaplace.from_laplace(la)
    last = Laplace(mlp(), "classification", "last_layer", "kron")
    last.fit(loader)
    with pytest.raises(TypeError, match="over all layers, not a KronLLLaplace"):
        KFL.from_laplace(last)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = KFL.fit(mlp(), loader)
    with pytest.raises(ValueError, match="n_samples = 1"):
        KFL.from_laplace(fit_laplace(mlp(), loader), n_samples=1)
    assert posterior.likelihood == "classification"


@pytest.mark.parametrize("posterior_class", BOTH)
def test_the_prior_is_chosen_by_how_samples_predict(posterior_class: type[KFL]) -> None:
    x, loader = data()
    network = mlp(width=64)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(60):
        for batch, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(batch), labels).backward()
            optimizer.step()
    y = torch.arange(120) % 3
    losses = {}
    for precision in (*(10.0**e for e in range(6)), None):
        posterior = posterior_class.fit(
            network, loader, prior_precision=precision, n_samples=10, val_loader=[(x, y)]
        )
        losses[precision] = posterior._loss([(x, y)])
    assert losses[None] == min(losses.values())
    assert losses[None] < losses[1.0]


def test_regression() -> None:
    x, _ = blobs()
    loader = DataLoader(TensorDataset(x, torch.randn(120, 2)), batch_size=40)
    posterior = KFL.fit(mlp(4, 2), loader, "regression")
    model = rgpr.RGPR(posterior).fit([x])
    mean, covariance = model(x)
    assert covariance.shape == (120, 2, 2)
    assert torch.equal(mean, model(x)[0])


# Width of the last layer, outputs, and whether it has a bias. A softmax needs two outputs.
SOFTMAX_HEADS = [(5, 3, True), (5, 3, False), (1, 2, True)]
HEADS = [("classification", *head) for head in SOFTMAX_HEADS]
HEADS += [("regression", *head) for head in (*SOFTMAX_HEADS, (1, 1, True), (1, 1, False))]


@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.parametrize(("likelihood", "width", "outputs", "bias"), HEADS)
def test_a_last_layer_in_closed_form(
    likelihood: str, width: int, outputs: int, bias: bool, structure: str
) -> None:
    """Against laplace-torch's own backend, by which the precision is summed example by example."""
    torch.manual_seed(0)
    layers = nn.Linear(4, width), nn.Tanh(), nn.Linear(width, outputs, bias=bias)
    network = nn.Sequential(*layers).double()
    x = torch.randn(50, 4).double()
    y = torch.randn(50, outputs).double()
    if likelihood == "classification":
        y = torch.arange(50) % outputs
    loader = DataLoader(TensorDataset(x, y), batch_size=20)
    its, ours = (
        fit_laplace(network, loader, likelihood, structure, "last_layer", **backend)
        for backend in ({"backend": CurvlinopsGGN}, {})
    )
    assert type(ours.backend) is not CurvlinopsGGN
    dense = [
        la.posterior_precision.to_matrix(exponent=1) if structure == "kron" else la.H
        for la in (ours, its)
    ]
    torch.testing.assert_close(*dense, rtol=1e-9, atol=1e-9)
    if structure == "kron":  # factor by factor, because factors of batches are added up
        torch.testing.assert_close(ours.H_facs.kfacs, its.H_facs.kfacs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours.loss, its.loss)
    variances = [rgpr.as_posterior(la)(x).variance for la in (ours, its)]
    torch.testing.assert_close(*variances)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_batches_of_which_only_some_go_through_laplace_torch(
    structure: str, likelihood: str
) -> None:
    """In one of them no unit fires, so its outputs are zero, and zeros tell nothing of a head."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 3, bias=False)
    network, x = nn.Sequential(*layers).double(), torch.randn(30, 4).double()
    x[10:20] = 0
    y = torch.randn(30, 3).double() if likelihood == "regression" else torch.arange(30) % 3
    loader = DataLoader(TensorDataset(x, y), batch_size=10)
    its, ours = (
        fit_laplace(network, loader, likelihood, structure, "last_layer", **backend)
        for backend in ({"backend": CurvlinopsGGN}, {})
    )
    variances = [rgpr.as_posterior(la)(x).variance for la in (ours, its)]
    torch.testing.assert_close(*variances, rtol=1e-9, atol=1e-9)


def test_the_curvature_of_confident_outputs_has_no_negative_eigenvalue() -> None:
    """In float32 as in float64, beside which its digits are right, however confident they are."""
    torch.manual_seed(0)
    logits = torch.randn(2000, 10) * 3
    logits[torch.arange(2000), torch.arange(2000) % 10] += 25
    p = logits.double().softmax(1)
    expected = p.sum(0).diag() - p.T @ p
    found = _softmax_curvature(p.float()).double()
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * scale)
    assert torch.linalg.eigvalsh(found).min() > -1e-6 * scale


class Changed(nn.Module):
    """What a network does to the outputs of its last layer: a scale, or some of them left out."""

    def __init__(self, scale: float, outputs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.scale, self.outputs = scale, outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.first(x))) / self.scale
        return out[:, : self.outputs]


@pytest.mark.parametrize(
    ("scale", "outputs", "size"), [(0.07, 3, 1.0), (1.0, 2, 1.0), (0.3, 3, 1e-9), (0.3, 3, 0.0)]
)
def test_a_last_layer_whose_outputs_are_changed_goes_through_laplace_torch(
    scale: float, outputs: int, size: float
) -> None:
    torch.manual_seed(0)
    network, x = Changed(scale, outputs).double(), torch.randn(30, 4).double()
    with torch.no_grad():
        for parameter in network.last.parameters():
            parameter.mul_(size)
    loader = DataLoader(TensorDataset(x, torch.arange(30) % outputs), batch_size=10)
    its, ours = (
        fit_laplace(network, loader, structure="kron", subset="last_layer", **backend)
        for backend in ({"backend": CurvlinopsGGN}, {})
    )
    assert type(ours.backend) is not CurvlinopsGGN
    precisions = [la.posterior_precision.to_matrix(exponent=1) for la in (ours, its)]
    torch.testing.assert_close(*precisions, rtol=1e-9, atol=1e-9)


def test_a_last_layer_at_several_positions_goes_through_laplace_torch() -> None:
    """Features of tokens, whose outputs are pooled: no closed form of one linear layer."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.last(torch.tanh(self.first(x)).unflatten(0, (-1, 1)))
            return out.mean(1)

    x, y = torch.randn(30, 4), torch.arange(30) % 3
    loader = DataLoader(TensorDataset(x, y), batch_size=10)
    its, ours = (
        fit_laplace(Pooled(), loader, structure="kron", subset="last_layer", **backend)
        for backend in ({"backend": CurvlinopsGGN}, {})
    )
    assert type(ours.backend) is not CurvlinopsGGN
    assert [len(each) for each in ours.H_facs.kfacs] == [len(each) for each in its.H_facs.kfacs]
