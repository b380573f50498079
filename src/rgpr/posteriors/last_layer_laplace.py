r"""A Gaussian over the weights of a network's last linear layer, in closed form.

With features :math:`\varphi` and outputs :math:`W\varphi + b`, the covariance of the outputs needs
no Jacobian:

- ``kron``: precision :math:`B \otimes A + \delta I` with :math:`A = Q_A \Lambda_A Q_A^\top`,
  :math:`B = Q_B \Lambda_B Q_B^\top` gives
  :math:`V = Q_B \operatorname{diag}_c\!\big(\sum_a (Q_A^\top\varphi)_a^2 /
  (\lambda^B_c \lambda^A_a + \delta)\big) Q_B^\top + V_\text{bias}`.
- ``diag``: :math:`V_{cc} = \sum_j \varphi_j^2 \Sigma_{cj} + \Sigma_{b_c}`.
- ``full``: :math:`V = \tilde\varphi^\top \Sigma \tilde\varphi` blockwise,
  :math:`\tilde\varphi = (\varphi, 1)`.

Everything it takes is in buffers, so prediction needs no other library. Where squares may overflow,
the largest feature of a row is taken out before squaring and its square put back in float64, so
features may be as large as float32 allows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from .._backend.arithmetic import can_look, peak_out, weighted_squares
from .._backend.precision import at_least_float32, full_precision
from .._network.batches import Batch
from .._network.outputs import Output, outputs
from .._network.running import watching
from .base import Closed, Posterior, features_of
from .gaussian import DenseGaussian, DiagonalGaussian, Gaussian, standard_normal

__all__ = ["LastLayerLaplace", "point_and_features"]

# Numbers of a matrix of outputs by outputs that are worked on at a time.
_NUMBERS = 1 << 20
# If the sum of all variances is so many times below the largest number, no step on the way to them
# overflowed, and the eigenvalues will not either: in an orthogonal basis none exceeds the sum.
_ROOM = 4
# What features are multiplied by.
_FACTORS = {"kron": "in_basis", "diag": "weight", "full": "covariance"}


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
            marginal = _in_parts(lambda rows: rows.square() @ self.spectrum.T, self.out_basis, 0)
        # The product is twice as fast where the weights of an output lie in one piece.
        self.register_buffer("marginal", marginal.T, persistent=False)
        bias = None
        if self._has_bias:
            bias = _in_parts(lambda rows: rows.double().square().sum(1), self.bias_root)
        self.register_buffer("marginal_bias", bias, persistent=False)

    def _load_from_state_dict(self, *arguments):  # type: ignore[no-untyped-def]
        super()._load_from_state_dict(*arguments)
        if self.structure == "kron":
            self._derive()

    def forward(self, x: Batch) -> Gaussian:
        return self._gaussian(*point_and_features(self.network, self.head, x, self.output))

    @property
    def closed(self) -> Closed | None:
        return Closed(self._gaussian, self.head)

    def _gaussian(self, mean: Tensor, features: Tensor) -> Gaussian:
        with full_precision(features):
            return self._in_full_precision(mean, features)

    def _in_full_precision(self, mean: Tensor, features: Tensor) -> Gaussian:
        features = features.to(at_least_float32(features.dtype))
        dtype: torch.dtype = getattr(self, _FACTORS[self.structure]).dtype
        if self.structure != "full" and can_look(features):
            # Most batches have no feature whose square overflows, and one look tells.
            found = self._diagonal(mean, features.to(dtype), None)
            if found.variance.sum().item() < torch.finfo(dtype).max / _ROOM:
                return found
        features, peak = peak_out(features)
        features = features.to(dtype)
        if self.structure != "full":
            return self._diagonal(mean, features, peak.double().square())
        if self._has_bias:
            features = torch.cat([features, (1 / peak).to(dtype)], dim=1)
        half = torch.einsum("bi,icjd->bcjd", features, self.covariance)
        covariance = torch.einsum("bcjd,bj->bcd", half, features).double()
        return DenseGaussian(mean, covariance * peak.double().square()[..., None])

    def _diagonal(self, mean: Tensor, features: Tensor, scale: Tensor | None) -> Gaussian:
        """The outputs for features whose squares were divided by ``scale``, ``(B, 1)``."""
        if self.structure == "kron":
            return _KroneckerGaussian(mean, features, scale, self)
        variance = _scaled(features.square() @ self.weight, scale)
        return DiagonalGaussian(mean, variance + self.bias if self._has_bias else variance)

    def mean_parts(self) -> list[tuple[nn.Module, float]]:
        return [(self.network, 1.0)]

    def covariances(self, x: Batch) -> Tensor:
        features = point_and_features(self.network, self.head, x, self.output)[1].double()
        if self.structure == "kron":
            features, weights = features @ self.in_basis.double(), self.marginal.double()
            bias = self.marginal_bias
        elif self.structure == "diag":
            weights, bias = self.weight.double(), self.bias.double() if self._has_bias else None
        else:
            if self._has_bias:
                features = torch.cat([features, features.new_ones(len(features), 1)], 1)
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


def point_and_features(
    network: nn.Module, name: str, x: Batch, which: Output = None
) -> tuple[Tensor, Tensor]:
    """The network's outputs, and what went into its last layer."""
    seen: list[Tensor] = []
    head = network.get_submodule(name)
    hooks = watching(network, {head: lambda module, args, output: seen.append(args[0])})
    with hooks, hooks:
        mean = outputs(network, x, which)
    return mean, features_of(name, seen)


def _in_parts(of_rows: Callable[[Tensor], Tensor], matrix: Tensor, axis: int = -1) -> Tensor:
    """What a function makes of the rows of a matrix, joined along an axis.

    With many outputs there is not the memory for a second matrix ``(C, C)``.
    """
    parts = torch.split(matrix, max(1, _NUMBERS // matrix.shape[1]))
    return torch.cat([of_rows(rows) for rows in parts], axis)


def _onto(vectors: Tensor, matrix: Tensor) -> Tensor:
    """Vectors ``(..., C)`` in float64 times the transpose of a matrix ``(C, C)``."""
    return _in_parts(lambda rows: vectors @ rows.double().T, matrix)


def _scaled(variance: Tensor, scale: Tensor | None) -> Tensor:
    """A variance in float64, times what was divided out before."""
    return variance.double() if scale is None else scale * variance.double()


def _sums(matrix: Tensor) -> Tensor:
    """The sum of the rows of a matrix in float64."""
    return _in_parts(lambda rows: rows.double().sum(0)[:, None], matrix).sum(-1)


class _KroneckerGaussian(Gaussian):
    """``V = Q_B diag((Q_A^T features)^2 @ spectrum) Q_B^T + bias_root bias_root^T``.

    Args:
        mean: The mean of the outputs.
        features: What went into the last layer, ``(B, D)``.
        scale: What their squares were divided by, ``(B, 1)``, or ``None`` for ones.
        head: Whose they are.
    """

    def __init__(
        self, mean: Tensor, features: Tensor, scale: Tensor | None, head: LastLayerLaplace
    ) -> None:
        self.mean, self._features, self._scale, self._head = mean, features, scale, head
        bias, found = head.marginal_bias, None
        if scale is not None:  # so that no feature is above one, as kernels need it
            found = weighted_squares(features, head.in_basis, head.marginal)
        variance = self._weighted(head.marginal) if found is None else _scaled(found, scale)
        self.variance = variance if bias is None else variance + bias

    @cached_property
    def _squares(self) -> Tensor:
        """``(Q_A^T features)^2``, ``(B, D)``."""
        with full_precision(self._features):
            return (self._features @ self._head.in_basis).square()

    def _weighted(self, weights: Tensor) -> Tensor:
        with full_precision(weights):
            return _scaled(self._squares @ weights, self._scale)

    @property
    def _eigenvalues(self) -> Tensor:
        return self._weighted(self._head.spectrum)

    @property
    def _bias_root(self) -> Tensor | None:
        return self._head.bias_root if self._head._has_bias else None

    @property
    def row_sums(self) -> Tensor:
        basis, root = self._head.out_basis, self._bias_root
        sums = _onto(self._eigenvalues * _sums(basis), basis)
        return sums if root is None else sums + _onto(_sums(root), root)

    @property
    def covariance(self) -> Tensor:
        basis, root = self._head.out_basis.double(), self._bias_root
        root = None if root is None else root.double()
        covariance = (basis * self._eigenvalues[:, None, :]) @ basis.T
        return covariance if root is None else covariance + root @ root.T

    def noise(self, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        shape, root = (n_samples, *self.mean.shape), self._bias_root
        epsilon = standard_normal(shape, self.mean, generator)
        noise = _onto(self._eigenvalues.sqrt() * epsilon, self._head.out_basis)
        if root is not None:
            noise = noise + _onto(standard_normal(shape, self.mean, generator), root)
        return noise
