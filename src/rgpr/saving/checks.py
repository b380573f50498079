"""What the parts of a model must be: a file is held to what the model's own setters are held to.

A checksum finds what happened to a file by accident. These rules find what another program wrote:
a negative scale, for one, would make a model sure of everything far away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._network.batches import Shape
from .._network.representation import INPUT, parse_layer
from ..residual.variance import Residual

__all__ = [
    "ASCENDING",
    "FINITE",
    "NOT_NEGATIVE",
    "POSITIVE",
    "Rule",
    "check_described",
    "check_finite",
    "check_layers",
    "check_learned",
    "check_numbers",
    "check_residual",
]


def _ascending(t: Tensor) -> Tensor:
    return torch.cat([~t[:1].isnan(), t[1:] >= t[:-1]])  # which no NaN is


# In words, and whether each number obeys.
Rule = tuple[str, Callable[[Tensor], Tensor]]
FINITE: Rule = ("finite", Tensor.isfinite)
NOT_NEGATIVE: Rule = ("finite and not negative", lambda t: t.isfinite() & (t >= 0))
POSITIVE: Rule = ("finite and positive", lambda t: t.isfinite() & (t > 0))
ASCENDING: Rule = ("numbers in ascending order", _ascending)
_SCALES = {
    "sigma2": NOT_NEGATIVE,
    "typical": NOT_NEGATIVE,
    "onset": NOT_NEGATIVE,
    "slope": POSITIVE,
    "unit": POSITIVE,
}
# For what a fit or a calibration learned: the number of axes, and what the numbers are.
_LEARNED: Mapping[str, tuple[int, Rule]] = {
    "temperature": (0, POSITIVE),
    "_given_temperature": (0, POSITIVE),
    "_given_onset": (0, NOT_NEGATIVE),
    "_fit_count": (0, NOT_NEGATIVE),
    "_references": (1, ASCENDING),
    "_label_scores": (1, ASCENDING),
    "_layer_references": (2, ("numbers", lambda t: ~t.isnan())),
}


def check_residual(residual: Residual, scales: Mapping[str, Tensor], shape: Shape) -> None:
    """Refuse scales and coordinates of a wrong shape, and numbers that no setter would take.

    Args:
        residual: A residual with the coordinates that were saved.
        scales: What is to become of its buffers, by their names.
        shape: The shape of one input.

    Raises:
        ValueError: The message names the tensor.
    """
    for name, buffer in residual.named_buffers(recurse=False):
        check_numbers(f"residual.{name}", scales[name], tuple(buffer.shape), _SCALES[name])
    for index in range(len(residual.coordinates)):
        coordinates = residual.at(index)
        for name, sizes in coordinates.sizes().items():
            rule = POSITIVE if name == "scale" else FINITE
            check_numbers(f"layer.{index}.{name}", coordinates.get_buffer(name), sizes, rule)
        if coordinates.offset is not None:
            offset = coordinates.offset
            check_numbers(f"layer.{index}.offset", offset, tuple(offset.shape), NOT_NEGATIVE)
    width = residual.at(0).get_buffer("mean").numel()
    if isinstance(shape, torch.Size) and math.prod(shape) != width:
        raise ValueError(
            f"one input has shape {tuple(shape)}, and the coordinates of the input are {width} "
            "numbers"
        )


def check_learned(tensors: Mapping[str, Tensor], layers: int) -> None:
    """Refuse what no fit and no calibration gives, such as a reference that is not a number."""
    for name, tensor in tensors.items():
        if name in _LEARNED:
            axes, rule = _LEARNED[name]
            sizes = (*tensor.shape[: min(axes, 1)], *[layers] * (axes - 1))
            check_numbers(name, tensor, sizes, rule)


def check_layers(names: Sequence[str], network: nn.Module) -> None:
    """Refuse names of layers that are there twice, or that the network does not have."""
    if not names or names[0] != INPUT or len(set(names)) < len(names):
        raise ValueError(
            f"its layers are {list(names)}; the first must be '{INPUT}', and none twice"
        )
    for name in names[1:]:
        network.get_submodule(parse_layer(name)[0])


def check_described(about: Mapping[str, Any]) -> None:
    """Refuse what no description of a model says: axes or a part of the outputs of another kind."""
    output = about.get("output")
    if output is not None and type(output) not in (int, str):
        raise ValueError(f"'output' is {output!r}; it must be an index, a name or nothing")
    for axes in about.get("axes", ()):
        batch, _, token = axes
        whole = all(type(axis) is int for axis in axes if axis is not None)  # and not true or 1.0
        if not whole or batch not in (0, 1) or token not in (None, 0, -1):
            raise ValueError(f"'axes' holds {axes}, which are no axes of a layer")


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors of a posterior that are not finite."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            check_numbers(f"posterior.{name}", tensor, tuple(tensor.shape), FINITE)


def check_numbers(name: str, tensor: Tensor, sizes: Sequence[int], rule: Rule) -> None:
    """Refuse a tensor of another shape, or with a number that does not obey a rule."""
    if tuple(tensor.shape) != tuple(sizes):
        raise ValueError(f"'{name}' has shape {tuple(tensor.shape)} and should have {tuple(sizes)}")
    words, obeys = rule
    wrong = ~obeys(tensor)
    if bool(wrong.any()):
        raise ValueError(f"'{name}' holds {tensor[wrong][0].item():g}; its numbers must be {words}")
