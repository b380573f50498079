"""The Laplace bridge: the Dirichlet distribution that matches a Gaussian over logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...likelihoods.classification import softmax
from ..gaussian import Gaussian
from .base import register_link

__all__ = ["bridge", "bridge_logits"]


def bridge(gaussian: Gaussian, v: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """Probabilities ``(B, C)`` by :func:`bridge_logits`, in the dtype of the mean."""
    return softmax(bridge_logits(gaussian, v, temperature).to(gaussian.mean.dtype))


def bridge_logits(gaussian: Gaussian, v: Tensor, temperature: Tensor | float) -> Tensor:
    r"""Logarithms of the mean of the Dirichlet whose Laplace approximation has these moments.

    With the mean and covariance projected on :math:`\sum_k f_k = 0`,

    .. math:: \alpha_k \propto \frac{1}{V_{kk}}
              \Big(1 - \frac2K + \frac{e^{m_k}}{K^2} \sum_l e^{-m_l}\Big),

    in log space. Its match is poor for large variances, where the exponentials win over every
    variance; dividing all moments by :math:`s = \bar V / \sqrt{K/2}`, the mean's by its root,
    mends that. We do so where ``s > 1`` only: shrinking small variances to that scale too would
    sharpen predictions without bound near the data. At zero variance the answer is the softmax.

    Args:
        gaussian: The base posterior's outputs, ``(B, C)``.
        v: ``(B,)``, non-negative.
        temperature: Positive; the outputs are divided by it, so their variances by its square.

    Returns:
        ``(B, C)`` in float64; two columns for one output.
    """
    mean = gaussian.mean.double() / temperature
    squared = torch.as_tensor(temperature, dtype=torch.float64).square()
    diagonal = (gaussian.variance + v[:, None]) / squared
    if mean.shape[1] == 1:
        # Outputs -f/2 and f/2 lie in the projected space already.
        mean = torch.cat([-mean / 2, mean / 2], dim=1)
        diagonal = diagonal.expand_as(mean) / 4
    else:
        sums = (gaussian.row_sums + v[:, None]) / squared
        total = sums.sum(1, keepdim=True)
        share = torch.where(total > 0, sums / total, 0.0)
        mean = mean - share * mean.sum(1, keepdim=True)
        projected = diagonal - share * sums
        # Rounding of a difference: never below a sliver of what it started from.
        diagonal = torch.maximum(projected, 1e-12 * diagonal)
    K = mean.shape[1]
    typical = diagonal.mean(1, keepdim=True)
    scale = (typical / math.sqrt(K / 2)).clamp_min(1)
    mean = mean * scale.rsqrt()
    constant = math.log(1 - 2 / K) if K > 2 else -math.inf
    spread = mean + torch.logsumexp(-mean, 1, keepdim=True) - 2 * math.log(K)
    log_alpha = torch.logaddexp(spread, torch.full_like(spread, constant))
    some = typical > 0
    # A class without variance among others that have some would have all the weight.
    diagonal = torch.where(some, torch.maximum(diagonal, 1e-12 * typical), 1.0)
    bridged = log_alpha - diagonal.log()
    return torch.where(some, bridged, mean)


register_link("bridge", bridge_logits, needs_covariance=True)
