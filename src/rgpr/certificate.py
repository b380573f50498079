r"""The theorem as a number: a distance beyond which the confidence is provably low.

Let :math:`\rho = \|z\|` be the distance of an input from the training mean in standardised units,
``N`` its entries, ``c`` the offsets and ``L`` a Lipschitz bound of the network in ``z``. Then

- :math:`v \ge \sigma_0^2 \frac{1}{3N} \big(N^{-1/6} \rho - \|c\|_3\big)_+^3`, since
  :math:`\|(|z| - c)_+\|_3 \ge \|z\|_3 - \|c\|_3` and :math:`\|z\|_3 \ge N^{-1/6} \|z\|_2`;
- the outputs satisfy :math:`\|m\| \le \|m_0\| + L \rho`, with :math:`m_0` those at the mean;
- no two probit logits are further apart than
  :math:`D = \sqrt2\, (\|m_0\| + L\rho) / (T \sqrt{1 + \pi v / 8})`, whatever the base's variances;
- so the confidence is at most :math:`1 / (1 + (C - 1) e^{-D})`.

:math:`D` rises to one peak and falls from there like :math:`\rho^{-1/2}`. The radius is where,
beyond the peak, the bound reaches :math:`1/C + \varepsilon`: every input further out than that, in
every direction, is below. The argument is about exact numbers; sixteen units of rounding in the
network's dtype are taken off :math:`\varepsilon` for those of the model itself.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .data import network_dtype_device
from .lipschitz import NotBoundedError, lipschitz
from .posteriors import MAP, Ensemble, LaplacePosterior, LastLayerLaplace, Posterior, Temperature
from .storage import replacing

if TYPE_CHECKING:
    from .model import RGPR

__all__ = ["Certificate", "at_distance", "certify", "growth", "network_dtype"]

_FURTHEST = 1e30


@dataclass(frozen=True)
class Certificate:
    """A promise about every input beyond ``radius``; ``print`` it, or :meth:`plot` it.

    Attributes:
        radius: In standardised units: the Euclidean length of ``(x - mean) / std``.
        eps: What the confidence may exceed ``1 / classes`` by.
        classes: How many there are.
        outputs: As many, or one for a binary classifier with a single output.
        entries: Of one input.
        lipschitz: Bound on the growth of the outputs, per standardised unit.
        start: Length of the outputs at the mean of the training inputs.
        sigma2: The input's scale.
        offset: The 3-norm of the input's offsets.
        temperature: The model's.
        calibration: The model's, or 1.
        model: The model it was made for.
    """

    radius: float
    eps: float
    classes: int
    outputs: int
    entries: int
    lipschitz: float
    start: float
    sigma2: float
    offset: float
    temperature: float
    calibration: float
    model: RGPR

    def bound(self, distance: float) -> float:
        """The largest confidence that an input at this distance, or further, can have."""
        return _confidence(self._gap(max(distance, self._peak)), self.classes)

    def distance(self, x: Tensor) -> Tensor:
        """The distance of each input from the training data's mean, ``(B,)`` in float64."""
        z: Tensor = self.model._fitted().at(0)(x)
        return torch.sum(z.double().square(), 1).sqrt()

    def covers(self, x: Tensor) -> Tensor:
        """Which inputs the promise is about, ``(B,)``."""
        return self.distance(x) >= self.radius

    def __str__(self) -> str:
        typical = math.sqrt(self.entries)
        return (
            f"Every input at least {self.radius:.3g} standard deviations from the mean of the "
            f"training data (the length of (x - mean) / std, typically {typical:.3g} for training "
            f"data) gets a confidence of at most {1 / self.classes + self.eps:.3g} = "
            f"1/{self.classes} + {self.eps:g} under the probit, in every direction."
        )

    def plot(self, x: Tensor, path: str | Path | None = None) -> Any:
        """The bound against the distance, beside the confidence measured along inputs' directions.

        Args:
            x: Inputs ``(B, ...)``; each is moved in and out along its line through the mean.
            path: Where to write it as a picture, if anywhere.
        """
        from matplotlib.figure import Figure

        measured = []
        distances = [10 ** (p / 4) for p in range(-2, 4 * math.ceil(math.log10(self.radius)) + 5)]
        with torch.no_grad():
            for distance in distances:
                moved = at_distance(self.model, x, distance)
                measured.append(self.model(moved).amax(1).double())
        values = torch.stack(measured)
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.plot(distances, [self.bound(d) for d in distances], "C3", label="certified bound")
        axes.plot(distances, values.mean(1).tolist(), "C0", label="measured, mean")
        axes.fill_between(
            distances,
            values.amin(1).tolist(),
            values.amax(1).tolist(),
            color="C0",
            alpha=0.15,
            lw=0,
            label="measured, range",
        )
        axes.axhline(1 / self.classes, color="0.3", lw=1, ls=":", label="1/C")
        axes.axvline(self.radius, color="C3", lw=1, ls="--", label=f"radius for {self.eps:g}")
        axes.set(
            xscale="log",
            ylim=(0, 1.03),
            xlabel="distance from the training mean, in standard deviations",
            ylabel="confidence",
        )
        axes.legend(fontsize=8, frameon=False)
        if path is not None:
            with replacing(path) as temporary:
                figure.savefig(temporary, dpi=120)
        return figure

    def _gap(self, distance: float) -> float:
        """``D``: how far apart two logits can be at this distance."""
        reach = self.lipschitz * distance + self.start
        spread = 1 if self.outputs == 1 else math.sqrt(2)
        beyond = max(0.0, distance * self._shrink - self.offset)
        variance = self.sigma2 * beyond**3 / (3 * self.entries)
        gap = spread * reach / (self.temperature * math.sqrt(1 + math.pi / 8 * variance))
        return self.calibration * gap

    @property
    def _shrink(self) -> float:
        """What is left of the Euclidean length, at the least, in the 3-norm."""
        return 1 / math.pow(self.entries, 1 / 6)

    @property
    def _peak(self) -> float:
        """Where the gap is largest: its slope's sign changes once beyond the offset."""
        low, high = self.offset / self._shrink, _FURTHEST
        a = math.pi / 8 * self.sigma2 / (3 * self.entries)
        slope = self.lipschitz / self._shrink
        tail = self.start + slope * self.offset

        def rising(distance: float) -> bool:
            s = distance * self._shrink - self.offset
            return slope > 0.5 * slope * a * s**3 + 1.5 * a * s**2 * tail

        if not rising(low):
            return low
        for _ in range(400):
            middle = math.sqrt(max(low, 1e-12) * high)
            low, high = (middle, high) if rising(middle) else (low, middle)
        return high


@torch.inference_mode(False)
def certify(model: RGPR, eps: float) -> Certificate:
    """The certificate; see :meth:`rgpr.RGPR.certify`."""
    residual = model._fitted()
    if model.likelihood != "classification":
        raise ValueError("a certificate is about class probabilities; this model is a regression")
    if not 0 < eps < 1:
        raise ValueError(f"eps = {eps} must lie between 0 and 1: what is allowed above 1/C")
    sigma2 = float(residual.sigma2[0])
    if sigma2 == 0:
        raise ValueError(
            "sigma2 of the input is zero, so nothing makes the confidence fall far away; set "
            "model.sigma2 or call model.tune"
        )
    slope, start, outputs, _ = growth(model)
    offset = residual.at(0).offset
    certificate = Certificate(
        radius=math.inf,
        eps=eps,
        classes=max(2, outputs),
        outputs=outputs,
        entries=math.prod(model._input_shape or ()),
        lipschitz=slope,
        start=start,
        sigma2=sigma2,
        offset=0.0 if offset is None else float(offset.double().pow(3).sum() ** (1 / 3)),
        temperature=float(model.temperature),
        calibration=1.0 if model.calibration is None else float(model.calibration),
        model=model,
    )
    # The model's own roundings: of its logits, and of probabilities in its dtype.
    dtype = network_dtype(model)
    rounding = 16 * torch.finfo(dtype).eps
    if rounding >= eps:
        raise ValueError(
            f"the network computes in {dtype}, whose roundings alone come to {rounding:.2g}; "
            "certify it in float32, or with a larger eps"
        )
    target = 1 / certificate.classes + eps - rounding
    low, high = certificate._peak, _FURTHEST
    if certificate.bound(low) <= target:
        high = low
    elif certificate.bound(high) > target:
        raise ValueError(
            f"the bound reaches 1/{certificate.classes} + {eps:g} only beyond {_FURTHEST:.0e} "
            "standard deviations; raise sigma2 of the input or eps"
        )
    else:
        for _ in range(400):
            middle = math.sqrt(max(low, 1e-12) * high)
            low, high = (low, middle) if certificate.bound(middle) <= target else (middle, high)
    return dataclasses.replace(certificate, radius=high * (1 + 1e-9))


def growth(model: RGPR) -> tuple[float, float, int, bool]:
    """Lipschitz bound of the base's mean, its length at the mean input, how many outputs it has,
    and whether all its parts are piecewise affine.

    Raises:
        NotBoundedError: Names what has no bound.
    """
    coordinates: Any = model._fitted().at(0)
    shape = model._input_shape or torch.Size()
    center = coordinates.mean.to(network_dtype(model)).reshape(shape)
    # Rounded to the network's dtype, the center is not exactly the mean.
    drift = float(coordinates(center[None]).double().norm())
    scale = coordinates.scale.reshape(shape)

    def of(posterior: Posterior) -> tuple[float, float, int, bool]:
        if isinstance(posterior, Temperature):
            slope, start, outputs, affine = of(posterior.base)
            factor = 1 / float(posterior.temperature)
            return factor * slope, factor * start, outputs, affine
        if isinstance(posterior, Ensemble):
            members = [posterior.network, *posterior.others]
        elif isinstance(posterior, MAP | LastLayerLaplace | LaplacePosterior):
            members = [posterior.network]
        else:
            raise NotBoundedError(
                f"a {type(posterior).__name__} has a mean other than one network's outputs, for "
                "which no Lipschitz bound is known; certify a model over the network itself"
            )
        parts = [lipschitz(member, center, scale) for member in members]
        slope = sum(part[0] for part in parts) / len(parts)
        start = sum(float(part[1].double().norm()) for part in parts) / len(parts)
        return slope, start, len(parts[0][1]), all(part[2] for part in parts)

    slope, start, outputs, affine = of(model.posterior)
    return slope, start + slope * drift, outputs, affine


def network_dtype(model: RGPR) -> torch.dtype:
    """What the network computes in."""
    return network_dtype_device(model.posterior.network)[0] or torch.get_default_dtype()


def at_distance(model: RGPR, x: Tensor, distance: float) -> Tensor:
    """The inputs moved along their lines through the training mean to this distance from it."""
    coordinates: Any = model._fitted().at(0)
    z = coordinates(x).double()
    z = z / torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp_min(1e-300)
    moved: Tensor = coordinates.mean.double() + coordinates.scale.double() * z * distance
    return moved.reshape(x.shape).to(x.dtype)


def _confidence(gap: float, classes: int) -> float:
    return 1 / (1 + (classes - 1) * math.exp(-gap))
