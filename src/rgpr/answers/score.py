r"""How strange an input is: how little the network has to say about it, for how far away it is.

.. math:: S(x) = \tfrac12 \log r(x) - \log E(x), \qquad
          E(x) = \log \sum_c e^{f_c(x)} - \frac1C \sum_c f_c(x)

:math:`r` is :meth:`rgpr.residual.variance.Residual.strangeness`, so its root is a standard
deviation. :math:`E` is the evidence in the logits :math:`f`, at least :math:`\log C`, so
that its logarithm exists. Together they say how many standard deviations of the residual the
network's evidence is worth. One logit stands for the pair ``(0, f)``. A regression has no evidence
to weigh, and its score is :math:`\tfrac12 \log r`.

Of several labels that are independent of each other, each is a pair ``(0, f_i)`` with an evidence
of its own, and :math:`E` is their mean:

.. math:: E(x) = \frac1C \sum_i \Big( \log(1 + e^{f_i(x)}) - \tfrac12 f_i(x) \Big) \ge \log 2

The evidence of all labels together is the sum, since independent evidence adds up. The mean is the
sum up to a constant factor, by which the score moves by a constant and no rank changes; it makes
one label score as one logit does, whatever the number of labels. It is not the mean of the
scores: a label about which the network knows nothing, as it does of most labels of most inputs,
would weigh as much as one about which it is sure.

Away from the data :math:`r` grows like the cube of the distance and :math:`E` at most like the
distance, so the score grows without bound, like half the logarithm of the distance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..extension import Extension, Reading
from ..likelihoods import Likelihood
from ..posteriors.gaussian import Gaussian
from .probabilities import measured, replaced

__all__ = ["score", "weighed"]

# Strangeness is about one at the data. Below this it is rounding, where nothing ever varied.
_LEAST = 1e-12


def score(extension: Extension, reading: Reading[Gaussian]) -> Tensor:
    """``S``: ``(B,)`` in float64, higher for stranger inputs; infinite at the limit."""
    gaussian = reading.output
    strangeness, limit = measured(reading, gaussian, extension.residual.strangeness)
    strange = weighed(strangeness, gaussian.mean, extension.likelihood)
    return replaced(limit, torch.inf, strange)


def weighed(strangeness: Tensor, mean: Tensor, likelihood: Likelihood) -> Tensor:
    """``S`` from its two parts, ``(B,)``.

    Args:
        strangeness: ``r``, ``(B,)`` in float64; infinite where the input is.
        mean: The base's mean outputs ``(B, C)``.
        likelihood: What the outputs stand for.
    """
    distance = strangeness.clamp_min(_LEAST).log() / 2
    evidence = likelihood.evidence(mean.double())
    return distance if evidence is None else distance - evidence.log()
