r"""How far apart the logits of a linear head can be, from the variance of the head's own input.

The logits are :math:`W h + b`, and the residual reads ``h``. Let ``t`` be how far ``h`` is beyond
the offsets of its own kernel: with deviations :math:`z_i` from an anchor in the coordinates of that
kernel, the root of the mean of :math:`(|z_i| - c_i)_+^2`, or for a distance
:math:`(\rho_L - c)_+`. A mean of cubes is at least the cube of that root, so
:math:`u_L \ge \frac13 t^3`. The root of the mean of :math:`z_i^2` is at most ``t`` plus that of
:math:`c_i^2`, so the gap of two logits is at most :math:`G_0 + G_1 t`, where the part of the
offsets belongs to :math:`G_0`. Logits can only be large where the head's input itself is far out,
and there it has its own variance, whatever lies between the network's input and the head.

Where the base has variances of its own, unlike for each class, a common part of two logits does not
cancel. Then :math:`G_0 + G_1 t` bounds :math:`|m_i| + |m_j|` instead of :math:`|m_i - m_j|`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._network.outputs import outputs_of
from .._network.running import capture, watching
from .._network.trace import linear_head
from ..extension import Extension
from ..residual.coordinates import reduce
from .bounds import SLACK, HeadBound
from .inputs import input_kernel, network_dtype, rounding, tensor_shape
from .operations import NotBoundedError

__all__ = ["head_bound"]

# So many classes at a time are compared with all others, which limits the memory.
_ROWS = 1024


def head_bound(model: Extension) -> tuple[HeadBound, int]:
    """Returns the bound from the head's own input, and the number of outputs.

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
    # One output is the pair of logits 0 and f, and so is each of several labels.
    pairs = "zero" if len(W) == 1 or model.likelihood.independent else "all"
    if pairs == "all" and not model.posterior.is_certain:
        pairs = "apart"
    start, slope = _gaps(W, b, coordinates, pairs=pairs, relative=rounding(model))
    if coordinates.offset is not None:
        start += slope * float(coordinates.offset.double().square().mean().sqrt())
    heat = float(model.temperature)
    bound = HeadBound(input_kernel(model), SLACK * slope / heat, SLACK * start / heat, weight)
    return bound, len(W)


def _with_version(h: Tensor) -> tuple[Tensor, int]:
    return h, h._version


@dataclass
class _Seen:
    """What one pass through the network showed.

    Every tensor stands with its version, which counts the changes in place that it had seen by
    then.

    Attributes:
        given: The input of each linear layer.
        returned: The outputs of the network.
    """

    given: dict[nn.Module, tuple[Tensor, int]] = field(default_factory=dict)
    returned: list[Any] = field(default_factory=list)

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            self.given[module] = args[0], args[0]._version

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.returned.append(output)


def _head(model: Extension) -> tuple[nn.Linear, int]:
    """Returns the linear layer that makes the outputs, and the index of the layer that feeds it.

    Equal values at a few inputs would prove nothing about other inputs. So the head must be given
    the very memory that the residual measured, and nothing may have changed it in between.

    Raises:
        NotBoundedError: There is no such layer, or the residual does not measure its input.
    """
    network, layers, x, seen = (
        model.posterior.network,
        model.representations,
        _probes(model),
        _Seen(),
    )
    linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
    measured = capture(network, layers, [_with_version] * len(layers), x)
    hooks = watching(network, {network: seen.after}, dict.fromkeys(linear, seen.before))
    with measured, measured, hooks, hooks:
        name = linear_head(network, x)  # runs the one pass that is watched
    if name is None:
        raise NotBoundedError("the outputs are not those of a linear layer")
    head: Any = network.get_submodule(name)
    features, version = seen.given[head]
    product = nn.functional.linear(features, head.weight, head.bias)
    if not torch.allclose(product, outputs_of(seen.returned[0], x), rtol=1e-3, atol=1e-6):
        raise NotBoundedError(
            f"the outputs are not what the linear layer '{name}' makes of its input by its "
            "weights; remove its hooks"
        )
    for index, (h, version_then) in enumerate(measured.found[1:], start=1):
        of = model.residual.at(index).of
        rows = reduce(h, "pooled" if of == "normalised" else of)
        same = h.data_ptr() == features.data_ptr() and version_then == version
        if same and rows.shape == features.shape and torch.equal(rows, features.to(rows.dtype)):
            return head, index
    raise NotBoundedError(
        f"what goes into the linear layer '{name}' is none of the layers {model.layers}; fit "
        f"with layers={[*model.layers[1:], name + ':input']}"
    )


def _probes(model: Extension) -> Tensor:
    """Returns two inputs, one like the data and one far away."""
    coordinates: Any = model.residual.at(0)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn((2, len(coordinates.mean)), generator=generator).to(coordinates.mean)
    noise[1] *= 100
    x: Tensor = coordinates.mean + coordinates.scale * noise
    return x.reshape(2, *tensor_shape(model)).to(network_dtype(model))


def _gaps(
    W: Tensor, b: Tensor, coordinates: Any, *, pairs: str, relative: float
) -> tuple[float, float]:
    """Returns ``G_0`` and ``G_1``, which bound the gap at an anchor and its growth from there.

    Args:
        W: Weights of the head, ``(C, D)`` in float64.
        b: Bias of the head, ``(C,)``.
        coordinates: The coordinates in which the residual measures the head's input.
        pairs: Which pairs of logits are compared: each logit with ``"zero"``, or ``"all"`` with
            each other; ``"apart"`` if the base has variances, so that common parts do not cancel.
        relative: Rounding of a logit, relative to its size.
    """
    at_anchors = coordinates.anchors() @ W.T + b
    spread = coordinates.spread_of(W)
    if pairs == "zero":
        start, slope = at_anchors.abs().amax(), spread.amax()
    elif pairs == "all":
        start = (at_anchors.amax(1) - at_anchors.amin(1)).amax()
        slope = _widest(W, coordinates)
    else:
        start = at_anchors.abs().topk(2, dim=1).values.sum(1).amax()
        slope = spread.topk(2).values.sum()
    # Both logits of a pair are rounded, and all logits may share a large common part.
    start = start + 2 * relative * at_anchors.abs().amax()
    slope = slope + 2 * relative * spread.amax()
    return float(start), float(slope)


def _widest(W: Tensor, coordinates: Any) -> Tensor:
    """Returns the largest ``spread_of`` the difference of two rows of ``W``, ``(C, D)``.

    The squared spread is a quadratic form ``q``, so ``q(a - b) = q(a) + q(b) - a @ q'(b)``. One
    derivative and one product of matrices are enough for all pairs, of which a thousand classes
    have half a million.
    """
    # Autograd refuses tensors that were made in inference mode, so the coordinates are copied.
    coordinates, W = copy.deepcopy(coordinates), W - W.mean(0)
    with torch.enable_grad():
        q: Tensor = coordinates.spread_of(W.requires_grad_()).square()
        [slopes] = torch.autograd.grad(q.sum(), W)
    q, W = q.detach(), W.detach()
    blocks = zip(torch.split(q, _ROWS), torch.split(W, _ROWS), strict=True)
    largest = [(ours[:, None] + q - rows @ slopes.T).amax() for ours, rows in blocks]
    return torch.stack(largest).amax().clamp_min(0).sqrt()
