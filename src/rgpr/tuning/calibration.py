r"""A calibration of the confidence that keeps the ranking of the inputs.

The evidence ``o`` for the winning class becomes :math:`e^a o^b`; ``(a, b)`` are fitted on the
validation data by the likelihood of "the winning class is right", a yes-or-no question about each
example. The likelihood of the label itself would be another matter: it could pay to undo the
added variance, which this cannot, since the map is increasing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ..predictive import evidence, recalibrate
from .optimize import maximise

__all__ = ["fit_calibration"]

# Logarithms of the stretch at a typical example, and of the exponent.
_STRETCH, _EXPONENT = 5.0, 2.0


def fit_calibration(probabilities: Tensor, base: Tensor, target: Tensor) -> Tensor:
    """``(a, b)`` for :func:`rgpr.predictive.calibrated`.

    Args:
        probabilities: Of the validation data, with the residual's variance, ``(N, C)``.
        base: Without it: what decides the winning class.
        target: ``(N,)``.
    """
    o = evidence(probabilities).clamp_min(1e-12)
    right = base.argmax(1) == target
    guess = math.log(base.shape[1] - 1)
    typical = o.log().mean()

    def objective(z: Tensor) -> Iterable[Tensor]:
        log_odds = recalibrate(o, _from(z, typical)) - guess
        yield torch.where(
            right,
            torch.nn.functional.logsigmoid(log_odds),
            torch.nn.functional.logsigmoid(-log_odds),
        ).mean()

    start = torch.tensor([float(typical), 0.0], dtype=torch.float64, device=o.device)
    bound = start.new_tensor([_STRETCH, _EXPONENT])
    middle = start.new_tensor([0.0, 0.0])
    shifted = [start, *(start.new_tensor([shift, 0.0]) for shift in (-1.0, 0.0, 1.0, 2.0, 3.0))]
    best = maximise(objective, shifted, middle - bound, middle + bound, switchable=0)
    return _from(best.z, typical).detach()


def _from(z: Tensor, typical: Tensor) -> Tensor:
    """``(a, b)`` from the log-evidence at a typical example and the log-exponent."""
    stretch, exponent = z.unbind()
    b = exponent.exp()
    return torch.stack([stretch - b * typical, b])
