r"""From Gaussian outputs to class probabilities.

The outputs are :math:`N(m, V + v I)`: the base posterior's mean and covariance, and the
residual's variance ``v``. One output means two classes, with the outputs 0 and f.

Variances are float64 and probabilities have the dtype of the mean.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .gaussian import Gaussian

__all__ = [
    "bridge",
    "calibrated",
    "evidence",
    "log_softmax",
    "monte_carlo",
    "probit",
    "probit_logits",
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
    like = gaussian.mean
    mean = like.double() / temperature
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
    bridged = torch.softmax(log_alpha - diagonal.log(), -1)
    return torch.where(typical > 0, bridged, torch.softmax(mean, -1)).to(like.dtype)


def evidence(probabilities: Tensor, n_samples: int | None = None) -> Tensor:
    """Log-odds of the most probable class, above those of a guess: ``(B,)``, zero at uniform.

    Args:
        probabilities: ``(B, C)``.
        n_samples: Of how many samples they are the mean, if they are. Unless the number of classes
            divides it, guesses cannot be spread evenly over them; what is left over is no
            evidence.
    """
    classes = probabilities.shape[1]
    top, winner = probabilities.max(1, keepdim=True)
    # The others by their sum, not as one minus the top: that would round to zero.
    others = probabilities.scatter(1, winner, 0.0).sum(1)
    tiny = torch.finfo(probabilities.dtype).tiny
    found = top[:, 0].log() - others.clamp_min(tiny).log() + math.log(classes - 1)
    if n_samples is not None:
        most = math.ceil(n_samples / classes)
        rest = n_samples - most
        found = found - (math.log(most * (classes - 1) / rest) if rest else math.inf)
    return found.clamp_min(0)


def calibrated(
    probabilities: Tensor,
    base: Tensor,
    stretch: Tensor | float,
    n_samples: int | None = None,
) -> Tensor:
    r"""The base's probabilities with a confidence that is calibrated and keeps its ranking.

    Added variance ranks inputs by how strange they are, but makes all of them under-confident. The
    evidence for the winning class is multiplied by a number, so no two inputs change places, and
    the confidence that this gives is put in place of the base's own. Evidence goes to zero far
    away, and with it the result to the uniform distribution.

    Args:
        probabilities: ``(B, C)``, with the residual's variance.
        base: ``(B, C)``, without it.
        stretch: The factor, positive.
        n_samples: See :func:`evidence`.

    Returns:
        ``(B, C)``; the same classes win as in ``base``.
    """
    classes = base.shape[1]
    stretched = stretch * evidence(probabilities, n_samples)
    confidence = torch.sigmoid(stretched - math.log(classes - 1))[:, None]
    top, winner = base.max(1, keepdim=True)
    # More confidence: the others shrink alike. Less: all move towards the uniform distribution.
    tiny = torch.finfo(base.dtype).tiny
    sharper = (base * (1 - confidence) / (1 - top).clamp_min(tiny)).scatter(1, winner, confidence)
    share = ((confidence - 1 / classes) / (top - 1 / classes).clamp_min(tiny)).clamp(0, 1)
    flatter = 1 / classes + (base - 1 / classes) * share
    return torch.where(confidence > top, sharper, flatter)


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities ``(..., C)`` of outputs; two columns for one output."""
    return torch.log_softmax(_two_columns(logits), -1)


def _softmax(logits: Tensor) -> Tensor:
    return torch.softmax(_two_columns(logits), -1)


def _two_columns(logits: Tensor) -> Tensor:
    if logits.shape[-1] == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], dim=-1)
    return logits
