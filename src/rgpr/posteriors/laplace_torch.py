r"""Laplace approximations fitted by laplace-torch.

A Gaussian over the last layer's weights becomes a
:class:`rgpr.posteriors.LastLayerLaplace`, which no longer needs laplace-torch.
Everything else (all layers, subnetworks, functional) goes through laplace-torch's own calls.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._network.batches import Batch, copied, mapped, rows_of
from .._network.running import plain_module
from .base import THROUGH_ANOTHER_LIBRARY, Posterior, register_posterior
from .gaussian import DenseGaussian, Gaussian
from .last_layer_laplace import LastLayerLaplace

__all__ = [
    "LaplacePosterior",
    "check_fitted",
    "closed_form",
    "from_laplace",
    "likelihood_of",
    "network_and_head",
    "network_of",
    "structure_of",
]


class LaplacePosterior(Posterior):
    """Any fitted laplace-torch object, through its own linearised predictive.

    It holds on to that object, so it cannot be saved or exported.

    Args:
        la: The fitted object.
    """

    def __init__(self, la: Any) -> None:
        super().__init__(network_of(la))
        self.la = la
        self.likelihood = likelihood_of(la)

    def forward(self, x: Batch) -> Gaussian:
        mean = self.point(copied(x))  # it may change its input in place, and there is another pass
        # Its backends differentiate by autograd, whatever the caller's grad mode.
        with torch.inference_mode(False), torch.enable_grad(), _definite():
            _, covariance = self.la._glm_predictive_distribution(_detached(x))
        return DenseGaussian(mean, covariance.detach())

    def mean_parts(self) -> list[tuple[nn.Module, float]]:
        return [(self.network, 1.0)]

    @property
    def no_graph(self) -> str | None:
        return THROUGH_ANOTHER_LIBRARY

    def covariances(self, x: Batch) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            _, joint = self.la._glm_predictive_distribution(_detached(x), joint=True)
        rows = rows_of(x)
        outputs = len(joint) // rows
        blocks: Tensor = joint.detach().reshape(rows, outputs, rows, outputs)
        return blocks.diagonal(dim1=1, dim2=3).permute(2, 0, 1)


def from_laplace(la: Any) -> Posterior:
    """A posterior from a fitted laplace-torch object.

    Raises:
        ValueError: It was not fitted, or its last layer cannot be read.
    """
    check_fitted(la)
    if likelihood_of(la) == "classification" and la.n_outputs == 1:
        raise ValueError(
            "laplace-torch's classification likelihood is a softmax, which has no curvature for "
            "one output: this posterior knows nothing of the data. Give the network two outputs, "
            "or wrap the network itself"
        )
    return closed_form(la, *network_and_head(la)) if structure_of(la) else LaplacePosterior(la)


def structure_of(la: Any) -> str | None:
    """That of a last-layer approximation with a closed form."""
    structures = {"KronLLLaplace": "kron", "DiagLLLaplace": "diag", "FullLLLaplace": "full"}
    structure = structures.get(type(la).__name__)
    return structure if structure and la.model.feature_reduction is None else None


def network_and_head(la: Any) -> tuple[nn.Module, str]:
    """A copy of its network, and the name of the last layer there."""
    original = la.model.model
    # BackPACK leaves activations on the modules, with graphs that torch does not copy.
    held = [value for module in original.modules() for value in vars(module).values()]
    left = [t for t in held if isinstance(t, Tensor) and t.grad_fn is not None]
    network = plain_module(copy.deepcopy(original, {id(t): t.detach() for t in left}))
    for module in network.modules():
        _remove_their_hooks(module)
    return network, la.model._last_layer_name.removeprefix("_orig_mod.")


def closed_form(la: Any, network: nn.Module, name: str) -> LastLayerLaplace:
    """The posterior for the precision that ``la`` has now."""
    structure, head = str(structure_of(la)), la.model.last_layer
    out_features, in_features = head.weight.shape
    bias = head.bias is not None
    with torch.no_grad(), _definite():
        if structure == "kron":
            tensors = _kron_tensors(la.posterior_precision, bias)
        elif structure == "diag":
            variance = la.posterior_variance
            weight = variance[: out_features * in_features]
            tensors = {"weight": weight.reshape(out_features, in_features).T.contiguous()}
            if bias:
                tensors["bias"] = variance[out_features * in_features :]
        else:
            tensors = {"covariance": _full_tensor(la.posterior_covariance, head)}
    return LastLayerLaplace(network, name, structure, tensors, likelihood_of(la))


@contextmanager
def _definite() -> Iterator[None]:
    """Say what to do where a precision has no inverse."""
    try:
        yield
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise torch.linalg.LinAlgError(  # type: ignore[attr-defined]
            "the precision of this Laplace approximation is not positive definite, as that of an "
            "exact Hessian away from a minimum; fit with a backend of the GGN, such as "
            f"CurvlinopsGGN, or choose a larger prior_precision ({error})"
        ) from error


def check_fitted(la: Any) -> None:
    """Refuse a laplace-torch object that was not fitted; its own error would be about NoneType."""
    fitted = getattr(la, "_fitted", None)
    if fitted is None:
        fitted = getattr(la, "n_data", 0) > 0 and getattr(la, "H", None) is not None
    if not fitted:
        raise ValueError(
            f"this {type(la).__name__} was not fitted: call la.fit(train_loader) before wrapping it"
        )


def _kron_tensors(precision: Any, bias: bool) -> dict[str, Tensor]:
    """Bases and spectrum of a decomposed precision: the weight's block, then the bias's."""
    (out_values, *in_values), (out_basis, *in_basis) = (
        precision.eigenvalues[0],
        precision.eigenvectors[0],
    )
    # A single weight without a bias has one factor.
    [in_values] = in_values or [torch.ones_like(out_values)]
    [in_basis] = in_basis or [torch.ones_like(out_basis)]
    spectrum = 1 / (torch.outer(in_values, out_values) + precision.deltas[0])
    tensors = {"in_basis": in_basis, "out_basis": out_basis, "spectrum": spectrum}
    if bias:
        (values,), (basis,) = precision.eigenvalues[1], precision.eigenvectors[1]
        tensors["bias_root"] = basis * (values + precision.deltas[1]).rsqrt()
    return tensors


def _full_tensor(covariance: Tensor, head: nn.Linear) -> Tensor:
    """``(P, P)`` over (weight row by row, bias) as ``(D', C, D', C)``, the bias as a feature."""
    out_features, in_features = head.weight.shape
    index = torch.arange(out_features * in_features).reshape(out_features, in_features).T
    if head.bias is not None:
        index = torch.cat([index, out_features * in_features + torch.arange(out_features)[None]])
    order = index.reshape(-1).to(covariance.device)
    return covariance[order][:, order].reshape(*index.shape, *index.shape)


def likelihood_of(la: Any) -> str | None:
    """What it was fitted for, in our words; ``None`` for what we have no word for."""
    name = str(getattr(la.likelihood, "value", la.likelihood))
    return name if name in ("classification", "regression") else None


def _detached(x: Batch) -> Any:
    """A copy to be differentiated by laplace-torch, which takes dicts as they are."""
    return mapped(x, lambda part: part.detach().clone())


def network_of(la: Any) -> nn.Module:
    """The user's network, without what laplace-torch wraps around it for a last layer."""
    network: nn.Module = la.model
    wrapped = type(network).__name__ == "FeatureExtractor" and hasattr(network, "last_layer")
    return network.model if wrapped else network  # type: ignore[return-value]


def _remove_their_hooks(module: nn.Module) -> None:
    """Drop the hooks of laplace-torch and BackPACK, which the copy must not need."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key, hook in list(hooks.items()):
            package = (getattr(hook, "__module__", None) or "").partition(".")[0]
            if package in ("laplace", "backpack"):
                del hooks[key]


register_posterior("laplace.baselaplace.BaseLaplace", from_laplace)
