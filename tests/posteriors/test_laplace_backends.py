"""Every approximation that laplace-torch can build, by whichever backend, in float64."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import rgpr

# What laplace-torch 0.3 says NotImplementedError to, or cannot fit: BackPACK has no Kronecker
# factors of the empirical Fisher, ASDL no full one of a last layer.
IMPOSSIBLE = {("BackPackEF", "kron"), ("AsdlEF", "full")}
BACKENDS = ("CurvlinopsGGN", "CurvlinopsEF", "BackPackGGN", "BackPackEF", "AsdlGGN", "AsdlEF")


def problem(likelihood: str) -> tuple[nn.Module, Tensor, Any]:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = torch.randn(60, 4, dtype=torch.float64)
    y = torch.arange(60) % 3 if likelihood == "classification" else torch.randn_like(x[:, :3])
    return network, x, DataLoader(TensorDataset(x, y), batch_size=20)


def assert_its_variance(la: Any, x: Tensor) -> rgpr.RGPR:
    model = rgpr.RGPR(la).fit([x])
    last = hasattr(la.model, "last_layer")
    jacobians, mean = (la.backend.last_layer_jacobians if last else la.backend.jacobians)(x[:7])
    expected = la.functional_variance(jacobians).detach()
    found = model.posterior(x[:7])
    torch.testing.assert_close(found.covariance, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.mean, mean.detach(), rtol=1e-9, atol=1e-12)
    return model


@pytest.mark.parametrize(
    ("backend", "structure"),
    [pair for pair in product(BACKENDS, ("full", "kron", "diag")) if pair not in IMPOSSIBLE],
)
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_last_layers(likelihood: str, backend: str, structure: str) -> None:
    from laplace import Laplace, curvature

    if backend.startswith("BackPack"):
        pytest.importorskip("backpack")
    if backend.startswith("Asdl"):
        pytest.importorskip("asdl")
    network, x, loader = problem(likelihood)
    la = Laplace(network, likelihood, "last_layer", structure, backend=getattr(curvature, backend))
    la.fit(loader)
    before = [list(module._forward_hooks) for module in network.modules()]
    model = assert_its_variance(la, x)
    # The copy is free of either library, and theirs is as it was.
    for module in model.posterior.network.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert [list(module._forward_hooks) for module in network.modules()] == before


@pytest.mark.parametrize("backend", ["BackPackGGN", "CurvlinopsEF"])
def test_all_layers(backend: str) -> None:
    from laplace import Laplace, curvature

    pytest.importorskip("backpack")
    network, x, loader = problem("classification")
    la = Laplace(network, "classification", "all", "full", backend=getattr(curvature, backend))
    la.fit(loader)
    assert_its_variance(la, x)


def test_a_backpack_posterior_is_saved(tmp_path: Any) -> None:
    from laplace import Laplace, curvature

    pytest.importorskip("backpack")
    network, x, loader = problem("classification")
    la = Laplace(network, "classification", "last_layer", "full", backend=curvature.BackPackGGN)
    la.fit(loader)
    model = rgpr.RGPR(la).fit([x])
    model.save(tmp_path / "m")
    loaded = rgpr.load(tmp_path / "m", problem("classification")[0])
    assert torch.equal(model(x), loaded(x))
    fresh = rgpr.RGPR(problem("classification")[0])
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(model(x), fresh(x))


def test_an_exact_hessian_away_from_a_minimum() -> None:
    from laplace import Laplace, curvature

    network, x, loader = problem("classification")
    la = Laplace(network, "classification", "all", "full", backend=curvature.CurvlinopsHessian)
    la.fit(loader)
    la.prior_precision = 1e-3
    with pytest.raises(torch.linalg.LinAlgError, match=r"not positive definite.*CurvlinopsGGN"):
        rgpr.RGPR(la).fit([x])(x)


@pytest.mark.skipif(
    find_spec("asdfghjkl") is None,
    reason="laplace-torch's eigensolver: pip install --no-deps --target FOLDER asdfghjkl==0.1a2, "
    "and PYTHONPATH=FOLDER (later releases are the package asdl)",
)
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_low_rank(likelihood: str) -> None:
    """The only backend of laplace-torch 0.3 that has eigenvalues, and for all layers alone."""
    from laplace import Laplace

    network, x, loader = problem(likelihood)
    la = Laplace(network, likelihood, "all", "lowrank")
    la.fit(loader)
    vectors, values = la.H
    model = assert_its_variance(la, x)
    # By the dense inverse of the precision.
    precision = vectors @ torch.diag(la._H_factor * values) @ vectors.T
    dense = torch.linalg.inv(precision + torch.diag(la.prior_precision_diag))
    jacobians = la.backend.jacobians(x[:5])[0]
    expected = torch.einsum("bcp,pq,bkq->bck", jacobians, dense, jacobians).detach()
    torch.testing.assert_close(model.posterior(x[:5]).covariance, expected)
