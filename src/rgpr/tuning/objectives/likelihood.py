r"""The paper's :math:`L_\text{LL}`: the log-likelihood of validation data, averaged over them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ...answers.outputs import Outputs, Parameters
from ...posteriors.gaussian import log_density

__all__ = ["log_likelihood"]


def log_likelihood(outputs: Outputs, parameters: Parameters, likelihood: str) -> Iterator[Tensor]:
    """Parts whose sum is the mean over the examples of ``log p(y | x)``.

    Regression takes each output's own variance: residual, base and the observations' noise.
    """
    for part in outputs.chunks():
        assert part.target is not None
        if likelihood == "classification":
            each = part.log_probabilities(parameters).gather(1, part.target[:, None])
        else:
            variance = part.second + part.variance(parameters) + parameters.noise
            each = log_density((part.target - part.first).square(), variance)
        yield each.sum() / len(outputs)
