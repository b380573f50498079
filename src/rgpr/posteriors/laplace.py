r"""Laplace approximations fitted by laplace-torch.

**Last layer.** With features :math:`\varphi` and outputs :math:`W\varphi + b`, the covariance of
the outputs is known in closed form and needs no Jacobian. Everything it takes is copied into
buffers, so prediction needs neither laplace-torch nor the object it came from.

- ``kron``: precision :math:`B \otimes A + \delta I` with :math:`A = Q_A \Lambda_A Q_A^\top`,
  :math:`B = Q_B \Lambda_B Q_B^\top` gives
  :math:`V = Q_B \operatorname{diag}_c\!\big(\sum_a (Q_A^\top\varphi)_a^2 /
  (\lambda^B_c \lambda^A_a + \delta)\big) Q_B^\top + V_\text{bias}`.
- ``diag``: :math:`V_{cc} = \sum_j \varphi_j^2 \Sigma_{cj} + \Sigma_{b_c}`.
- ``full``: :math:`V = \tilde\varphi^\top \Sigma \tilde\varphi` blockwise,
  :math:`\tilde\varphi = (\varphi, 1)`.

The largest feature of a row is taken out before squaring and its square put back in float64, so
features may be as large as float32 allows.

**Everything else** (all layers, subnetworks, functional) goes through laplace-torch's own calls.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss

from .._backend.arithmetic import peak_out
from .._backend.precision import at_least_float32, full_precision
from .._network.checks import check_target, network_dtype_device
from .._network.loaders import labelled, on_device
from .._network.outputs import outputs_of
from .._network.running import evaluating, plain_module, watching
from .base import THROUGH_ANOTHER_LIBRARY, Posterior, register_posterior
from .gaussian import DenseGaussian, DiagonalGaussian, Gaussian, standard_normal
from .links import probit

__all__ = [
    "LaplacePosterior",
    "LastLayerLaplace",
    "check_fitted",
    "choose_prior_precision",
    "from_laplace",
    "likelihood_of",
]


class LastLayerLaplace(Posterior):
    """Gaussian over the weights of the last linear layer.

    Args:
        network: The trained network.
        head: Name of its last linear layer.
        structure: ``"kron"``, ``"diag"`` or ``"full"``.
        tensors: What the structure needs:

            - ``kron``: ``in_basis (D, D)``, ``out_basis (C, C)``, ``spectrum (D, C)``, the
              posterior variances in those bases, and with a bias ``bias_root (C, C)``;
            - ``diag``: ``weight (D, C)`` and with a bias ``bias (C,)``, posterior variances;
            - ``full``: ``covariance (D', C, D', C)`` with ``D' = D + 1`` if there is a bias.
        likelihood: What it was fitted for.
    """

    kind = "last-layer-laplace"

    in_basis: Tensor
    out_basis: Tensor
    spectrum: Tensor
    marginal: Tensor
    marginal_bias: Tensor | None
    bias_root: Tensor
    weight: Tensor
    bias: Tensor
    covariance: Tensor

    def __init__(
        self,
        network: nn.Module,
        head: str,
        structure: str,
        tensors: Mapping[str, Tensor],
        likelihood: str | None,
    ) -> None:
        super().__init__(network)
        self.head, self.structure, self.likelihood = head, structure, likelihood
        if not isinstance(dict(self.network.named_modules()).get(head), nn.Linear):
            raise ValueError(f"the network has no linear layer '{head}' to be its last layer")
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.detach().clone(memory_format=torch.contiguous_format))
        if structure == "kron":
            self._derive()

    def _derive(self) -> None:
        """The diagonal of V directly: one product instead of two."""
        with full_precision(self.spectrum):
            marginal = self.spectrum @ self.out_basis.square().T
        self.register_buffer("marginal", marginal, persistent=False)
        bias = self.bias_root.double().square().sum(1) if self._has_bias else None
        self.register_buffer("marginal_bias", bias, persistent=False)

    def _load_from_state_dict(self, *arguments):  # type: ignore[no-untyped-def]
        super()._load_from_state_dict(*arguments)
        if self.structure == "kron":
            self._derive()

    def forward(self, x: Tensor) -> Gaussian:
        return self._gaussian(*_point_and_features(self.network, self.head, x))

    def _gaussian(self, mean: Tensor, features: Tensor) -> Gaussian:
        with full_precision(features):
            return self._in_full_precision(mean, features)

    def _in_full_precision(self, mean: Tensor, features: Tensor) -> Gaussian:
        features, peak = peak_out(features.to(at_least_float32(features.dtype)))
        features = features.to(next(self.buffers(recurse=False)).dtype)
        if self.structure == "kron":
            squares = (features @ self.in_basis).square()
            return _KroneckerGaussian(mean, squares, peak.double().square(), self)
        if self.structure == "diag":
            variance = (features.square() @ self.weight).double() * peak.double().square()
            if self._has_bias:
                variance = variance + self.bias
            return DiagonalGaussian(mean, variance)
        if self._has_bias:
            features = torch.cat([features, (1 / peak).to(features.dtype)], dim=1)
        half = torch.einsum("bi,icjd->bcjd", features, self.covariance)
        covariance = torch.einsum("bcjd,bj->bcd", half, features).double()
        return DenseGaussian(mean, covariance * peak.double().square()[..., None])

    def mean_parts(self) -> list[tuple[nn.Module, float]]:
        return [(self.network, 1.0)]

    def covariances(self, x: Tensor) -> Tensor:
        features = _point_and_features(self.network, self.head, x)[1].double()
        if self.structure == "kron":
            features, weights = features @ self.in_basis.double(), self.marginal.double()
            bias = self.marginal_bias
        elif self.structure == "diag":
            weights, bias = self.weight.double(), self.bias.double() if self._has_bias else None
        else:
            if self._has_bias:
                features = torch.cat([features, features.new_ones(len(x), 1)], 1)
            each = self.covariance.double().diagonal(dim1=1, dim2=3)  # (D', D', C)
            return torch.einsum("bi,ijc,dj->cbd", features, each, features)
        result = torch.einsum("bi,ic,di->cbd", features, weights, features)
        return result if bias is None else result + bias[:, None, None]

    def config(self) -> dict[str, Any]:
        return {"head": self.head, "structure": self.structure, "likelihood": self.likelihood}

    @classmethod
    def from_saved(
        cls, network: nn.Module, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> Self:
        return cls(network, tensors=tensors, **config)

    @property
    def _has_bias(self) -> bool:
        head: Any = self.network.get_submodule(self.head)
        return head.bias is not None


def _point_and_features(network: nn.Module, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """The network's outputs, and what went into its last layer."""
    seen: list[Tensor] = []
    head = network.get_submodule(name)
    with watching(network, {head: lambda module, args, output: seen.append(args[0])}):
        mean = outputs_of(network(x), x)
    if len(seen) != 1 or seen[0].dim() != 2:
        what = f"{len(seen)} times" if len(seen) != 1 else f"on shape {tuple(seen[0].shape)}"
        raise ValueError(
            f"the last layer '{name}' ran {what}; the closed form needs it to run once, "
            "on one feature vector per input"
        )
    return mean, seen[0]


class _KroneckerGaussian(Gaussian):
    """``V = Q_B diag((Q_A^T features)^2 @ spectrum) Q_B^T + bias_root bias_root^T``.

    Args:
        mean: Of the outputs.
        squares: Gives ``(Q_A^T features)^2 @ weights`` for weights ``(D, C)``.
        head: Whose they are.
    """

    def __init__(
        self, mean: Tensor, squares: Tensor, scale: Tensor, head: LastLayerLaplace
    ) -> None:
        self.mean, self._squares, self._scale, self._head = mean, squares, scale, head
        variance, bias = self._weighted(head.marginal), head.marginal_bias
        self.variance = variance if bias is None else variance + bias

    def _weighted(self, weights: Tensor) -> Tensor:
        with full_precision(weights):
            return self._scale * (self._squares @ weights).double()

    @property
    def _eigenvalues(self) -> Tensor:
        return self._weighted(self._head.spectrum)

    @property
    def _bias_root(self) -> Tensor | None:
        return self._head.bias_root.double() if self._head._has_bias else None

    @property
    def row_sums(self) -> Tensor:
        basis, root = self._head.out_basis.double(), self._bias_root
        sums = (self._eigenvalues * basis.sum(0)) @ basis.T
        return sums if root is None else sums + root @ root.sum(0)

    @property
    def covariance(self) -> Tensor:
        basis, root = self._head.out_basis.double(), self._bias_root
        covariance = (basis * self._eigenvalues[:, None, :]) @ basis.T
        return covariance if root is None else covariance + root @ root.T

    def noise(self, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        shape, root = (n_samples, *self.mean.shape), self._bias_root
        epsilon = standard_normal(shape, self.mean, generator)
        noise = (self._eigenvalues.sqrt() * epsilon) @ self._head.out_basis.double().T
        if root is not None:
            noise = noise + standard_normal(shape, self.mean, generator) @ root.T
        return noise


class LaplacePosterior(Posterior):
    """Any fitted laplace-torch object, through its own linearised predictive.

    It holds on to that object, so it cannot be saved or exported.

    Args:
        la: The fitted object.
    """

    def __init__(self, la: Any) -> None:
        network = la.model
        super().__init__(network.model if _is_feature_extractor(network) else network)
        self.la = la
        self.likelihood = likelihood_of(la)

    def forward(self, x: Tensor) -> Gaussian:
        mean = self.point(x.clone())  # it may change its input in place, and there is another pass
        # Its backends differentiate by autograd, whatever the caller's grad mode.
        with torch.inference_mode(False), torch.enable_grad():
            _, covariance = self.la._glm_predictive_distribution(x.detach().clone())
        return DenseGaussian(mean, covariance.detach())

    def mean_parts(self) -> list[tuple[nn.Module, float]]:
        return [(self.network, 1.0)]

    @property
    def no_graph(self) -> str | None:
        return THROUGH_ANOTHER_LIBRARY

    def covariances(self, x: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            _, joint = self.la._glm_predictive_distribution(x.detach().clone(), joint=True)
        outputs = len(joint) // len(x)
        blocks: Tensor = joint.detach().reshape(len(x), outputs, len(x), outputs)
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
    return _closed_form(la, *_network_and_head(la)) if _structure(la) else LaplacePosterior(la)


def _structure(la: Any) -> str | None:
    """That of a last-layer approximation with a closed form."""
    structures = {"KronLLLaplace": "kron", "DiagLLLaplace": "diag", "FullLLLaplace": "full"}
    structure = structures.get(type(la).__name__)
    return structure if structure and la.model.feature_reduction is None else None


def _network_and_head(la: Any) -> tuple[nn.Module, str]:
    """A copy of its network, and the name of the last layer there."""
    network = plain_module(copy.deepcopy(la.model.model))
    name = la.model._last_layer_name.removeprefix("_orig_mod.")
    _remove_its_hook(network.get_submodule(name))
    return network, name


def _closed_form(la: Any, network: nn.Module, name: str) -> LastLayerLaplace:
    """The posterior for the precision that ``la`` has now."""
    structure, head = str(_structure(la)), la.model.last_layer
    out_features, in_features = head.weight.shape
    bias = head.bias is not None
    with torch.no_grad():
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


def check_fitted(la: Any) -> None:
    """Refuse a laplace-torch object that was not fitted; its own error would be about NoneType."""
    fitted = getattr(la, "_fitted", None)
    if fitted is None:
        fitted = getattr(la, "n_data", 0) > 0 and getattr(la, "H", None) is not None
    if not fitted:
        raise ValueError(
            f"this {type(la).__name__} was not fitted: call la.fit(train_loader) before wrapping it"
        )


@torch.no_grad()
def choose_prior_precision(
    la: Any, val_loader: Iterable[Any], *, grid_size: int = 41, progress: bool = True
) -> Posterior:
    """Set a fitted laplace-torch object's prior precision by the likelihood of validation data.

    The best of a grid from 1e-4 to 1e4 for the probit. Of a last layer the network runs once, and
    each precision takes our closed form; of all layers it runs for each.

    Args:
        la: The object, for classification; it is changed.
        val_loader: Yields ``(x, y)`` that the network was not trained on.
        grid_size: How many precisions.
        progress: Show a progress bar where there is a terminal.

    Returns:
        The posterior with the best one.

    Raises:
        TypeError: It is not for classification.
        ValueError: None of them gives finite predictions, or a batch's targets are not classes;
            the object is as it was then.
    """
    if likelihood_of(la) != "classification":
        raise TypeError(
            f"this {type(la).__name__} is for {likelihood_of(la)}; the probit is for "
            "classification. la.optimize_prior_precision() takes any"
        )
    if grid_size < 1:
        raise ValueError(f"grid_size = {grid_size}; expected at least one precision")
    check_fitted(la)
    batches = labelled(val_loader, progress=progress, description="prior precision")
    gaussians = _by_features(la, batches) if _structure(la) else _by_passes(la, batches)
    before = la.prior_precision

    def loss(precision: float) -> float:
        la.prior_precision = precision
        losses = []
        try:
            for number, (gaussian, target) in enumerate(gaussians()):
                y = check_target(target, gaussian.mean, "classification", number)
                zero = torch.zeros(len(y), dtype=torch.float64, device=gaussian.mean.device)
                p = probit(gaussian, zero)
                losses.append(nll_loss(p.log(), on_device(y, p.device), reduction="none"))
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            return math.inf  # too small for a Hessian that rounding left indefinite
        mean = float(torch.cat(losses).mean())
        return math.inf if math.isnan(mean) else mean

    try:
        found = {p: loss(p) for p in torch.logspace(-4, 4, grid_size).tolist()}
        best = min(found, key=found.__getitem__)
        if math.isinf(found[best]):
            raise ValueError(
                "no prior precision from 1e-4 to 1e4 gives finite predictions; look at the "
                "network's outputs and at the Hessian that la.fit found"
            )
        la.prior_precision = best
        return from_laplace(la)
    except BaseException:
        la.prior_precision = before
        raise


_Predictions = Callable[[], Iterator[tuple[Gaussian, Tensor]]]


def _by_features(la: Any, batches: Iterable[tuple[Tensor, Tensor]]) -> _Predictions:
    """What gives the predictions, and the targets, for the precision that ``la`` has then."""
    network, name = _network_and_head(la)
    device = network_dtype_device(network)[1]
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    with evaluating(network):
        for x, y in batches:
            mean, features = _point_and_features(network, name, on_device(x, device))
            kept.append((mean.clone(), features.clone(), y))  # or all activations stay with them

    def gaussians() -> Iterator[tuple[Gaussian, Tensor]]:
        posterior = _closed_form(la, network, name)
        for mean, features, target in kept:
            yield posterior._gaussian(mean, features), target

    return gaussians


def _by_passes(la: Any, batches: Iterable[tuple[Tensor, Tensor]]) -> _Predictions:
    """The same by a pass of the network for each precision."""
    kept = list(batches)

    def gaussians() -> Iterator[tuple[Gaussian, Tensor]]:
        posterior = from_laplace(la)
        device = network_dtype_device(posterior.network)[1]
        with evaluating(posterior):
            for x, target in kept:
                yield posterior(on_device(x, device)), target

    return gaussians


def _kron_tensors(precision: Any, bias: bool) -> dict[str, Tensor]:
    """Bases and spectrum of a decomposed precision: the weight's block, then the bias's."""
    (out_values, in_values), (out_basis, in_basis) = (
        precision.eigenvalues[0],
        precision.eigenvectors[0],
    )
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


def _is_feature_extractor(network: nn.Module) -> bool:
    return type(network).__name__ == "FeatureExtractor" and hasattr(network, "last_layer")


def _remove_its_hook(head: nn.Module) -> None:
    """Drop the hook that laplace-torch leaves on the last layer; the copy must not need it."""
    for key, hook in list(head._forward_hooks.items()):
        if getattr(hook, "__module__", "").startswith("laplace."):
            del head._forward_hooks[key]


register_posterior("laplace.baselaplace.BaseLaplace", from_laplace)
