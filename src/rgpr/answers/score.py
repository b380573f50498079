r"""How strange an input is: how little the network has to say about it, for how far away it is.

.. math:: S(x) = \tfrac12 \log r(x) - \log E(x), \qquad
          E(x) = \log \sum_c e^{f_c(x)} - \frac1C \sum_c f_c(x)

:math:`r` is :meth:`rgpr.residual.variance.Residual.strangeness`, so its root is a standard
deviation. :math:`E` is the evidence in the logits :math:`f`, at least :math:`\log C`, so
that its logarithm exists. Together they say how many standard deviations of the residual the
network's evidence is worth. One logit stands for the pair ``(0, f)``. A regression has no evidence
to weigh, and its score is :math:`\tfrac12 \log r`.

Away from the data :math:`r` grows like the cube of the distance and :math:`E` at most like the
distance, so the score grows without bound, like half the logarithm of the distance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._backend.precision import full_precision
from ..extension import Extension, Reading
from ..posteriors.gaussian import Gaussian
from ..posteriors.links import two_columns
from .probabilities import at_limit, finite_outputs, known

__all__ = ["score", "weighed"]

# Strangeness is about one at the data. Below this it is rounding, where nothing ever varied.
_LEAST = 1e-12


def score(extension: Extension, reading: Reading[Gaussian]) -> Tensor:
    """``S``: ``(B,)`` in float64, higher for stranger inputs; infinite at the limit."""
    gaussian, u = reading.output, reading.u
    with full_precision(u):
        strangeness = extension.residual.strangeness(known(u, reading.dtype))
        limit = at_limit(reading, strangeness, finite_outputs(gaussian))
        strange = weighed(strangeness, gaussian.mean, extension.likelihood)
        return torch.where(limit, torch.inf, strange)


def weighed(strangeness: Tensor, mean: Tensor, likelihood: str) -> Tensor:
    """``S`` from its two parts, ``(B,)``.

    Args:
        strangeness: ``r``, ``(B,)`` in float64; infinite where the input is.
        mean: The base's mean outputs ``(B, C)``.
        likelihood: ``"classification"`` or ``"regression"``.
    """
    distance = strangeness.clamp_min(_LEAST).log() / 2
    if likelihood == "regression":
        return distance
    logits = two_columns(mean.double())
    # From the largest, so that a common part of all logits costs no digits.
    logits = logits - logits.amax(1, keepdim=True)
    evidence = torch.logsumexp(logits, 1) - logits.mean(1)
    return distance - evidence.log()
