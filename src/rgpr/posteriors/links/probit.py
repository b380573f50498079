"""The generalised probit: divide each logit by a function of its own variance."""

from __future__ import annotations

import math

from torch import Tensor

from ...likelihoods.classification import softmax
from ..gaussian import Gaussian
from .base import register_link

__all__ = ["probit", "probit_logits"]


def probit(gaussian: Gaussian, v: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    r"""Probabilities :math:`\mathrm{softmax}(m_i / (T \sqrt{1 + \pi/8\,(V_{ii} + v)}))`.

    Args:
        gaussian: The outputs, with mean ``m`` and covariance ``V``; ``(B, C)``.
        v: A variance that is added to that of every output, ``(B,)``.
        temperature: ``T``, positive.

    Returns:
        ``(B, C)`` in the dtype of the mean; two columns for one output.
    """
    # Without variance and at T = 1 the logits are the mean, bit by bit.
    return softmax(_probit(gaussian, v, temperature).to(gaussian.mean.dtype))


def probit_logits(mean: Tensor, variance: Tensor) -> Tensor:
    r""":math:`m / \sqrt{1 + \pi/8\,V}`, never larger than the mean ``m``; ``(B, C)``.

    Args:
        mean: ``m``.
        variance: ``V``, the variance of each output.
    """
    return mean * (1 + math.pi / 8 * variance).rsqrt()


def _probit(gaussian: Gaussian, v: Tensor, temperature: Tensor | float) -> Tensor:
    return probit_logits(gaussian.mean, gaussian.variance + v[:, None]) / temperature


register_link("probit", _probit)
