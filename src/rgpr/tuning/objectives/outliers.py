r"""The paper's second term of :math:`L_\text{OOD}`: knowing nothing about outliers.

For classification it is the negative cross-entropy between the predictive distribution and the
uniform one, averaged over the outliers. To know nothing about a regression's target is to expect
what targets look like over all: the term is the expected log-density, at an outlier, of a target
drawn from a normal distribution with the mean and variance of the validation targets.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ...answers.outputs import Outputs, Parameters
from ...posteriors.gaussian import log_density

__all__ = ["ignorance"]


def ignorance(
    outputs: Outputs, parameters: Parameters, validation_target: Tensor | None = None
) -> Iterator[Tensor]:
    """Parts whose sum is the mean over the outliers; the larger, the less is claimed to be known.

    Args:
        outputs: Of the outliers.
        parameters: Scales, temperature and noise.
        validation_target: For regression, the targets ``(N, C)`` of the validation data.
    """
    for part in outputs.chunks():
        if validation_target is None:
            each = part.log_probabilities(parameters).mean(1)
        else:
            mean, spread = validation_target.mean(0), validation_target.var(0, correction=0)
            variance = part.second + part.variance(parameters) + parameters.noise
            each = log_density((part.first - mean).square() + spread, variance)
        yield each.sum() / len(outputs)
