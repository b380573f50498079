r"""The theorem as a number: a distance beyond which the confidence is provably low.

If no two probit logits are further apart than ``D``, the confidence is at most
:math:`1 / (1 + (C - 1) e^{-D})`. Of several labels each is a pair of logits
``(0, f_i)`` with :math:`C = 2`, and ``D`` bounds the widest of these pairs. Two bounds of ``D``
fall with the distance :math:`\rho` of an input from the training mean
(:mod:`rgpr.guarantee.bounds`), and each gives a radius from which on the confidence is at most
:math:`1/C + \varepsilon`:

- **head**, from the weights of a linear head and the variance of its own input
  (:mod:`rgpr.guarantee.head`). It holds at every depth.
- **lipschitz**, from an upper bound on the network's Lipschitz constant
  (:mod:`rgpr.guarantee.lipschitz`). Deep networks have a large constant, and some have none that is
  known.

The certificate is the smaller radius, and every input beyond it is covered, in every direction. The
argument is about exact numbers. For the rounding of the model itself, sixteen units of rounding in
the network's dtype are taken off :math:`\varepsilon`. As many units of each logit's own size are
added to the gap, because all logits may share a large common part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._axes import one, write
from ..answers.probabilities import answer
from ..extension import Extension
from ..likelihoods import LabelLikelihood
from .bounds import FURTHEST, GapBound, LipschitzBound
from .growth import growth
from .head import head_bound
from .inputs import at_distance, entries, input_kernel, network_dtype, rounding, tensor_shape
from .operations import NotBoundedError

__all__ = ["Certificate", "certify", "lipschitz_bound"]


@dataclass(frozen=True)
class Certificate:
    """A promise about every input beyond ``radius``; ``print`` it, or :meth:`plot` it.

    Attributes:
        radius: The distance in standardised units, the Euclidean length of ``(x - mean) / std``.
        eps: By how much the confidence may exceed ``1 / classes``.
        classes: Number of classes; 2 for labels, each of which is there or not.
        entries: Number of entries of one input.
        by: Name of the bound that gives the radius, ``"head"`` or ``"lipschitz"``.
        radii: The radius of each bound that exists, by the bound's name.
        obstacles: The reason why a bound does not exist, by the bound's name.
        model: The model that the certificate is about.
        bounds: The bounds that exist, by name.
    """

    radius: float
    eps: float
    classes: int
    entries: int
    by: str
    radii: dict[str, float]
    obstacles: dict[str, str]
    model: Extension
    bounds: dict[str, GapBound]

    def bound(self, distance: float) -> float:
        """Returns the largest confidence that an input at this distance or beyond can have."""
        gap = min(bound.gap(distance) for bound in self.bounds.values())
        return _confidence(gap, self.classes)

    def distance(self, x: Tensor) -> Tensor:
        """Returns the distance of each input from the training mean, ``(B,)`` in float64."""
        z: Tensor = self.model.residual.at(0)(x)
        return torch.sum(z.double().square(), 1).sqrt()

    def covers(self, x: Tensor) -> Tensor:
        """Returns whether each input lies beyond the radius, ``(B,)``."""
        return self.distance(x) >= self.radius

    def __str__(self) -> str:
        typical = math.sqrt(self.entries)
        why = {
            "head": "the residual of the head's own input",
            "lipschitz": "the network's Lipschitz constant",
        }
        others = [f"by {why[n]} it is {r:.3g}" for n, r in self.radii.items() if n != self.by]
        others += [f"by {why[n]}: {text}" for n, text in self.obstacles.items()]
        return (
            f"Every input at least {self.radius:.3g} standard deviations from the mean of the "
            f"training data (the length of (x - mean) / std, typically {typical:.3g} for training "
            f"data) gets a confidence of at most {1 / self.classes + self.eps:.3g} = "
            f"1/{self.classes} + {self.eps:g} under the probit, in every direction. The radius is "
            f"that by {why[self.by]}" + "".join(f"; {other}" for other in others) + "."
        )

    def plot(self, x: Tensor, path: str | Path | None = None, ax: Any = None) -> Any:
        """Draw the bound against the distance, beside the confidence that the model has there.

        Args:
            x: Inputs ``(B, ...)``; each is moved in and out along its line through the mean.
            path: File to which the picture is written, or ``None`` to write none. A new figure is
                closed once it is written.
            ax: Where to draw; a new figure by default.

        Returns:
            The matplotlib Axes.
        """
        measured = []
        likelihood = self.model.likelihood
        assert isinstance(likelihood, LabelLikelihood)
        furthest = math.ceil(math.log10(max(1.0, self.radius)))
        distances = [10 ** (p / 4) for p in range(-2, 4 * furthest + 5)]
        with torch.no_grad():
            for distance in distances:
                moved = at_distance(self.model, x, distance)
                answered: Any = answer(self.model, self.model.read(moved))
                measured.append(likelihood.confidence(answered).double())
        values = torch.stack(measured)
        made, ax = ax is None, one(ax, height=3.6)
        ax.plot(distances, [self.bound(d) for d in distances], "C3", label="certified bound")
        ax.plot(distances, values.mean(1).tolist(), "C0", label="measured, mean")
        ax.fill_between(
            distances,
            values.amin(1).tolist(),
            values.amax(1).tolist(),
            color="C0",
            alpha=0.15,
            lw=0,
            label="measured, range",
        )
        ax.axhline(1 / self.classes, color="0.3", lw=1, ls=":", label="1/C")
        ax.axvline(self.radius, color="C3", lw=1, ls="--", label=f"radius for {self.eps:g}")
        ax.set(
            xscale="log",
            ylim=(0, 1.03),
            xlabel="distance from the training mean, in standard deviations",
            ylabel="confidence",
        )
        ax.legend(fontsize=8, frameon=False)
        write(ax, path, made=made)
        return ax


@torch.inference_mode(False)
@torch.no_grad()
def certify(model: Extension, eps: float) -> Certificate:
    """Returns the certificate of a fitted classifier; see :meth:`rgpr.RGPR.certify`.

    Args:
        model: The fitted model.
        eps: By how much the confidence may exceed ``1 / classes``.

    Raises:
        NotBoundedError: Neither bound exists; the message says why.
        ValueError: There is nothing to certify, or no radius is near enough to be of use.
    """
    residual = model.residual
    if not isinstance(model.likelihood, LabelLikelihood):
        raise ValueError("a certificate is about class probabilities; this model is a regression")
    if not 0 < eps < 1:
        raise ValueError(f"eps = {eps} must lie between 0 and 1: what is allowed above 1/C")
    if float(residual.sigma2[0]) == 0:
        raise ValueError(
            "sigma2 of the input is zero, so nothing makes the confidence fall far away; set "
            "model.sigma2, or call model.fit again"
        )
    tensor_shape(model)  # which refuses a model whose input is not one tensor
    relative = rounding(model)
    if relative >= eps:
        raise ValueError(
            f"the network computes in {network_dtype(model)}, whose roundings alone come to "
            f"{relative:.2g}; certify it in float32, or with a larger eps"
        )
    bounds: dict[str, GapBound] = {}
    radii: dict[str, float] = {}
    obstacles: dict[str, str] = {}
    classes, gap = 0, 0.0
    for name, make in (("head", head_bound), ("lipschitz", lipschitz_bound)):
        try:
            if bounds:
                _refuse_if_larger(model, gap, radii["head"])
            bounds[name], outputs = make(model)
        except NotBoundedError as error:
            obstacles[name] = str(error)
            continue
        classes = 2 if model.likelihood.independent else max(2, outputs)
        gap = _gap(1 / classes + eps - relative, classes)
        radii[name] = bounds[name].radius(gap)
    if not bounds:
        raise NotBoundedError(
            f"nothing bounds this network's outputs. By its head: {obstacles['head']}. By a "
            f"Lipschitz constant: {obstacles['lipschitz']}"
        )
    by = min(radii, key=radii.__getitem__)
    if math.isinf(radii[by]):
        raise ValueError(
            f"the bound reaches 1/{classes} + {eps:g} only beyond {FURTHEST:.0e} "
            "standard deviations; raise sigma2 or eps"
        )
    return Certificate(
        radius=radii[by] * (1 + 1e-9),
        eps=eps,
        classes=classes,
        entries=entries(model),
        by=by,
        radii=radii,
        obstacles=obstacles,
        model=model,
        bounds=bounds,
    )


def _refuse_if_larger(model: Extension, gap: float, radius: float) -> None:
    """Refuse a Lipschitz bound that is not worth computing.

    Raises:
        NotBoundedError: The radius of the Lipschitz bound is larger than ``radius``.
    """
    least = lipschitz_bound(model, quick=True)[0].radius(gap)
    if least > radius:
        raise NotBoundedError(f"it is not computed, since it is at least {least:.3g}")


def lipschitz_bound(model: Extension, *, quick: bool = False) -> tuple[LipschitzBound, int]:
    """Returns the bound from the growth of the outputs, and the number of outputs.

    Args:
        model: A fitted model.
        quick: Return a bound that the true one is not below, for less work.

    Raises:
        NotBoundedError: Names the part of the network that has no bound.
    """
    found = growth(model, quick=quick)
    # One logit f stands for the pair (0, f), whose gap is |f| itself; so does that of a label.
    pairs = found.outputs == 1 or model.likelihood.independent
    spread = (1 if pairs else math.sqrt(2)) / float(model.temperature)
    spread *= 1 + 2 * rounding(model)
    bound = LipschitzBound(input_kernel(model), spread * found.slope, spread * found.start)
    return bound, found.outputs


def _gap(confidence: float, classes: int) -> float:
    """Returns the gap ``D`` at which the bound of the confidence has this value."""
    if confidence >= 1:
        return FURTHEST  # every gap keeps the confidence below one
    return math.log((classes - 1) * confidence / (1 - confidence))


def _confidence(gap: float, classes: int) -> float:
    """Returns the bound of the confidence where no two logits are further apart than ``gap``."""
    return 1 / (1 + (classes - 1) * math.exp(-gap))
