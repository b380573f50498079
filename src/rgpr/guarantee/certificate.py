r"""The theorem as a number: a distance beyond which the confidence is provably low.

Let :math:`\rho = \|z\|` be the distance of an input from the training mean in standardised units,
``N`` its entries and ``c`` the offsets of its kernel. By Hoelder and the triangle inequality
:math:`u_0 \ge \frac{1}{3N} (N^{-1/6} \rho - \|c\|_3)_+^3`. Whatever the residual, there are
weights and a start with :math:`v / s \ge (g_0 u_0 + g_L u_L - \kappa)_+`, where ``L`` is the
head's own input (:meth:`rgpr.residual.variance.Residual.guaranteed`). So no two probit logits are
further apart than

.. math:: D = \frac{\text{gap of the means}}{T \sqrt{1 + (g_0 u_0 + g_L u_L - \kappa)_+}}

and the confidence is at most :math:`1 / (1 + (C - 1) e^{-D})`. Two bounds of the gap give two
radii:

- **Lipschitz**: the outputs satisfy :math:`\|m\| \le \|m_0\| + K \rho`, with :math:`m_0` those at
  the mean input and ``K`` a bound on the network's Lipschitz constant; the gap is at most
  :math:`\sqrt2 \|m\|`. Deep networks have a large ``K``, and some have none that we know.
- **Head**: the logits are :math:`W h + b`, and the residual reads ``h``. Let ``t`` be how far ``h``
  is beyond the offsets of its own kernel: with deviations :math:`z_i` from an anchor in the
  coordinates of that kernel, the root of the mean of :math:`(|z_i| - c_i)_+^2`, or for a distance
  :math:`(\rho_L - c)_+`. A mean of cubes is at least the cube of that root, so
  :math:`u_L \ge \frac13 t^3`. The root of the mean of :math:`z_i^2` is at most ``t`` plus that of
  :math:`c_i^2`, so the gap is at most :math:`G_0 + G_1 t`, where the part of the offsets belongs to
  :math:`G_0`. Logits can only be large where the last layer itself is far out, and there it has its
  own variance: whatever lies between input and head,

  .. math:: D^2 \le \max_{t \ge 0} \frac{(G_0 + G_1 t)^2}{A + B t^3}, \qquad
            A = 1 + g_0 u_0 - \kappa, \quad B = \tfrac13 g_L,

  wherever :math:`A > 0`, since :math:`1 + (y)_+ \ge 1 + y`. The maximum falls as :math:`u_0` grows.
  It lies where :math:`\frac32 B t^2 (G_0 + G_1 t) = G_1 (A + B t^3)`. By inserting one into the
  other, :math:`\frac32 B D^2 t^2 = G_1 (G_0 + G_1 t)`, which is a quadratic equation for ``t``,
  and :math:`A = (G_0 + G_1 t)(G_0 + \frac13 G_1 t) / D^2`. So a wanted ``D`` gives ``t``, then
  ``A``, then the :math:`u_0` from which on it is kept.

Where the base has variances of its own, unlike for each class, a common part of two logits no
longer cancels: then :math:`|m_i| + |m_j|` is bounded instead of :math:`|m_i - m_j|`.

The certificate is the smaller radius. Beyond it every input, in every direction, is below. The
argument is about exact numbers. For the rounding of the model itself, sixteen units of it in the
network's dtype are taken off :math:`\varepsilon`, and as many of each logit's own size, which may
be large where all logits have a large part in common, are added to the gap.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._atomic import replacing
from .._network.checks import network_dtype_device
from .._network.outputs import outputs_of
from .._network.running import capture, watching
from .._network.trace import linear_head
from ..answers.probabilities import answer
from ..extension import Extension
from ..residual.coordinates import reduce
from .bounds import _FURTHEST, _SLACK, HeadBound, InputKernel, LipschitzBound, _Bound
from .lipschitz import NotBoundedError, lipschitz

__all__ = ["Certificate", "at_distance", "certify", "growth", "network_dtype"]

# Classes that are compared with all others at a time.
_ROWS = 1024


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
    model: Extension
    bounds: dict[str, _Bound]

    def bound(self, distance: float) -> float:
        """The largest confidence that an input at this distance, or further, can have."""
        gap = min(bound.gap(distance) for bound in self.bounds.values())
        return _confidence(gap, self.classes)

    def distance(self, x: Tensor) -> Tensor:
        """The distance of each input from the training data's mean, ``(B,)`` in float64."""
        z: Tensor = self.model.residual.at(0)(x)
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
        furthest = math.ceil(math.log10(max(1.0, self.radius)))
        distances = [10 ** (p / 4) for p in range(-2, 4 * furthest + 5)]
        with torch.no_grad():
            for distance in distances:
                moved = at_distance(self.model, x, distance)
                answered: Any = answer(self.model, self.model.read(moved))
                measured.append(answered.amax(1).double())
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
def certify(model: Extension, eps: float) -> Certificate:
    """The certificate; see :meth:`rgpr.RGPR.certify`."""
    residual = model.residual
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
    rounding = _rounding(dtype)
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
            if bounds:
                _refuse_if_larger(model, gap, radii["head"])
            bounds[name], outputs = make(model)
        except NotBoundedError as error:
            obstacles[name] = str(error)
            continue
        classes = max(2, outputs)
        gap = _gap(1 / classes + eps - rounding, classes)
        radii[name] = bounds[name].radius(gap)
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
        entries=math.prod(model.input_shape),
        by=by,
        radii=radii,
        obstacles=obstacles,
        model=model,
        bounds=bounds,
    )


def _refuse_if_larger(model: Extension, gap: float, radius: float) -> None:
    """Refuse a Lipschitz bound that is not worth computing.

    Raises:
        NotBoundedError: Its radius is larger than the one that there is.
    """
    least = _lipschitz_bound(model, quick=True)[0].radius(gap)
    if least > radius:
        raise NotBoundedError(f"it is not computed, since it is at least {least:.3g}")


def _input_kernel(model: Extension) -> InputKernel:
    residual = model.residual
    weights, start = residual.guaranteed()
    offset = residual.at(0).offset
    return InputKernel(
        entries=math.prod(model.input_shape),
        weight=float(weights[0]),
        start=start,
        offset=0.0 if offset is None else float(offset.double().pow(3).sum() ** (1 / 3)),
    )


def _lipschitz_bound(model: Extension, *, quick: bool = False) -> tuple[_Bound, int]:
    slope, start, outputs, _ = growth(model, quick=quick)
    # One logit stands for the pair (0, f).
    spread = (1 if outputs == 1 else math.sqrt(2)) / float(model.temperature)
    spread *= 1 + 2 * _rounding(network_dtype(model))
    return LipschitzBound(_input_kernel(model), spread * slope, spread * start), outputs


def _head_bound(model: Extension) -> tuple[_Bound, int]:
    """From the weights of the head and the coordinates in which its input is measured.

    Raises:
        NotBoundedError: Says why there is no such bound.
    """
    residual = model.residual
    parts = model.posterior.mean_parts()
    if parts is None or len(parts) != 1:
        kind = type(model.posterior).__name__
        raise NotBoundedError(
            f"the mean of a {kind} is not that of the one network that is read, or its mean_parts "
            "do not say so"
        )
    factor = parts[0][1]
    head, index = _head(model)
    coordinates: Any = residual.at(index)
    weight = float(residual.guaranteed()[0][index])
    if coordinates.of == "normalised" or weight == 0:
        raise NotBoundedError(
            f"'{model.layers[index]}' is measured in bounded coordinates, or its sigma2 is zero"
        )
    W = factor * head.weight.double()
    b = torch.zeros_like(W[:, 0]) if head.bias is None else factor * head.bias.double()
    certain, rounding = model.posterior.is_certain, _rounding(network_dtype(model))
    start, slope = _gaps(W, b, coordinates, certain=certain, rounding=rounding)
    if coordinates.offset is not None:
        start += slope * float(coordinates.offset.double().square().mean().sqrt())
    heat = float(model.temperature)
    bound = HeadBound(_input_kernel(model), _SLACK * slope / heat, _SLACK * start / heat, weight)
    return bound, len(W)


def _head(model: Extension) -> tuple[nn.Linear, int]:
    """The linear layer that makes the outputs, and the index of the representation it reads.

    Equal values at a few inputs would prove nothing about other inputs. So the head must be given
    the very memory that was measured, and nothing may have changed it in between.

    Raises:
        NotBoundedError: There is no such layer, or what goes into it is not measured.
    """
    network, layers = model.posterior.network, model.layers
    x = _probes(model)
    # Each tensor with the number of changes in place that it had seen by then.
    given: dict[nn.Module, tuple[Tensor, int]] = {}
    returned: list[Any] = []

    def measure(h: Tensor) -> tuple[Tensor, int]:
        return h, h._version

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            given[module] = args[0], args[0]._version

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        returned.append(output)

    linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
    with (
        capture(network, layers, [measure] * len(layers), x) as measured,
        watching(network, {network: after}, dict.fromkeys(linear, before)),
    ):
        name = linear_head(network, x)  # the one pass that is watched
    if name is None:
        raise NotBoundedError("the outputs are not those of a linear layer")
    head: Any = network.get_submodule(name)
    features, changes = given[head]
    product = nn.functional.linear(features, head.weight, head.bias)
    if not torch.allclose(product, outputs_of(returned[0], x), rtol=1e-3, atol=1e-6):
        raise NotBoundedError(
            f"the outputs are not what the linear layer '{name}' makes of its input by its "
            "weights; remove its hooks"
        )
    for index, (h, seen) in enumerate(measured[1:], start=1):
        of = model.residual.at(index).of
        rows = reduce(h, "pooled" if of == "normalised" else of)
        same = h.data_ptr() == features.data_ptr() and seen == changes
        if same and rows.shape == features.shape and torch.equal(rows, features.to(rows.dtype)):
            return head, index
    raise NotBoundedError(
        f"what goes into the linear layer '{name}' is none of the layers {layers}; fit with "
        f"layers={[*layers[1:], name + ':input']}"
    )


def _probes(model: Extension) -> Tensor:
    """Two inputs, one like the data and one far away."""
    coordinates: Any = model.residual.at(0)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((2, len(coordinates.mean)), generator=generator).to(coordinates.mean)
    noise[1] *= 100
    x: Tensor = coordinates.mean + coordinates.scale * noise
    return x.reshape(2, *model.input_shape).to(network_dtype(model))


def _gaps(
    W: Tensor, b: Tensor, coordinates: Any, *, certain: bool, rounding: float
) -> tuple[float, float]:
    """``G_0`` and ``G_1``: how far apart logits can be at an anchor, and for each unit from it.

    Args:
        W: Weights of the head, ``(C, D)`` in float64.
        b: Its bias.
        coordinates: In which its input is measured.
        certain: Whether the base has no variances, so that common parts of two logits cancel.
        rounding: Of a logit, as a part of its size.
    """
    at_anchors = coordinates.anchors() @ W.T + b
    spread = coordinates.spread_of(W)
    if len(W) == 1:
        start, slope = at_anchors.abs().amax(), spread.amax()
    elif certain:
        start = (at_anchors.amax(1) - at_anchors.amin(1)).amax()
        slope = _widest(W, coordinates)
    else:
        start = at_anchors.abs().topk(2, dim=1).values.sum(1).amax()
        slope = spread.topk(2).values.sum()
    # Two logits are rounded.
    start = start + 2 * rounding * at_anchors.abs().amax()
    slope = slope + 2 * rounding * spread.amax()
    return float(start), float(slope)


def _widest(W: Tensor, coordinates: Any) -> Tensor:
    """The largest ``spread_of`` the difference of two rows of ``W``, ``(C, D)``.

    The squared spread is a quadratic form ``q``, so ``q(a - b) = q(a) + q(b) - a @ q'(b)``. One
    derivative and one product of matrices are enough for all pairs: a thousand classes have half
    a million of them.
    """
    # A copy, since autograd takes no tensors that were made in inference mode.
    coordinates, W = copy.deepcopy(coordinates), W - W.mean(0)
    with torch.enable_grad():
        q: Tensor = coordinates.spread_of(W.requires_grad_()).square()
        [slopes] = torch.autograd.grad(q.sum(), W)
    q, W = q.detach(), W.detach()
    blocks = zip(torch.split(q, _ROWS), torch.split(W, _ROWS), strict=True)
    largest = [(ours[:, None] + q - rows @ slopes.T).amax() for ours, rows in blocks]
    return torch.stack(largest).amax().clamp_min(0).sqrt()


def growth(model: Extension, *, quick: bool = False) -> tuple[float, float, int, bool]:
    """Lipschitz bound of the base's mean, its length at the mean input, how many outputs it has,
    and whether all its parts are piecewise affine.

    Args:
        model: A fitted model.
        quick: A number that the bound is not below; see :func:`rgpr.guarantee.lipschitz.lipschitz`.

    Raises:
        NotBoundedError: Names what has no bound.
    """
    coordinates: Any = model.residual.at(0)
    shape = model.input_shape
    center = coordinates.mean.to(network_dtype(model)).reshape(shape)
    # Rounded to the network's dtype, the center is not exactly the mean.
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
    return slope, start + slope * drift, outputs, affine


def _rounding(dtype: torch.dtype) -> float:
    """What the model's own arithmetic may change a number by, as a part of its size."""
    return float(16 * torch.finfo(dtype).eps)


def network_dtype(model: Extension) -> torch.dtype:
    """What the network computes in."""
    return network_dtype_device(model.posterior.network)[0] or torch.get_default_dtype()


def at_distance(model: Extension, x: Tensor, distance: float) -> Tensor:
    """The inputs moved along their lines through the training mean to this distance from it."""
    coordinates: Any = model.residual.at(0)
    z = coordinates(x).double()
    z = z / torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp_min(1e-300)
    moved: Tensor = coordinates.mean.double() + coordinates.scale.double() * z * distance
    return moved.reshape(x.shape).to(x.dtype)


def _gap(confidence: float, classes: int) -> float:
    """The gap at which the bound of the confidence has this value."""
    if confidence >= 1:
        return _FURTHEST  # any gap will do
    return math.log((classes - 1) * confidence / (1 - confidence))


def _confidence(gap: float, classes: int) -> float:
    return 1 / (1 + (classes - 1) * math.exp(-gap))
