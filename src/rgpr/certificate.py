r"""The theorem as a number: a distance beyond which the confidence is provably low.

Let :math:`\rho = \|z\|` be the distance of an input from the training mean in standardised units,
``N`` its entries and ``c`` the offsets of its kernel. By Hoelder and the triangle inequality
:math:`u_0 \ge \frac{1}{3N} (N^{-1/6} \rho - \|c\|_3)_+^3`. Whatever the residual, there are
weights and a start with :math:`v / s \ge (g_0 u_0 + g_L u_L - \kappa)_+`, where ``L`` is the
head's own input (:meth:`rgpr.residual.Residual.guaranteed`). So no two probit logits are further
apart than

.. math:: D = \frac{\text{gap of the means}}{T \sqrt{1 + (g_0 u_0 + g_L u_L - \kappa)_+}}

and the confidence is at most :math:`1 / (1 + (C - 1) e^{-D})`. Two bounds of the gap give two
radii:

- **Lipschitz**: the outputs satisfy :math:`\|m\| \le \|m_0\| + K \rho`, with :math:`m_0` those at
  the mean input and ``K`` a bound on the network's Lipschitz constant; the gap is at most
  :math:`\sqrt2 \|m\|`. Deep networks have a large ``K``, and some have none that we know.
- **Head**: the logits are :math:`W h + b`, and the residual reads ``h``. At a distance ``t`` of
  ``h`` from the nearest of its anchors the gap is at most :math:`G_0 + G_1 t`, and
  :math:`u_L \ge \frac13 (t - c_L)_+^3`: logits can only be large where the last layer itself is far
  out, and there it has its own variance. Whatever lies between input and head, the largest
  :math:`D` over all ``t`` falls as :math:`u_0` grows. It is maximal where
  :math:`\frac32 B t^2 (G_0 + G_1 t) = G_1 (A + B t^3)` with :math:`A = 1 + g_0 u_0 - \kappa` and
  :math:`B = g_L / 3`; inserting this into :math:`D^2 = (G_0 + G_1 t)^2 / (A + B t^3)` leaves
  :math:`\frac32 B D^2 t^2 = G_1 (G_0 + G_1 t)`, a quadratic in ``t``, and with it ``A`` and
  :math:`u_0`.

Where the base has variances of its own, unlike for each class, a common part of two logits no
longer cancels: then :math:`|m_i| + |m_j|` is bounded instead of :math:`|m_i - m_j|`.

The certificate is the smaller radius. Beyond it every input, in every direction, is below. The
argument is about exact numbers; sixteen units of rounding in the network's dtype are taken off
:math:`\varepsilon` for those of the model itself.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .coordinates import reduce
from .data import network_dtype_device
from .hooks import evaluating
from .lipschitz import NotBoundedError, lipschitz
from .representations import capture, linear_head
from .storage import replacing

if TYPE_CHECKING:
    from .model import RGPR

__all__ = [
    "Certificate",
    "HeadBound",
    "InputKernel",
    "LipschitzBound",
    "at_distance",
    "certify",
    "growth",
    "network_dtype",
]

_FURTHEST = 1e30
# Roundings of the bounds themselves.
_SLACK = 1 + 1e-6


@dataclass(frozen=True)
class InputKernel:
    """The variance that the input alone guarantees at a distance.

    Attributes:
        entries: ``N``.
        weight: ``g_0``.
        start: ``kappa``.
        offset: The 3-norm of the offsets.
    """

    entries: int
    weight: float
    start: float
    offset: float

    def at(self, distance: float) -> float:
        """``g_0 u_0 - kappa``, at least, at this distance; it may be negative."""
        beyond = max(0.0, distance * self.shrink - self.offset)
        return self.weight * beyond**3 / (3 * self.entries) - self.start

    def distance(self, value: float) -> float:
        """The distance at which :meth:`at` has this value, at least zero."""
        beyond = math.cbrt(3 * self.entries * (value + self.start) / self.weight)
        return (beyond + self.offset) / self.shrink

    @property
    def shrink(self) -> float:
        """What is left of the Euclidean length, at the least, in the 3-norm."""
        return math.exp(-math.log(self.entries) / 6)


class _Bound(ABC):
    """How far apart two logits can be at a distance or further."""

    kernel: InputKernel

    @abstractmethod
    def gap(self, distance: float) -> float:
        """The largest ``D`` at this distance or any larger one."""

    @abstractmethod
    def radius(self, gap: float) -> float:
        """The distance beyond which no ``D`` exceeds ``gap``; infinite if there is none."""


@dataclass(frozen=True)
class LipschitzBound(_Bound):
    """From the growth of the outputs: ``(start + slope * distance)`` over the root.

    Attributes:
        kernel: The input's.
        slope: Growth of the gap for each standardised unit, divided by the temperature.
        start: The gap at the mean of the training inputs, divided by the temperature.
    """

    kernel: InputKernel
    slope: float
    start: float

    def gap(self, distance: float) -> float:
        return self._at(max(distance, self._peak()))

    def radius(self, gap: float) -> float:
        low, high = self._peak(), _FURTHEST
        if self._at(low) <= gap:
            return low
        if self._at(high) > gap:
            return math.inf
        return _crossing(lambda distance: self._at(distance) <= gap, low, high)

    def _at(self, distance: float) -> float:
        reach = self.start + self.slope * distance
        return reach / math.sqrt(1 + max(0.0, self.kernel.at(distance)))

    def _peak(self) -> float:
        """Where the gap is largest: beyond the onset its slope changes its sign once, or never."""
        kernel = self.kernel
        low = kernel.distance(0.0)
        a = kernel.weight / (3 * kernel.entries)
        slope = self.slope / kernel.shrink
        tail = self.start + slope * kernel.offset

        def falling(distance: float) -> bool:
            s = distance * kernel.shrink - kernel.offset
            rise = slope * (1 - kernel.start)
            return rise <= 0.5 * slope * a * s**3 + 1.5 * a * s**2 * tail

        return low if falling(low) else _crossing(falling, low, _FURTHEST)


@dataclass(frozen=True)
class HeadBound(_Bound):
    """From the head's own input: the gap grows by ``slope`` with its distance from an anchor.

    Attributes:
        kernel: The input's.
        slope: ``G_1``, divided by the temperature.
        start: ``G_0`` at the last layer's offset, divided by the temperature.
        weight: ``g_L``.
    """

    kernel: InputKernel
    slope: float
    start: float
    weight: float

    def gap(self, distance: float) -> float:
        A, B = 1 + self.kernel.at(distance), self.weight / 3
        if A < 1:  # the input may have no variance yet
            return math.inf
        if self.slope == 0:
            return self.start / math.sqrt(A)

        def falling(t: float) -> bool:
            rise = self.slope * (A + B * t**3)
            return rise <= 1.5 * B * t * t * (self.start + self.slope * t)

        t = _crossing(falling, 0.0, _FURTHEST)
        return (self.start + self.slope * t) / math.sqrt(A + B * t**3)

    def radius(self, gap: float) -> float:
        G0, G1, B = self.start, self.slope, self.weight / 3
        if G1 == 0:
            return self.kernel.distance(max(0.0, (G0 / gap) ** 2 - 1))
        t = (G1**2 + math.sqrt(G1**4 + 6 * B * gap**2 * G0 * G1)) / (3 * B * gap**2)
        A = B * t**2 * (1.5 * G0 / G1 + 0.5 * t)
        found = self.kernel.distance(max(0.0, A - 1)) * _SLACK
        return found if found <= _FURTHEST else math.inf


def _crossing(holds: Any, low: float, high: float) -> float:
    """The smallest number between two from which on a statement holds, by halving."""
    for _ in range(200):
        middle = math.sqrt(max(low, 1e-12) * high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class Certificate:
    """A promise about every input beyond ``radius``; ``print`` it, or :meth:`plot` it.

    Attributes:
        radius: In standardised units: the Euclidean length of ``(x - mean) / std``.
        eps: What the confidence may exceed ``1 / classes`` by.
        classes: How many there are.
        entries: Number of entries of one input.
        by: ``"head"`` or ``"lipschitz"``: which of the two bounds gives the radius.
        radii: The radius of each bound that there is, by that name.
        obstacles: Why there is no radius of the other name, if there is none.
        model: The model it was made for.
        bounds: The bounds themselves.
    """

    radius: float
    eps: float
    classes: int
    entries: int
    by: str
    radii: dict[str, float]
    obstacles: dict[str, str]
    model: RGPR
    bounds: dict[str, _Bound]

    def bound(self, distance: float) -> float:
        """The largest confidence that an input at this distance, or further, can have."""
        gap = min(bound.gap(distance) for bound in self.bounds.values())
        return _confidence(gap, self.classes)

    def distance(self, x: Tensor) -> Tensor:
        """The distance of each input from the training data's mean, ``(B,)`` in float64."""
        z: Tensor = self.model._fitted().at(0)(x)
        return torch.sum(z.double().square(), 1).sqrt()

    def covers(self, x: Tensor) -> Tensor:
        """Which inputs the promise is about, ``(B,)``."""
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


@torch.inference_mode(False)
@torch.no_grad()
def certify(model: RGPR, eps: float) -> Certificate:
    """The certificate; see :meth:`rgpr.RGPR.certify`."""
    residual = model._fitted()
    if model.likelihood != "classification":
        raise ValueError("a certificate is about class probabilities; this model is a regression")
    if not 0 < eps < 1:
        raise ValueError(f"eps = {eps} must lie between 0 and 1: what is allowed above 1/C")
    if float(residual.sigma2[0]) == 0:
        raise ValueError(
            "sigma2 of the input is zero, so nothing makes the confidence fall far away; set "
            "model.sigma2, or call model.fit again"
        )
    # The model's own roundings: of its logits, and of probabilities in its dtype.
    dtype = network_dtype(model)
    rounding = 16 * torch.finfo(dtype).eps
    if rounding >= eps:
        raise ValueError(
            f"the network computes in {dtype}, whose roundings alone come to {rounding:.2g}; "
            "certify it in float32, or with a larger eps"
        )
    bounds: dict[str, _Bound] = {}
    radii: dict[str, float] = {}
    obstacles: dict[str, str] = {}
    classes, gap = 0, 0.0
    for name, make in (("head", _head_bound), ("lipschitz", _lipschitz_bound)):
        try:
            if bounds:  # the second is left out where it cannot be the smaller one
                least = make(model, quick=True)[0].radius(gap)
                if least > radii["head"]:
                    obstacles[name] = f"it is not computed, since it is at least {least:.3g}"
                    break
            bounds[name], outputs = make(model)
            classes = max(2, outputs)
            gap = _gap(1 / classes + eps - rounding, classes)
            radii[name] = bounds[name].radius(gap)
        except NotBoundedError as error:
            obstacles[name] = str(error)
    if not bounds:
        raise NotBoundedError(
            f"nothing bounds this network's outputs. By its head: {obstacles['head']}. By a "
            f"Lipschitz constant: {obstacles['lipschitz']}"
        )
    by = min(radii, key=radii.__getitem__)
    if math.isinf(radii[by]):
        raise ValueError(
            f"the bound reaches 1/{classes} + {eps:g} only beyond {_FURTHEST:.0e} "
            "standard deviations; raise sigma2 or eps"
        )
    return Certificate(
        radius=radii[by] * (1 + 1e-9),
        eps=eps,
        classes=classes,
        entries=math.prod(model._input_shape or ()),
        by=by,
        radii=radii,
        obstacles=obstacles,
        model=model,
        bounds=bounds,
    )


def _input_kernel(model: RGPR) -> InputKernel:
    residual = model._fitted()
    weights, start = residual.guaranteed()
    offset = residual.at(0).offset
    return InputKernel(
        entries=math.prod(model._input_shape or ()),
        weight=float(weights[0]),
        start=start,
        offset=0.0 if offset is None else float(offset.double().pow(3).sum() ** (1 / 3)),
    )


def _lipschitz_bound(model: RGPR, *, quick: bool = False) -> tuple[_Bound, int]:
    slope, start, outputs, _ = growth(model, quick=quick)
    # One logit stands for the pair (0, f).
    spread = (1 if outputs == 1 else math.sqrt(2)) / float(model.temperature)
    return LipschitzBound(_input_kernel(model), spread * slope, spread * start), outputs


def _head_bound(model: RGPR, *, quick: bool = False) -> tuple[_Bound, int]:
    """From the weights of the head and the coordinates in which its input is measured.

    Raises:
        NotBoundedError: Says why there is no such bound.
    """
    residual, network = model._fitted(), model.posterior.network
    parts = model.posterior.mean_parts()
    if parts is None or len(parts) != 1:
        kind = type(model.posterior).__name__
        raise NotBoundedError(f"the mean of a {kind} is not that of the one network that is read")
    factor = parts[0][1]
    mean: Tensor = residual.at(0).mean  # type: ignore[assignment]
    x = (
        mean.to(network_dtype(model))
        .reshape(1, *(model._input_shape or ()))
        .repeat_interleave(2, 0)
    )
    name = linear_head(network, x)
    if name is None:
        raise NotBoundedError("the outputs are not those of a linear layer")
    index = _reads_head(model, name, x)
    coordinates: Any = residual.at(index)
    weights, _ = residual.guaranteed()
    if coordinates.of == "normalised" or float(weights[index]) == 0:
        raise NotBoundedError(
            f"'{model.layers[index]}' is measured in bounded coordinates, or its sigma2 is zero"
        )
    head: Any = network.get_submodule(name)
    W = factor * head.weight.detach().double()
    b = torch.zeros_like(W[:, 0]) if head.bias is None else factor * head.bias.detach().double()
    start, slope = _gaps(W, b, coordinates, certain=model.posterior.is_certain)
    if coordinates.offset is not None:
        # The root of the mean squared offset: up to there the last layer may have no variance.
        start += slope * float(coordinates.offset.double().square().mean().sqrt())
    heat = float(model.temperature)
    bound = HeadBound(
        _input_kernel(model), _SLACK * slope / heat, _SLACK * start / heat, float(weights[index])
    )
    return bound, len(W)


def _reads_head(model: RGPR, name: str, x: Tensor) -> int:
    """The index of the representation that is the head's own input, looked for at far inputs too.

    Raises:
        NotBoundedError: None of them is.
    """
    coordinates = [model._fitted().at(i) for i in range(len(model.layers))]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((6, *x.shape[1:]), generator=generator).to(x)
    sizes = torch.tensor([0.0, 1.0, 10.0, 100.0, 1e3, 1e4]).to(x).reshape(-1, *[1] * (x.dim() - 1))
    x = x[:1] + noise * sizes
    seen = _features(model, name, x)
    features = seen.pop(-1)
    for index, h in seen.items():
        rows = reduce(h, coordinates[index].of)
        if rows.shape == features.shape and torch.allclose(rows, features, rtol=1e-4, atol=1e-6):
            return index
    raise NotBoundedError(
        f"the input of the head '{name}' is not among the layers {model.layers}; fit with "
        f"layers='auto', or with '{name}:input' among them"
    )


def _features(model: RGPR, name: str, x: Tensor) -> dict[int, Tensor]:
    """The representations by their indices, and what goes into the head under -1."""
    network, layers = model.posterior.network, model.layers
    seen: dict[int, Tensor] = {}
    head = network.get_submodule(name)

    def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen[-1] = args[0].clone()

    with (
        evaluating(network),
        capture(network, layers, lambda index, h: seen.__setitem__(index, h.clone())),
    ):
        handle = head.register_forward_pre_hook(keep)
        try:
            network(x)
        finally:
            handle.remove()
    return seen


def _gaps(W: Tensor, b: Tensor, coordinates: Any, *, certain: bool) -> tuple[float, float]:
    """``G_0`` and ``G_1``: how far apart logits can be at an anchor, and for each unit from it.

    Args:
        W: Weights of the head, ``(C, D)`` in float64.
        b: Its bias.
        coordinates: In which its input is measured.
        certain: Whether the base has no variances, so that common parts of two logits cancel.
    """
    at_anchors = coordinates.anchors() @ W.T + b
    if len(W) == 1:
        start, slope = at_anchors.abs().amax(), coordinates.spread_of(W).amax()
    elif certain:
        start = (at_anchors.amax(1) - at_anchors.amin(1)).amax()
        # Pairs of many classes by blocks, which fit memory.
        slope = max(coordinates.spread_of(W - row).amax() for row in W)
    else:
        start = at_anchors.abs().topk(2, dim=1).values.sum(1).amax()
        slope = coordinates.spread_of(W).topk(2).values.sum()
    return float(start), float(slope)


def growth(model: RGPR, *, quick: bool = False) -> tuple[float, float, int, bool]:
    """Lipschitz bound of the base's mean, its length at the mean input, how many outputs it has,
    and whether all its parts are piecewise affine.

    Args:
        model: A fitted model.
        quick: A number that the bound is not below; see :func:`rgpr.lipschitz.lipschitz`.

    Raises:
        NotBoundedError: Names what has no bound.
    """
    coordinates: Any = model._fitted().at(0)
    shape = model._input_shape or torch.Size()
    center = coordinates.mean.to(network_dtype(model)).reshape(shape)
    # Rounded to the network's dtype, the center is not exactly the mean.
    drift = float(coordinates(center[None]).double().norm())
    scale = coordinates.scale.reshape(shape)
    members = model.posterior.mean_parts()
    if members is None:
        raise NotBoundedError(
            f"a {type(model.posterior).__name__} has a mean other than one network's outputs, for "
            "which no Lipschitz bound is known; certify a model over the network itself"
        )
    parts = [
        (lipschitz(network, center, scale, quick=quick), weight) for network, weight in members
    ]
    slope = sum(weight * part[0] for part, weight in parts)
    start = sum(weight * float(part[1].double().norm()) for part, weight in parts)
    outputs, affine = len(parts[0][0][1]), all(part[2] for part, _ in parts)
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


def _gap(confidence: float, classes: int) -> float:
    """The gap at which the bound of the confidence has this value."""
    if confidence >= 1:
        return math.inf
    return math.log((classes - 1) * confidence / (1 - confidence))


def _confidence(gap: float, classes: int) -> float:
    return 1 / (1 + (classes - 1) * math.exp(-gap))
