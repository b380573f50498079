r"""The paper's :math:`L_\text{OOD}`: the likelihood, and knowing nothing about outliers.

For classification the second term is the negative cross-entropy between the predictive
distribution and the uniform one, averaged over the outliers. Of several labels it is that to a
probability of 1/2, summed over the labels. To know nothing about a regression's
target is to expect what targets look like over all: there the term is the expected log-density, at
an outlier, of a target drawn from a normal distribution with the mean and variance of the
validation targets.
"""

from __future__ import annotations

from torch import Tensor

from ...answers.examples import Examples, Parameters
from ...likelihoods import LabelLikelihood
from ...likelihoods.regression import log_density
from .likelihood import Likelihood

__all__ = ["Outliers"]


class Outliers(Likelihood):
    """The mean log-likelihood, plus a weight times the mean ignorance about outliers."""

    name = "ood"
    takes_outliers = True

    def value_of_outliers(self, outliers: Examples, parameters: Parameters) -> Tensor:
        if isinstance(outliers.likelihood, LabelLikelihood):
            return outliers.log_probabilities(parameters).mean(-1)
        target = self.validation.labels
        mean, spread = target.mean(0), target.var(0, correction=0)
        variance = outliers.second + outliers.variance(parameters) + parameters.noise
        return log_density((outliers.first - mean).square() + spread, variance)
