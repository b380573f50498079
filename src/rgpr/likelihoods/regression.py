"""Numbers: the answer is their mean and covariance."""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor

from .base import Likelihood, in_rows, misshapen

__all__ = ["Regression", "log_density"]


class Regression(Likelihood):
    """Outputs and targets are numbers, ``(B, C)``."""

    name = "regression"
    answers: ClassVar[tuple[str, ...]] = ("mean", "covariance")

    def target(self, target: Tensor, outputs: tuple[int, ...], number: int) -> Tensor:
        """Numbers ``(B, C)`` in float64; ``(B,)`` for one output."""
        columns = outputs[1]
        wanted = f"(B, {columns})"
        flat = in_rows(target, outputs, number, wanted)
        if flat.shape[1] != columns:
            if flat.shape[1] == 1:
                wanted += (
                    f", a number for each of the {columns} outputs. If the outputs are a mean "
                    "and a variance (heteroscedastic) or quantiles of one number, wrap the "
                    "network so that it returns the mean or the median alone, e.g. f(x)[:, :1]"
                )
            raise misshapen(target, outputs, number, wanted)
        if not bool(flat.isfinite().all()):
            raise ValueError(f"batch {number} has targets that are not finite; remove them")
        return flat.double()


def log_density(squared_error: Tensor, variance: Tensor) -> Tensor:
    """Of a normal distribution, given the squared distance from its mean."""
    return -0.5 * (math.log(2 * math.pi) + variance.log() + squared_error / variance)
