r"""Curvature of a last linear layer in closed form, for laplace-torch to fit by.

With features :math:`\varphi_n` and the Hessian :math:`\Lambda_n` of the loss in the outputs, the
generalised Gauss-Newton matrix of the weights is
:math:`\sum_n \Lambda_n \otimes \varphi_n \varphi_n^\top`. Its diagonal and its Kronecker factors
are products of two matrices with a row for each example:

.. math:: H_{cj} = \sum_n (\Lambda_n)_{cc} \varphi_{nj}^2, \qquad
          B = \sum_n \Lambda_n, \qquad A = \frac{1}{N} \sum_n \varphi_n \varphi_n^\top,

for a softmax with :math:`\sum_n \Lambda_n = \operatorname{diag}(\sum_n p_n) - P^\top P`. So no
Jacobian is needed, whose size is that of the weights times the outputs for every example, and no
matrix of outputs by outputs for every example either. The rows of that matrix sum to zero, so its
diagonal is taken as what the rest of each row leaves: the difference above would cancel in float32,
and have negative eigenvalues.

laplace-torch adds up the factors of batches one by one, and gives each factor the root of the scale
of the loss. The same is done here, because laplace-torch itself takes the batches that have no
closed form, and its factors are added to ours.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["closed_form_ggn"]


def _softmax_curvature(p: Tensor) -> Tensor:
    """The sum over rows of ``diag(p) - p p^T``, ``(C, C)``, from probabilities ``(B, C)``."""
    products = p.T @ p
    products.fill_diagonal_(0)
    left = products.sum(1)
    products.neg_().diagonal().copy_(left)
    return products


@cache
def closed_form_ggn() -> type[Any]:
    """laplace-torch's ``CurvlinopsGGN`` with a last layer's ``diag`` and ``kron`` in closed form.

    What has no closed form here (features of several positions, frozen weights, sampled Fisher
    matrices) goes through ``CurvlinopsGGN`` as before.
    """
    from laplace.curvature import CurvlinopsGGN
    from laplace.utils import Kron

    class LastLayerGGN(CurvlinopsGGN):
        def diag(self, x: Any, y: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
            outputs, features, biased = self._last_layer(x)
            if features is None:
                found: tuple[Tensor, Tensor] = super().diag(x, y, **options)
                return found
            curvature = torch.ones_like(outputs)
            if self.likelihood == "classification":
                p = outputs.softmax(1)
                curvature = p * (1 - p)
            parts = [(curvature.T @ features.square()).flatten()]
            if biased:
                parts.append(curvature.sum(0))
            return self.factor * self.lossfunc(outputs, y), torch.cat(parts)

        def kron(self, x: Any, y: Tensor, N: int, **options: Any) -> tuple[Tensor, Any]:
            outputs, features, biased = self._last_layer(x)
            if features is None:
                found: tuple[Tensor, Any] = super().kron(x, y, N, **options)
                return found
            if self.likelihood == "classification":
                b = _softmax_curvature(outputs.softmax(1))
            else:
                b = outputs.new_full(outputs.shape[1:], len(outputs)).diag()
            a, root = features.T @ features, self.factor**0.5
            factors: Any = [[b / root, a * (root / N)]]
            if biased:
                factors.append([b])
            elif b.numel() == a.numel() == 1:  # of which laplace-torch makes one factor
                factors = [[b * (a / len(outputs))]]
            return self.factor * self.lossfunc(outputs, y), Kron(factors)

        @torch.no_grad()
        def _last_layer(self, x: Any) -> tuple[Tensor, Tensor | None, bool]:
            """Outputs, features unless there is no closed form, and whether it has a bias."""
            if not self.last_layer or self.stochastic:
                return torch.zeros(0), None, False
            extractor: Any = self.model
            outputs, features = extractor.forward_with_features(x)
            head, plain = extractor.last_layer, outputs.ndim == features.ndim == 2
            learned = all(each.requires_grad for each in head.parameters())
            closed = isinstance(head, nn.Linear) and plain and learned
            if closed:  # What the network does to the head's outputs would belong to the Hessian.
                own = F.linear(features, head.weight, head.bias)
                # Zeros are zeros whatever is done to them, so they tell nothing.
                closed = own.shape == outputs.shape and bool(outputs.any())
            if closed:
                closed = bool(((own - outputs).abs() <= 1e-4 * outputs.abs().max()).all())
            return outputs, features if closed else None, head.bias is not None

    return LastLayerGGN
