r"""Which of the theorem's assumptions a model meets, and what follows for it.

The theorem needs that the base's mean grows at most linearly, :math:`\|m\| = O(\rho)`, and that the
residual's variance grows cubically, :math:`v \sim \rho^3`, so that
:math:`\|m\| / \sqrt{v} = O(\rho^{-1/2})` goes to zero. A Lipschitz bound proves the first. The
exponents of both are measured at two large distances ``near`` and ``far`` in random directions, as
:math:`\log(q_\text{far} / q_\text{near}) / \log(\text{far} / \text{near})`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..extension import Extension
from ..likelihoods import LabelLikelihood
from ..posteriors.gaussian import Gaussian
from .growth import growth
from .inputs import at_distance, network_dtype, tensor_shape
from .operations import NotBoundedError

__all__ = ["Check", "check_assumptions"]

_NEAR, _FAR, _DIRECTIONS = 1e4, 1e6, 32


@dataclass(frozen=True)
class Check:
    """A report on the assumptions, the measurements and the conclusion; ``print`` it.

    Attributes:
        piecewise_affine: Whether every part is piecewise affine like a ReLU, as the paper assumes;
            ``None`` if a part has no bound.
        lipschitz: A rigorous bound on how fast the outputs grow per standard deviation of the
            input; ``None`` if there is none.
        obstacle: The reason why there is no such bound; empty if there is one.
        mean_growth: Measured exponent of the base's mean, which the theorem needs to be at most 1.
        base_variance_growth: Measured exponent of the base's own variance.
        variance_growth: Measured exponent of the residual's variance, which is 3 by construction.
        input_scale: ``sigma2`` of the input, which the theorem needs to be positive.
        holds: ``True`` if the limit is proved, ``None`` if only the measurements speak for it,
            ``False`` if they speak against it.
        limit: What the confidence goes to then: ``"1/C"``, or ``"1/2"`` for labels.
    """

    piecewise_affine: bool | None
    lipschitz: float | None
    obstacle: str
    mean_growth: float
    base_variance_growth: float
    variance_growth: float
    input_scale: float
    holds: bool | None
    limit: str = "1/C"

    def __str__(self) -> str:
        limit = self.limit
        marks = {True: "yes", False: "no", None: "not known"}
        bound = self.obstacle if self.lipschitz is None else f"at most {self.lipschitz:.3g} per std"
        rows = [
            ("all parts piecewise affine, as in the paper", marks[self.piecewise_affine]),
            ("outputs grow at most linearly (what the proof needs)", bound),
            ("  measured exponent of the outputs, far away", f"{self.mean_growth:.2f}"),
            ("  measured exponent of the base's variance", f"{self.base_variance_growth:.2f}"),
            ("residual's variance grows cubically, exponent", f"{self.variance_growth:.2f}"),
            ("sigma2 of the input is positive", f"{self.input_scale:.3g}"),
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:{width}}  {value}" for name, value in rows]
        conclusions = {
            True: f"The confidence goes to {limit} in every direction; model.certify() says where.",
            None: f"The confidence goes to {limit} in the directions that were measured; there is "
            "no proof for all of them.",
            False: f"Nothing makes the confidence go to {limit}: the outputs outgrow the residual, "
            "or the input's sigma2 is zero.",
        }
        return "\n".join([*lines, conclusions[self.holds]])


@torch.inference_mode(False)
@torch.no_grad()
def check_assumptions(model: Extension, seed: int) -> Check:
    """Look up the parts of a fitted classifier's network, and measure the model far away.

    Args:
        model: The fitted model.
        seed: Seed of the random directions in which the model is measured.

    Raises:
        ValueError: The model is a regression, which the theorem is not about.
    """
    residual = model.residual
    if not isinstance(model.likelihood, LabelLikelihood):
        raise ValueError("the theorem is about class probabilities; this model is a regression")
    scale = float(residual.sigma2[0])
    slope: float | None = None
    affine: bool | None = None
    obstacle = ""
    try:
        found = growth(model)
        slope, affine = found.slope, found.piecewise_affine
    except NotBoundedError as error:
        obstacle = f"not known: {error}"
    mean, base, added = _exponents(model, seed)
    holds: bool | None = True if slope is not None else None
    if scale == 0 or (slope is None and not added > 2 * mean + 0.05):
        holds = False
    limit = "1/2" if model.likelihood.independent else "1/C"
    return Check(affine, slope, obstacle, mean, base, added, scale, holds, limit)


def _exponents(model: Extension, seed: int) -> tuple[float, float, float]:
    """Returns the exponents of the mean, of the base's variance and of the residual's variance."""
    generator = torch.Generator().manual_seed(seed)
    shape = (_DIRECTIONS, *tensor_shape(model))
    residual = model.residual
    directions = torch.randn(shape, generator=generator).to(
        residual.sigma2.device, network_dtype(model)
    )
    levels = []
    for distance in (_NEAR, _FAR):
        x = at_distance(model, directions, distance)
        gaussian: Gaussian
        reading = model.read(x)
        gaussian, u = reading.output, reading.u
        # If all scales are zero there is no variance to measure, so the input's u stands for it.
        v = u[:, 0] if not bool(residual.sigma2.any()) else residual(u)
        levels.append((gaussian.mean.double().abs().amax(1), gaussian.variance.amax(1), v))
    return tuple(_exponent(near, far) for near, far in zip(*levels, strict=True))  # type: ignore[return-value]


def _exponent(near: Tensor, far: Tensor) -> float:
    """Returns the largest exponent among the directions; zero if the quantity is zero in all."""
    seen = (near > 0) & (far > 0)
    if not bool(seen.any()):
        return 0.0
    logs = (far[seen].log() - near[seen].log()) / math.log(_FAR / _NEAR)
    return float(logs.nan_to_num(math.inf, math.inf, -math.inf).amax())
