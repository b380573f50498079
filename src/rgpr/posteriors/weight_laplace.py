r"""Laplace approximations over all layers, by samples of the weights.

laplace-torch fits them; what it takes to sample is copied into buffers. With the posterior
precision of a layer's weight :math:`B \otimes A + \delta I` in its eigenbasis, a sample is

.. math:: W = W_\mu + Q_B \big(E \oslash \sqrt{\lambda^B {\lambda^A}^\top + \delta}\big) Q_A^\top,
          \qquad E_{ij} \sim N(0, 1),

for :class:`KFL` (Kronecker-factored), and :math:`\theta = \mu + \sigma \odot \epsilon` for
:class:`DiagonalLaplace`. :func:`fit_laplace` fits networks with normalisation layers too, whose
parameters laplace-torch's Kronecker factors do not cover: they are held fixed. The linearised
predictive of the same object is ``rgpr.as_posterior(la)``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from .._network.batches import Batch
from .._network.loaders import labelled, on_device
from .._network.sources import as_batches, check_read_again
from .laplace_torch import check_fitted, likelihood_of
from .last_layer_curvature import closed_form_ggn
from .sampled import WeightPosterior, normal_like

__all__ = ["KFL", "DiagonalLaplace", "fit_laplace"]

_NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def fit_laplace(
    network: nn.Module,
    train_loader: Any,
    likelihood: str = "classification",
    structure: str = "kron",
    subset: str = "all",
    **options: Any,
) -> Any:
    """Fit laplace-torch over a copy of the network, normalisation layers held fixed.

    Of the last layer alone, ``diag`` and ``kron`` are fitted in closed form, without a Jacobian of
    all outputs, so thousands of classes fit into memory. ``kron`` still needs a few matrices of
    classes by classes.

    Args:
        network: The trained network; it is not changed.
        train_loader: A ``DataLoader`` of ``(x, y)``, or the pair itself.
        likelihood: ``"classification"`` or ``"regression"``.
        structure: ``"kron"`` or ``"diag"``; of the last layer ``"full"`` too.
        subset: ``"all"`` layers or the ``"last_layer"``.
        **options: For laplace-torch, such as ``prior_precision`` or ``backend``.

    Returns:
        The fitted laplace-torch object.
    """
    from laplace import Laplace
    from laplace.curvature import CurvlinopsGGN

    network = copy.deepcopy(network).eval()
    for module in network.modules():
        if isinstance(module, _NORMALISATIONS):
            module.requires_grad_(False)
    # The one backend of laplace-torch that takes parameters that are held fixed.
    options.setdefault("backend", closed_form_ggn() if subset == "last_layer" else CurvlinopsGGN)
    la = Laplace(
        network,
        likelihood,
        subset_of_weights=subset,
        hessian_structure=structure,
        **options,
    )
    check_read_again(train_loader, "laplace-torch")
    batches: Any = as_batches(train_loader, network)
    la.fit(batches)
    return la


class _AllLayerLaplace(WeightPosterior):
    """Samples of the weights around those of the network."""

    la_class: ClassVar[str]

    def __init__(
        self,
        network: nn.Module,
        names: list[str],
        tensors: Mapping[str, Tensor],
        likelihood: str | None,
        *,
        n_samples: int = 20,
        seed: int = 0,
    ) -> None:
        super().__init__(network, n_samples=n_samples, seed=seed)
        self.names, self.likelihood = names, likelihood
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.detach().clone(memory_format=torch.contiguous_format))

    @classmethod
    def from_laplace(cls, la: Any, *, n_samples: int = 20, seed: int = 0) -> Self:
        """From a fitted laplace-torch object over all layers.

        Raises:
            TypeError: It is of another structure.
            ValueError: It was not fitted.
        """
        if cls.la_class not in (base.__name__ for base in type(la).__mro__) or hasattr(
            la.model, "last_layer"
        ):
            raise TypeError(
                f"{cls.__name__} takes a {cls.la_class} of laplace-torch over all layers, not a "
                f"{type(la).__name__}; rgpr.as_posterior takes any"
            )
        check_fitted(la)
        by_id = {id(p): name for name, p in la.model.named_parameters()}
        names = [by_id[id(p)] for p in la.params]
        with torch.no_grad():
            tensors = cls._tensors(la)
        return cls(la.model, names, tensors, likelihood_of(la), n_samples=n_samples, seed=seed)

    @classmethod
    def fit(
        cls,
        network: nn.Module,
        train_loader: Any,
        likelihood: str = "classification",
        *,
        prior_precision: float | None = None,
        val_loader: Iterable[Any] | None = None,
        n_samples: int = 20,
        seed: int = 0,
        **options: Any,
    ) -> Self:
        """Fit by :func:`fit_laplace` and take what it takes to sample.

        Samples of weights leave the region where the quadratic approximation holds unless the
        prior is much tighter than the linearised predictive needs, so the evidence is no guide
        here: without a ``prior_precision`` the one is taken, of 1, 10 .. 100000, under which the
        samples predict best.

        Args:
            network: The trained network; it is not changed.
            train_loader: A ``DataLoader`` of ``(x, y)``, or the pair itself.
            likelihood: ``"classification"`` or ``"regression"``.
            prior_precision: The prior precision of the weights; chosen if left out.
            val_loader: Data to choose it by; the training data if left out, which makes for a
                tight posterior.
            n_samples: Number of samples behind the moments.
            seed: Their seed.
            **options: For laplace-torch.
        """
        structure = {"KronLaplace": "kron", "DiagLaplace": "diag"}[cls.la_class]
        start = 1.0 if prior_precision is None else prior_precision
        la = fit_laplace(
            network, train_loader, likelihood, structure, prior_precision=start, **options
        )
        if prior_precision is not None:
            return cls.from_laplace(la, n_samples=n_samples, seed=seed)
        data = as_batches(train_loader if val_loader is None else val_loader, network)
        data = list(labelled(data, network, progress=False, description="prior"))
        best, least = start, torch.inf
        for exponent in range(6):
            la.prior_precision = 10.0**exponent
            loss = cls.from_laplace(la, n_samples=10, seed=seed)._loss(data[:4])
            if loss < least:
                best, least = 10.0**exponent, loss
        la.prior_precision = best
        return cls.from_laplace(la, n_samples=n_samples, seed=seed)

    @torch.no_grad()
    def _loss(self, data: list[tuple[Batch, Tensor]]) -> float:
        """How badly the samples predict: negative log-likelihood, or squared error."""
        device = next(self.network.parameters()).device
        losses = []
        for x, y in data:
            generator = torch.Generator().manual_seed(self.seed)
            samples, y = self.sample(on_device(x, device), self.n_samples, generator), y.to(device)
            if self.likelihood == "regression":
                losses.append((samples.mean(0) - y.reshape(len(y), -1)).square().mean())
            else:
                p = samples.softmax(-1).mean(0).gather(1, y[:, None])
                losses.append(-p.clamp_min(1e-30).log().mean())
        return float(torch.stack(losses).mean())

    @staticmethod
    def _tensors(la: Any) -> dict[str, Tensor]:
        raise NotImplementedError

    def _deviation(self, index: int, shape: torch.Size, generator: Any) -> Tensor:
        raise NotImplementedError

    def weights(self, generator: torch.Generator | None) -> Iterator[Mapping[str, Tensor]]:
        means = dict(self.network.named_parameters())
        while True:
            yield {
                name: means[name] + self._deviation(i, means[name].shape, generator).to(means[name])
                for i, name in enumerate(self.names)
            }

    def config(self) -> dict[str, Any]:
        return {
            "names": self.names,
            "likelihood": self.likelihood,
            "n_samples": self.n_samples,
            "seed": self.seed,
        }


class KFL(_AllLayerLaplace):
    """Kronecker-factored Laplace over all layers.

    Build it with :meth:`fit` or :meth:`from_laplace`.
    """

    kind = "kfl"
    la_class = "KronLaplace"

    @staticmethod
    def _tensors(la: Any) -> dict[str, Tensor]:
        precision = la.posterior_precision
        tensors = {}
        blocks = zip(precision.eigenvectors, precision.eigenvalues, precision.deltas, strict=True)
        for i, (bases, values, delta) in enumerate(blocks):
            spectrum = values[0] if len(values) == 1 else torch.outer(*values)
            tensors[f"scale_{i}"] = (spectrum.clamp_min(0) + delta).rsqrt()
            for j, basis in enumerate(bases):
                tensors[f"basis_{i}_{j}"] = basis
        return tensors

    def _deviation(self, index: int, shape: torch.Size, generator: Any) -> Tensor:
        scale = self.get_buffer(f"scale_{index}")
        noise = normal_like(scale, generator) * scale
        deviation = self.get_buffer(f"basis_{index}_0") @ noise
        if scale.dim() == 2:
            deviation = deviation @ self.get_buffer(f"basis_{index}_1").T
        return deviation.reshape(shape)


class DiagonalLaplace(_AllLayerLaplace):
    """Laplace with a diagonal covariance over all layers.

    Build it with :meth:`fit` or :meth:`from_laplace`.
    """

    kind = "diagonal-laplace"
    la_class = "DiagLaplace"

    @staticmethod
    def _tensors(la: Any) -> dict[str, Tensor]:
        pieces = torch.split(la.posterior_scale, [p.numel() for p in la.params])
        return {f"scale_{i}": piece for i, piece in enumerate(pieces)}

    def _deviation(self, index: int, shape: torch.Size, generator: Any) -> Tensor:
        scale = self.get_buffer(f"scale_{index}")
        return (normal_like(scale, generator) * scale).reshape(shape)
