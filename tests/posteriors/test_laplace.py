"""Against laplace-torch itself, and against Jacobians and covariances written out."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from laplace import Laplace, LowRankLaplace
from laplace.curvature import CurvlinopsGGN
from laplace.utils import LargestMagnitudeSubnetMask
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rgpr
from networks import Task, blobs, mlp
from references import jacobian
from rgpr.posteriors import (
    Closed,
    DiagonalGaussian,
    LaplacePosterior,
    LastLayerLaplace,
    choose_prior_precision,
    last_layer_laplace,
)

pytestmark = pytest.mark.filterwarnings("ignore")
LAST_LAYER = ["kron", "diag", "full"]


def fitted(
    network: nn.Module,
    likelihood: str = "classification",
    subset: str = "last_layer",
    structure: str = "kron",
    outputs: int = 3,
    **kwargs: Any,
) -> tuple[Any, torch.Tensor]:
    x, y = blobs(classes=outputs)
    x = x.to(next(network.parameters()).dtype)
    if likelihood == "regression":
        y = torch.randn(len(x), outputs, dtype=x.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la = Laplace(
            network,
            likelihood,
            subset_of_weights=subset,
            hessian_structure=structure,
            prior_precision=0.7,
            **kwargs,
        )
        la.fit(DataLoader(TensorDataset(x, y), batch_size=40))
    return la, x


class Counting(nn.Module):
    """Keeps what goes through it."""

    def __init__(self, seen: list[torch.Tensor]) -> None:
        super().__init__()
        self.seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x)
        return x

    def __deepcopy__(self, memo: Any) -> Counting:
        return Counting(self.seen)


def test_for_a_last_layer_the_network_runs_once() -> None:
    calls: list[torch.Tensor] = []
    la, x = fitted(nn.Sequential(Counting(calls), *mlp()))
    calls.clear()
    choose_prior_precision(la, [(x[:40], blobs()[1][:40]), (x[40:], blobs()[1][40:])], grid_size=9)
    assert len(calls) == 2


def test_autocast_leaves_the_variances_their_digits() -> None:
    la, x = fitted(mlp())
    loader = [(x, blobs()[1])]
    plain = choose_prior_precision(la, loader, grid_size=3, progress=False)
    with torch.autocast("cpu", torch.bfloat16):
        posterior = choose_prior_precision(la, loader, grid_size=3, progress=False)
    assert posterior.marginal.dtype == torch.float32
    assert torch.equal(posterior.marginal, plain.marginal)


def test_no_prior_precision_saves_a_broken_network() -> None:
    la, x = fitted(mlp())
    with torch.no_grad():
        la.model.model[0].weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="no prior precision from 1e-4 to 1e4"):
        choose_prior_precision(la, [(x, blobs()[1])], grid_size=2, progress=False)
    assert float(la.prior_precision) == pytest.approx(0.7)


def test_what_has_no_classes_has_no_prior_precision_to_choose() -> None:
    la, x = fitted(mlp())
    with pytest.raises(ValueError, match=r"has the label 7 .* 3 classes, 0 to 2"):
        choose_prior_precision(la, [(x, torch.full((len(x),), 7))], progress=False)
    with pytest.raises(ValueError, match="grid_size = 0"):
        choose_prior_precision(la, [(x, blobs()[1])], grid_size=0, progress=False)
    assert float(la.prior_precision) == pytest.approx(0.7)
    la, x = fitted(mlp(), "regression")
    with pytest.raises(TypeError, match="is for regression"):
        choose_prior_precision(la, [(x, x)], progress=False)


@pytest.mark.parametrize("structure", LAST_LAYER)
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
@pytest.mark.parametrize("bias", [True, False])
def test_last_layer_is_laplace_torchs_glm_predictive(
    structure: str, likelihood: str, bias: bool
) -> None:
    network = mlp()
    network[-1] = nn.Linear(16, 3, bias=bias)
    la, x = fitted(network, likelihood, structure=structure)
    posterior = rgpr.as_posterior(la)
    assert isinstance(posterior, LastLayerLaplace)
    assert posterior.likelihood == likelihood
    mean, covariance = la._glm_predictive_distribution(5 * x)
    gaussian = posterior(5 * x)
    torch.testing.assert_close(gaussian.mean, mean, rtol=1e-5, atol=1e-6)
    close = {"rtol": 1e-5, "atol": 1e-5 * float(covariance.abs().max())}
    torch.testing.assert_close(gaussian.covariance, covariance.double(), **close)
    torch.testing.assert_close(
        gaussian.variance, covariance.double().diagonal(dim1=1, dim2=2), **close
    )
    torch.testing.assert_close(gaussian.row_sums, covariance.double().sum(-1), **close)
    samples = gaussian.noise(100_000, torch.Generator().manual_seed(0))[:, 0]
    spread = float(gaussian.variance[0].max())
    torch.testing.assert_close(samples.T.cov(), gaussian.covariance[0], rtol=0, atol=0.03 * spread)


@pytest.mark.parametrize("structure", LAST_LAYER)
def test_last_layer_against_jacobians(structure: str) -> None:
    """J Sigma J^T with both written out, for the last layer's own parameters."""
    la, x = fitted(mlp().double(), structure=structure)
    posterior = rgpr.as_posterior(la)
    features = posterior.network[:-1](x[:7]).detach()
    J = jacobian(posterior.network[-1], features)
    precision = la.posterior_precision
    dense = precision if structure == "full" else None
    if structure == "kron":
        dense = precision.to_matrix(exponent=1)
    if structure == "diag":
        dense = precision.diag()
    expected = J @ torch.linalg.inv(dense) @ J.mT
    torch.testing.assert_close(posterior(x[:7]).covariance, expected)


@pytest.mark.parametrize("structure", LAST_LAYER)
def test_sigma2_zero_is_laplace_torchs_own_answer(structure: str) -> None:
    la, x = fitted(mlp(), structure=structure)
    model = rgpr.RGPR(la).fit([x])
    model.sigma2 = 0
    torch.testing.assert_close(model(x), la(x, link_approx="probit"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("structure", LAST_LAYER)
def test_regression_pair_has_laplace_torchs_shapes(structure: str) -> None:
    la, x = fitted(mlp(), "regression", structure=structure)
    model = rgpr.RGPR(la).fit([x])
    assert model.likelihood == "regression"
    mean, covariance = model(x)
    its_mean, its_covariance = la(x)
    assert covariance.shape == its_covariance.shape == (120, 3, 3)
    torch.testing.assert_close(mean, its_mean)
    added = covariance - its_covariance
    expected = torch.diag_embed(model.variance(x)[:, None].expand(-1, 3))
    torch.testing.assert_close(added, expected, rtol=1e-4, atol=1e-5)
    its_mean, its_variance = la(x, diagonal_output=True)
    mean, variance = model(x, diagonal_output=True)
    torch.testing.assert_close(
        variance, its_variance + model.variance(x)[:, None], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("structure", LAST_LAYER)
def test_variances_are_infinite_where_the_bases_own_is_lost(structure: str) -> None:
    la, x = fitted(mlp(), likelihood="regression", structure=structure)
    model = rgpr.RGPR(la).fit([x])
    far = 3e38 * x.sign()
    lost = model.posterior(far).variance.isnan().any(1)
    assert lost.any()
    mean, variance = model(far, diagonal_output=True)
    assert mean[lost].isnan().all()
    assert variance[lost].isinf().all()


@pytest.mark.parametrize("structure", LAST_LAYER)
def test_features_as_large_as_float32_allows(structure: str) -> None:
    la, x = fitted(mlp(), structure=structure)
    posterior = rgpr.as_posterior(la)
    reference = rgpr.as_posterior(la).double()
    far = 1e25 * x
    variance = posterior(far).variance
    assert variance.isfinite().all()
    torch.testing.assert_close(variance, reference(far.double()).variance, rtol=1e-3, atol=0)


@pytest.mark.parametrize("structure", LAST_LAYER)
def test_features_whose_squares_overflow_beside_others(structure: str) -> None:
    """The squares of some overflow, those of others just do not, and one batch holds all."""
    la, x = fitted(mlp(), structure=structure)
    posterior, reference = rgpr.as_posterior(la), rgpr.as_posterior(la).double()
    for largest in (0, 16, 18, 19, 20, 25):
        rows = 10.0 ** torch.linspace(0, largest, 7)[:, None] * x[:7]
        found, expected = posterior(rows), reference(rows.double())
        for name in ("variance", "row_sums", "covariance"):
            ours, theirs = getattr(found, name), getattr(expected, name)
            assert ours.isfinite().all(), name
            scale = expected.variance.amax(1).reshape(-1, *[1] * (theirs.dim() - 1))
            torch.testing.assert_close(ours / scale, theirs / scale, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("subset", "structure"),
    [*(("last_layer", structure) for structure in LAST_LAYER), ("all", "kron")],
)
def test_the_generator_decides_the_bases_noise_too(subset: str, structure: str) -> None:
    la, x = fitted(mlp(), subset=subset, structure=structure)
    model = rgpr.RGPR(la).fit([x])
    for sigma2 in (0.0, 1.0):
        model.sigma2 = sigma2
        draws = [
            model.predictive_samples(x[:5], 4, torch.Generator().manual_seed(seed))
            for seed in (1, 1, 2)
        ]
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("structure", LAST_LAYER)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_reach_the_variance(structure: str, dtype: torch.dtype) -> None:
    la, x = fitted(mlp(), structure=structure)
    model = rgpr.RGPR(la).fit([x])
    with torch.no_grad(), torch.autocast("cpu", dtype):
        features = model.posterior.network[:-1](x).float()
        variance = model.posterior(x).variance
        for link in ("probit", "mc", "bridge"):
            p = model(x, link_approx=link)
            assert p.dtype == torch.float32
            assert p.isfinite().all()
    head = nn.Sequential(nn.Flatten(), model.posterior.network[-1])
    alone = LastLayerLaplace(head, "1", structure, model.posterior.own_tensors(), None)
    torch.testing.assert_close(variance, alone(features).variance, rtol=1e-5, atol=0)


def test_inference_mode() -> None:
    for subset in ("last_layer", "all"):
        la, x = fitted(mlp(), subset=subset)
        with torch.inference_mode():
            model = rgpr.RGPR(la).fit([x.clone()])
            assert model(x).shape == (120, 3)
        x.requires_grad_()
        model.variance(x).sum().backward()
        assert x.grad is not None


@pytest.mark.parametrize("structure", LAST_LAYER)
def test_the_pass_that_measures_layers_reads_the_features(
    structure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that is nothing but its last layer, too."""
    for network in (mlp(), nn.Sequential(nn.Flatten(), nn.Linear(4, 3))):
        la, x = fitted(network, structure=structure)
        model = rgpr.RGPR(la).fit([x], progress=False)
        expected = model.posterior(3 * x)
        with monkeypatch.context() as patch:
            # The posterior's own way would take a pass with hooks of its own.
            patch.setattr(last_layer_laplace, "point_and_features", None)
            gaussian = model._extension().read(3 * x).output
        assert torch.equal(gaussian.mean, expected.mean)
        assert torch.equal(gaussian.variance, expected.variance)
    head = nn.Linear(4, 3)
    alone = LastLayerLaplace(head, "", structure, model.posterior.own_tensors(), None)
    model, expected = rgpr.RGPR(alone, layers="input").fit([x], progress=False), alone(3 * x)
    assert torch.equal(model._extension().read(3 * x).output.variance, expected.variance)


class OfOnesOwn(rgpr.Posterior):
    """Says what its Gaussian is, as a posterior of a user may."""

    def forward(self, x: Any) -> DiagonalGaussian:
        return self.closed.gaussian(self.point(x))

    def mean_parts(self) -> list[tuple[nn.Module, float]]:
        return [(self.network, 1.0)]

    @property
    def closed(self) -> Closed:
        return Closed(lambda mean: DiagonalGaussian(mean, torch.full_like(mean, 0.5).double()))


class Wider(OfOnesOwn):
    def forward(self, x: Any) -> DiagonalGaussian:
        mean = self.point(x)
        return DiagonalGaussian(mean, torch.full_like(mean, 50.0).double())


def test_a_posterior_of_ones_own_in_closed_form() -> None:
    x, seen = blobs()[0], []
    for kind in (OfOnesOwn, Wider):
        model = rgpr.RGPR(kind(mlp()), likelihood="classification").fit([x], progress=False)
        found = model._extension().read(x).output
        assert torch.equal(found.variance, model.posterior(x).variance)
        handle = model.posterior.register_forward_hook(lambda *about: seen.append(about))
        model(x)
        assert len(seen) == 1
        handle.remove()
        seen.clear()


@pytest.mark.parametrize("training", [True, False])
def test_a_posterior_begins_in_the_mode_of_its_network(training: bool) -> None:
    """So that a call need not switch one of many modules."""
    assert rgpr.RGPR(mlp().train(training)).posterior.training == training


def test_hooks_on_the_posterior_see_its_calls() -> None:
    la, x = fitted(mlp())
    model = rgpr.RGPR(la).fit([x], progress=False)
    seen: list[Any] = []
    handle = model.posterior.register_forward_hook(lambda *about: seen.append(about))
    model(x)
    assert len(seen) == 1
    handle.remove()
    handle = model.posterior.register_forward_pre_hook(lambda *about: seen.append(about))
    model(x)
    assert len(seen) == 2
    handle.remove()
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *about: seen.append(about) if module is model.posterior else None
    )
    try:
        model(x)
    finally:
        handle.remove()
    assert len(seen) == 3


@pytest.mark.parametrize("residual", ["auto", "paper"])
def test_hooks_on_the_residual_see_its_calls_and_change_its_answer(residual: str) -> None:
    la, x = fitted(mlp())
    model = rgpr.RGPR(la, **({} if residual == "auto" else {"residual": residual}))
    model.fit([x], progress=False)
    expected = model(x)
    model.residual.register_forward_hook(lambda *about: about[-1] + 1)
    assert (model(x).amax(1) < expected.amax(1)).all()


def test_a_row_with_a_nan_has_no_covariance() -> None:
    """Outputs of which nothing is known do not go together either."""
    la, x = fitted(mlp(), "regression")
    model = rgpr.RGPR(la).fit([x], progress=False)
    expected, strange = model(x)[1], x.clone()
    strange[0, 1] = torch.nan
    covariance = model(strange)[1]
    assert covariance[0].isnan().all()
    torch.testing.assert_close(covariance[1:], expected[1:])


def test_a_compiled_network_below_laplace() -> None:
    la, x = fitted(torch.compile(mlp(), backend="eager"))
    torch._dynamo.reset()
    model = rgpr.RGPR(la).fit([x])
    assert model.posterior.head == "4"
    model.sigma2 = 0
    torch.testing.assert_close(model(x), la(x), rtol=1e-5, atol=1e-6)


def test_the_posterior_stands_on_its_own() -> None:
    """Neither the user's network nor the Laplace object is touched or needed."""
    network = mlp()
    before = {k: v.clone() for k, v in network.state_dict().items()}
    la, x = fitted(network)
    model = rgpr.RGPR(la).fit([x])
    expected = model(x)
    assert not any(m._forward_hooks for m in model.posterior.network.modules())
    assert any(m._forward_hooks for m in la.model.modules())  # laplace-torch's own, still there
    la.prior_precision = 1e6
    del la
    assert torch.equal(model(x), expected)
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())


@pytest.mark.parametrize(
    ("subset", "structure"),
    [
        ("all", "kron"),
        ("all", "diag"),
        ("all", "full"),
        ("all", "gp"),
        ("last_layer", "gp"),
        ("subnetwork", "full"),
    ],
)
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_everything_else_goes_through_laplace_torch(
    subset: str, structure: str, likelihood: str
) -> None:
    network, kwargs = mlp(), {}
    if subset == "subnetwork":
        mask = LargestMagnitudeSubnetMask(network, n_params_subnet=20)
        kwargs["subnetwork_indices"] = mask.select()
    if structure == "gp":
        kwargs["n_subset"] = 30
    la, x = fitted(network, likelihood, subset, structure, **kwargs)
    model = rgpr.RGPR(la).fit([x])
    assert isinstance(model.posterior, LaplacePosterior)
    assert model.layers == ["input", "1", "3"]
    x = 4 * x[:20]
    its_mean, its_covariance = la._glm_predictive_distribution(x)
    with torch.no_grad():
        if likelihood == "classification":
            model.sigma2 = 0
            torch.testing.assert_close(model(x), la(x), rtol=1e-5, atol=1e-6)
            model.sigma2 = 1
            torch.testing.assert_close(
                model(1e9 * x), torch.full((20, 3), 1 / 3), atol=1e-3, rtol=0
            )
            assert model(x, link_approx="mc").shape == (20, 3)
        else:
            mean, covariance = model(x)
            torch.testing.assert_close(mean, its_mean, rtol=1e-5, atol=1e-6)
            expected = its_covariance.double() + model.variance(x)[:, None, None] * torch.eye(3)
            torch.testing.assert_close(covariance, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(TypeError, match="LaplacePosterior cannot be saved: it predicts through"):
        model.save("never.safetensors")


def test_low_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its eigensolver wants a package that is on no registry; of full rank it is ``full``.

    So the eigenvectors come from the full Hessian here, and all else is laplace-torch's own.
    """
    full, x = fitted(mlp(), subset="all", structure="full")
    monkeypatch.setattr("laplace.baselaplace.find_spec", lambda name: name)
    low = LowRankLaplace(full.model, "classification", CurvlinopsGGN, prior_precision=0.7)
    values, vectors = torch.linalg.eigh(full.H)
    kept = values > 1e-6 * values.max()
    low.H, low.mean = (vectors[:, kept], values[kept]), full.mean
    low.n_data, low.n_outputs = full.n_data, full.n_outputs
    model = rgpr.RGPR(low).fit([x])
    torch.testing.assert_close(
        model.posterior(x).covariance, low._glm_predictive_distribution(x)[1].double()
    )
    torch.testing.assert_close(model(x), rgpr.RGPR(full).fit([x])(x), rtol=1e-3, atol=1e-4)


def test_unfitted_objects_are_refused() -> None:
    for subset, structure in (("last_layer", "kron"), ("all", "diag"), ("all", "gp")):
        kwargs = {"n_subset": 10} if structure == "gp" else {}
        la = Laplace(mlp(), "classification", subset, structure, **kwargs)
        with pytest.raises(ValueError, match=r"not fitted: call la\.fit"):
            rgpr.RGPR(la)


def test_one_output_is_no_softmax() -> None:
    network, x = mlp(4, 1), torch.randn(40, 4)
    la = Laplace(network, "classification", "last_layer", "diag")
    la.fit(DataLoader(TensorDataset(x, torch.rand(40, 1)), batch_size=40))
    with pytest.raises(ValueError, match="no curvature for one output"):
        rgpr.RGPR(la)


def test_likelihoods_must_agree() -> None:
    la, _ = fitted(mlp(), "regression")
    with pytest.raises(ValueError, match="the base was fitted for regression"):
        rgpr.RGPR(la, likelihood="classification")


def test_a_head_that_is_not_one_vector_is_refused() -> None:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x)[:, None]).mean(1)

    tensors = {"weight": torch.ones(5, 3), "bias": torch.ones(3)}
    posterior = LastLayerLaplace(Sequence(), "head", "diag", tensors, "classification")
    refused = r"'head' ran on shape \(2, 1, 5\)"
    with pytest.raises(ValueError, match=refused):
        posterior(torch.randn(2, 4))
    x, y = blobs()
    bare = rgpr.RGPR(posterior.network).fit([(x, y)], progress=False)
    bare.posterior = posterior
    with pytest.raises(ValueError, match=refused):
        bare(x[:2])
    with pytest.raises(ValueError, match="no linear layer 'tail'"):
        LastLayerLaplace(Sequence(), "tail", "diag", tensors, "classification")


_MANY_CLASSES = """
import resource, sys, torch
from torch import nn
import rgpr
network = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1000))
model = rgpr.load(sys.argv[1], network)
x = torch.randn(256, 64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with torch.no_grad():
    for link in ("probit", "bridge"):
        assert model(x, link_approx=link).shape == (256, 1000)
    assert model(x, link_approx="mc", n_samples=10).shape == (256, 1000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_a_thousand_classes_fit_into_a_gigabyte(tmp_path: Path) -> None:
    """Explicit Jacobians of 256 inputs would take 256 * 1000 * 513000 numbers: 525 GB."""
    network = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1000))
    x = torch.randn(64, 64)
    la = Laplace(network, "classification", "last_layer", "kron")
    la.fit(DataLoader(TensorDataset(x, torch.arange(64)), batch_size=32))
    model = rgpr.RGPR(la).fit([x])
    # laplace-torch's own answer is affordable for one input and a few classes of it.
    J, _ = la.backend.last_layer_jacobians(x[:1])
    its = la.functional_variance(J[:, :5])
    torch.testing.assert_close(
        model.posterior(x[:1]).covariance[:, :5, :5].float(), its, rtol=1e-4, atol=1e-6
    )
    model.save(tmp_path / "m.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", _MANY_CLASSES, str(tmp_path / "m.safetensors")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) / 1024**2 < 1


def test_far_away_on_digits(digits: Task) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la = Laplace(digits.network, "classification", "last_layer", "kron")
        la.fit(digits.loader())
        its = la(1e4 * digits.x).amax(1).mean()
    model = rgpr.RGPR(la).fit(digits.loader())
    with torch.no_grad():
        assert its > 0.5  # bounded away from 1, and from 1/C
        assert float(model(1e8 * digits.x).amax(1).max()) == pytest.approx(0.1, abs=2e-3)
        near, base = model(digits.x), la(digits.x)
    assert (near.argmax(1) == base.argmax(1)).all()
    assert float((near - base).abs().mean()) < 0.01
