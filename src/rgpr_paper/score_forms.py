r"""Other forms of the score: their formulas, computed from what the one pass over the images left.

The score of :mod:`rgpr.answers.score` is :math:`S = \tfrac12 \log r - \log E`. Each form here
changes one thing about it: the weight of :math:`\log r`, how :math:`\log r` enters, which layers it
is of, or how the last layer measures distance. With :math:`h` the last features, :math:`d_c` the
distance to the nearest class mean in the within-class whitening and :math:`d` the distance to the
overall mean in the overall whitening, a relative form adds

.. math:: \tfrac12 \Big( \log d_c^3 - \log d^3 \Big)

because the variance of a representation grows like the cube of a distance. The forms were measured
because the score misses some of the targets that were set for it. None of them was chosen: a choice
would need data that are in no table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from rgpr.residual.variance import Residual

from .outputs import Outputs
from .rivals import Bench, Fitted
from .rivals.registered import mahalanobis, mahalanobis_plus_plus

__all__ = ["FORMS", "PRESENT", "Parts"]

PRESENT = "1/2 log r - log E"
# As in the score: below this, strangeness is rounding.
_LEAST = 1e-12
_ROWS = 1000
# As the detector of the nearest class mean has it.
_SHRINKAGE = 1e-3


class Parts:
    """The parts of which all forms are made, each ``(N,)`` in float64 for ``N`` images.

    Args:
        bench: The network's outputs on training and validation images.
        residual: The residual of the model whose score is varied.
    """

    def __init__(self, bench: Bench, residual: Residual) -> None:
        self._bench, self._residual = bench, residual

    def log_evidence(self, found: Outputs) -> Tensor:
        """``log E``, with ``E = logsumexp(f) - mean(f)``."""
        return (found.logits.logsumexp(1) - found.logits.mean(1)).log()

    def log_strangeness(self, found: Outputs) -> Tensor:
        """``log r``, of all hidden layers."""
        return _log(self._residual.strangeness(found.u))

    def log_last(self, found: Outputs) -> Tensor:
        """``log r`` of the last layer alone: ``u`` over its median at the data."""
        return _log(found.u[:, -1] / self._residual.typical[-1])

    def log_relative(self, found: Outputs) -> Tensor:
        """How much further the nearest class mean is than the overall one, ``log(d_c^3 / d^3)``."""
        near = _scored(self._nearest, found.features)
        overall = _scored(self._overall, found.features)
        return 1.5 * (_log(near) - _log(overall))

    def log_normalised(self, found: Outputs) -> Tensor:
        """``log r`` in which the last layer measures features of length one by class means."""
        squared = _scored(self._normalised, found.features)
        u = found.u.clone()
        u[:, -1] = self._residual.typical[-1] * (squared / self._normalised_median) ** 1.5
        return _log(self._residual.strangeness(u))

    @cached_property
    def _nearest(self) -> Fitted:
        return mahalanobis(self._bench)

    @cached_property
    def _normalised(self) -> Fitted:
        return mahalanobis_plus_plus(self._bench)

    @cached_property
    def _normalised_median(self) -> Tensor:
        return _scored(self._normalised, self._bench.validation.features).median()

    @cached_property
    def _overall(self) -> Fitted:
        """Squared distance to the mean of all training features, in their own covariance."""
        h = self._bench.train.features.double()
        mean = h.mean(0)
        covariance = torch.cov(h.T, correction=0)
        scale = covariance.diagonal().mean()
        covariance = (1 - _SHRINKAGE) * covariance
        covariance.diagonal().add_(_SHRINKAGE * scale)
        factor = torch.linalg.cholesky(covariance)

        def squared(features: Tensor) -> Tensor:
            centred = (features.double() - mean).T
            solved: Tensor = torch.linalg.solve_triangular(factor, centred, upper=False)
            return solved.square().sum(0)

        return Fitted(squared, "covariance shrunk by 1e-3")


# Each form gives a score (N,), higher for stranger inputs.
FORMS: dict[str, Callable[[Parts, Outputs], Tensor]] = {
    PRESENT: lambda p, o: p.log_strangeness(o) / 2 - p.log_evidence(o),
    "1/4 log r - log E": lambda p, o: p.log_strangeness(o) / 4 - p.log_evidence(o),
    "1/8 log r - log E": lambda p, o: p.log_strangeness(o) / 8 - p.log_evidence(o),
    "-log E, the evidence alone": lambda p, o: -p.log_evidence(o),
    "1/2 softplus(log r) - log E": lambda p, o: (
        F.softplus(p.log_strangeness(o)) / 2 - p.log_evidence(o)
    ),
    "1/2 log r - log E, r of the last layer alone": lambda p, o: (
        p.log_last(o) / 2 - p.log_evidence(o)
    ),
    "1/2 log r - log E, last layer by class means of features of length one": lambda p, o: (
        p.log_normalised(o) / 2 - p.log_evidence(o)
    ),
    "1/2 log r - log E, and relative": lambda p, o: (
        p.log_strangeness(o) / 2 + p.log_relative(o) / 2 - p.log_evidence(o)
    ),
    "1/4 log r - log E, and relative": lambda p, o: (
        p.log_strangeness(o) / 4 + p.log_relative(o) / 2 - p.log_evidence(o)
    ),
}


def _log(x: Tensor) -> Tensor:
    return x.clamp_min(_LEAST).log()


def _scored(fitted: Fitted, features: Tensor) -> Tensor:
    """Scores of all rows, some at a time because a distance to every class takes memory."""
    return torch.cat([fitted.score(rows).double() for rows in torch.split(features, _ROWS)])
