"""Which of the theorem's assumptions a model meets, and what follows for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..extension import Extension
from ..posteriors.gaussian import Gaussian
from .certificate import at_distance, growth, network_dtype
from .lipschitz import NotBoundedError

__all__ = ["Check", "check_assumptions"]

_NEAR, _FAR, _DIRECTIONS = 1e4, 1e6, 32


@dataclass(frozen=True)
class Check:
    """Assumptions, what was measured, and the conclusion; ``print`` it.

    Attributes:
        piecewise_affine: Every part is a ReLU or the like, as the paper assumes; ``None`` if the
            parts are not known.
        lipschitz: A rigorous bound on how fast the outputs grow per standard deviation of the
            input; ``None`` if there is none.
        obstacle: Which part has no bound.
        mean_growth: Measured exponent of the base's mean, far away in random directions: at most 1
            for the theorem.
        base_variance_growth: Measured exponent of the base's own variance.
        variance_growth: Measured exponent of the residual's variance: 3.
        input_scale: ``sigma2`` of the input, which must be positive.
        holds: ``True`` if the limit is proved, ``None`` if only the measurements speak for it,
            ``False`` if they speak against it.
    """

    piecewise_affine: bool | None
    lipschitz: float | None
    obstacle: str
    mean_growth: float
    base_variance_growth: float
    variance_growth: float
    input_scale: float
    holds: bool | None

    def __str__(self) -> str:
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
            True: "The confidence goes to 1/C in every direction; model.certify() says where.",
            None: "The confidence goes to 1/C in the directions that were measured; there is no "
            "proof for all of them.",
            False: "Nothing makes the confidence go to 1/C: the outputs outgrow the residual, or "
            "the input's sigma2 is zero.",
        }
        return "\n".join([*lines, conclusions[self.holds]])


@torch.inference_mode(False)
@torch.no_grad()
def check_assumptions(model: Extension, seed: int) -> Check:
    """Look at a fitted classifier's parts, and measure it far away.

    Args:
        model: The model.
        seed: Of the random directions in which it is measured.
    """
    residual = model.residual
    if model.likelihood != "classification":
        raise ValueError("the theorem is about class probabilities; this model is a regression")
    scale = float(residual.sigma2[0])
    slope: float | None = None
    affine: bool | None = None
    obstacle = ""
    try:
        slope, _, _, affine = growth(model)
    except NotBoundedError as error:
        obstacle = f"not known: {error}"
    mean, base, added = _exponents(model, seed)
    holds: bool | None = True if slope is not None else None
    if scale == 0 or (slope is None and not added > 2 * mean + 0.05):
        holds = False
    return Check(affine, slope, obstacle, mean, base, added, scale, holds)


def _exponents(model: Extension, seed: int) -> tuple[float, float, float]:
    """How the mean, the base's variance and the residual's grow between two distances."""
    generator = torch.Generator().manual_seed(seed)
    shape = (_DIRECTIONS, *model.input_shape)
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
        # With the input's scale alone if all are zero: its growth is what is asked.
        v = u[:, 0] if not bool(residual.sigma2.any()) else residual(u)
        levels.append((gaussian.mean.double().abs().amax(1), gaussian.variance.amax(1), v))
    return tuple(_exponent(near, far) for near, far in zip(*levels, strict=True))  # type: ignore[return-value]


def _exponent(near: Tensor, far: Tensor) -> float:
    seen = (near > 0) & (far > 0)  # nothing grows out of zero
    if not bool(seen.any()):
        return 0.0
    logs = (far[seen].log() - near[seen].log()) / math.log(_FAR / _NEAR)
    return float(logs.nan_to_num(math.inf, math.inf, -math.inf).amax())
