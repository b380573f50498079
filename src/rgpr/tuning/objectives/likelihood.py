r"""The paper's :math:`L_\text{LL}`: the log-likelihood of validation data, averaged over them."""

from __future__ import annotations

from torch import Tensor

from ...answers.examples import Examples, Parameters
from ...likelihoods import LabelLikelihood
from ...likelihoods.labels import of_target
from ...likelihoods.regression import log_density
from .per_example import PerExample

__all__ = ["Likelihood"]


class Likelihood(PerExample):
    """The mean of ``log p(y | x)``.

    Of several labels that is the sum over the labels of an example. Regression takes each output's
    own variance: residual, base and the observations' noise.
    """

    name = "likelihood"

    def value(self, examples: Examples, parameters: Parameters) -> Tensor:
        target = examples.labels
        if isinstance(examples.likelihood, LabelLikelihood):
            return of_target(examples.log_probabilities(parameters), target)
        variance = examples.second + examples.variance(parameters) + parameters.noise
        return log_density((target - examples.first).square(), variance)
