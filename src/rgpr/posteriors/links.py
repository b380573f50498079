r"""From Gaussian outputs to class probabilities.

The outputs are :math:`N(m, V)`, the base posterior's mean and covariance, and there is a residual
of variance ``v``. The paper's adds to the covariance, :math:`N(m, V + v I)`. The default's is
averaged over after the base's: a link makes logits of the base's Gaussian, and these are divided by
:math:`\sqrt{1 + \frac\pi8 v}`. One output means two classes, with the outputs 0 and f.

Variances are float64 and probabilities have the dtype of the mean.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .gaussian import Gaussian

__all__ = [
    "bridge",
    "bridge_logits",
    "log_softmax",
    "monte_carlo",
    "probit",
    "probit_logits",
    "twice_probit",
    "twice_probit_logits",
    "two_columns",
]


def probit(gaussian: Gaussian, v: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    r"""Generalised probit: :math:`\mathrm{softmax}(m_i / (T \sqrt{1 + \pi/8\,(V_{ii} + v)}))`.

    Args:
        gaussian: The base posterior's outputs, ``(B, C)``.
        v: ``(B,)``, non-negative.
        temperature: ``T``, positive.

    Returns:
        ``(B, C)`` probabilities; ``(B, 2)`` for one output.
    """
    logits = probit_logits(gaussian.mean, gaussian.variance + v[:, None]) / temperature
    # Without variance and at T = 1 these are the mean, bit by bit.
    return _softmax(logits.to(gaussian.mean.dtype))


def twice_probit(gaussian: Gaussian, beyond: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    r"""The base's probit, and the probit once more for the residual.

    .. math:: \mathrm{softmax}\Big(\frac{t_i}{T \sqrt{1 + \frac\pi8 v}}\Big), \qquad
              t_i = \frac{m_i}{\sqrt{1 + \frac\pi8 V_{ii}}}

    Averaging over the base's posterior first and over the residual afterwards divides all of the
    base's logits by one number. So the order of the classes is the base's, equal ones stay equal,
    and without variance the answer is the base's, bit by bit. :func:`probit` takes both variances
    at once, where classes with unlike :math:`V_{ii}` can change places.

    Args:
        gaussian: The base posterior's outputs, ``(B, C)``.
        beyond: :math:`\frac\pi8 v`, ``(B,)``, non-negative.
        temperature: ``T``, positive.

    Returns:
        ``(B, C)`` probabilities; ``(B, 2)`` for one output.
    """
    logits = twice_probit_logits(gaussian.mean, gaussian.variance, beyond, temperature)
    return _softmax(logits.to(gaussian.mean.dtype))


def twice_probit_logits(
    mean: Tensor, variance: Tensor, beyond: Tensor, temperature: Tensor | float
) -> Tensor:
    """What goes into the softmax of :func:`twice_probit`, ``(B, C)`` in float64."""
    return probit_logits(mean, variance) * (1 + beyond[:, None]).rsqrt() / temperature


def probit_logits(mean: Tensor, variance: Tensor) -> Tensor:
    r""":math:`m / \sqrt{1 + \pi/8\,\mathrm{variance}}`: never larger than the mean."""
    return mean * (1 + math.pi / 8 * variance).rsqrt()


def monte_carlo(samples: Tensor) -> Tensor:
    """The mean of the softmax over samples: the last line of the paper's Algorithm 1.

    Args:
        samples: ``(S, B, C)`` outputs, the residual's noise in them, divided by the temperature.

    Returns:
        ``(B, C)`` probabilities; ``(B, 2)`` for one output.
    """
    return _softmax(samples).mean(0)


def bridge(gaussian: Gaussian, v: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    r"""Laplace bridge: the mean of the Dirichlet whose Laplace approximation has these moments.

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
        ``(B, C)`` probabilities; ``(B, 2)`` for one output.
    """
    return torch.softmax(bridge_logits(gaussian, v, temperature), -1).to(gaussian.mean.dtype)


def bridge_logits(gaussian: Gaussian, v: Tensor, temperature: Tensor | float) -> Tensor:
    """What goes into the softmax of :func:`bridge`, ``(B, C)`` in float64; two for one output."""
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


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities ``(..., C)`` of outputs; two columns for one output."""
    return torch.log_softmax(two_columns(logits), -1)


def _softmax(logits: Tensor) -> Tensor:
    return torch.softmax(two_columns(logits), -1)


def two_columns(logits: Tensor) -> Tensor:
    """Outputs ``(..., C)``; the pair ``(0, f)`` for one output ``f``."""
    if logits.shape[-1] == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], dim=-1)
    return logits
