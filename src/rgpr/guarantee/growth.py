r"""How fast the mean of a base can grow with the distance of the input.

The mean is a sum :math:`m = \sum_i w_i f_i` of networks with weights. If each network has the
Lipschitz constant :math:`K_i` per standardised unit, then
:math:`\|m\| \le \|m_0\| + \sum_i w_i K_i\, \rho`, with :math:`m_0` the mean at the training mean.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..extension import Extension
from .inputs import network_dtype, tensor_shape
from .lipschitz import lipschitz
from .operations import NotBoundedError

__all__ = ["Growth", "growth"]


class Growth(NamedTuple):
    """What is known about the growth of a base's mean.

    Attributes:
        slope: Lipschitz constant of the mean per standardised unit of the input.
        start: Bound on the length of the mean at the training mean.
        outputs: Number of outputs.
        piecewise_affine: Whether all parts of the networks are piecewise affine.
    """

    slope: float
    start: float
    outputs: int
    piecewise_affine: bool


def growth(model: Extension, *, quick: bool = False) -> Growth:
    """Bound the growth of the mean of a fitted model's base.

    Args:
        model: A fitted model.
        quick: Return a slope that the bound is not below; see
            :func:`rgpr.guarantee.lipschitz.lipschitz`.

    Raises:
        NotBoundedError: Names the part that has no bound.
    """
    coordinates: Any = model.residual.at(0)
    shape = tensor_shape(model)
    center = coordinates.mean.to(network_dtype(model)).reshape(shape)
    # Rounding to the network's dtype moves the center away from the mean by this distance.
    drift = float(coordinates(center[None]).double().norm())
    scale = coordinates.scale.reshape(shape)
    members = model.posterior.mean_parts()
    if members is None:
        raise NotBoundedError(
            f"the mean_parts of a {type(model.posterior).__name__} name no networks whose outputs "
            "make its mean, so no Lipschitz bound is known; certify a model over the network itself"
        )
    parts = [
        (lipschitz(network, center, scale, quick=quick), weight) for network, weight in members
    ]
    slope = sum(weight * part[0] for part, weight in parts)
    start = sum(weight * float(part[1].double().norm()) for part, weight in parts)
    outputs, affine = len(parts[0][0][1]), all(part[2] for part, _ in parts)
    return Growth(slope, start + slope * drift, outputs, affine)
