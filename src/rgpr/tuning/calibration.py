r"""A calibration of the confidence that keeps the ranking of the inputs.

The evidence ``o`` for the winning class becomes ``t o``. The factor is fitted on validation data by
the likelihood of "the winning class is right", a yes-or-no question about each example. The
likelihood of the label itself would be another matter: it could pay to undo the added variance,
which this cannot, since the map is increasing.

Where every answer is right, certainty would be the best fit. So the answers are smoothed as Platt
did: with ``n`` right and ``m`` wrong ones they count as ``(n + 1) / (n + 2)`` and ``1 / (m + 2)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..predictive import evidence
from .optimize import maximise

__all__ = ["fit_calibration"]

# The logarithm of the factor lies between minus and plus this.
_BOUND = 7.0


def fit_calibration(
    probabilities: Tensor, base: Tensor, target: Tensor, n_samples: int | None = None
) -> Tensor:
    """The factor for :func:`rgpr.predictive.calibrated`.

    Args:
        probabilities: Of the validation data, with the residual's variance, ``(N, C)``.
        base: Without it: what decides the winning class.
        target: ``(N,)``.
        n_samples: See :func:`rgpr.predictive.evidence`.
    """
    o = evidence(probabilities.double(), n_samples)
    right = base.argmax(1) == target
    count = float(right.sum())
    yes, no = (count + 1) / (count + 2), 1 / (len(right) - count + 2)
    answer = torch.where(right, yes, no)
    guess = math.log(base.shape[1] - 1)

    def objective(z: Tensor) -> Iterable[Tensor]:
        log_odds = z.exp() * o - guess
        yield (answer * logsigmoid(log_odds) + (1 - answer) * logsigmoid(-log_odds)).mean()

    bound = torch.full((1,), _BOUND, dtype=torch.float64, device=o.device)
    starts = [torch.full_like(bound, start) for start in (-2.0, 0.0, 1.0, 2.0, 4.0)]
    best = maximise(objective, starts, -bound, bound, switchable=0)
    return best.z.exp()[0].detach()
