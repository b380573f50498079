"""Log-probabilities and predictive deviations in float64, with whatever scales one asks for.

:meth:`rgpr.RGPR.forward` answers in the network's dtype and with the model's own scales. Conformal
ranks need more digits, and the scales that were there before any validation data were seen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..posteriors.gaussian import Gaussian
from ..posteriors.links import log_softmax, probit_logits, twice_probit_logits
from ..residual.variance import Residual
from .limits import at_limit, finite_outputs, known

__all__ = ["deviations", "log_probabilities"]


def log_probabilities(
    residual: Residual, temperature: Tensor, gaussian: Gaussian, u: Tensor, dtype: torch.dtype
) -> Tensor:
    """By the probit, ``(B, C)``; the uniform distribution in rows at the limit.

    Args:
        residual: With the scales to use.
        temperature: One number.
        gaussian: The base's outputs.
        u: ``(B, L)``, from the same pass.
        dtype: Dtype of the input.
    """
    v = residual(known(u, dtype))
    limit = at_limit(u, v, finite_outputs(gaussian), dtype)
    v = torch.where(limit, 0.0, v)
    mean = torch.where(limit[:, None], 0.0, gaussian.mean.double())
    variance = torch.where(limit[:, None], 0.0, gaussian.variance)
    if residual.onset is None:
        return log_softmax(probit_logits(mean, variance + v[:, None]) / temperature)
    return log_softmax(twice_probit_logits(mean, variance, v / residual.unit, temperature))


def deviations(residual: Residual, gaussian: Gaussian, u: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard deviations ``(B, C)`` that intervals are proportional to; infinite at the limit.

    Their squares are the base's variance, the residual's, and its unit: the last keeps them away
    from zero where a point estimate knows no variance at all.
    """
    v = residual(known(u, dtype))
    limit = at_limit(u, v, finite_outputs(gaussian), dtype)
    variance = gaussian.variance + (v + residual.unit)[:, None]
    return torch.where(limit[:, None], torch.inf, variance).sqrt()
