"""A model's input in standardised units: ``z = (x - mean) / std``, at the distance ``||z||``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._network.checks import network_dtype_device
from ..extension import Extension
from .bounds import InputKernel
from .operations import NotBoundedError

__all__ = ["at_distance", "entries", "input_kernel", "network_dtype", "rounding", "tensor_shape"]


def tensor_shape(model: Extension) -> torch.Size:
    """Returns the shape of one input of a model whose input and outputs are one tensor each.

    Raises:
        NotBoundedError: The input has several parts, or ids; or the outputs are a part of what the
            network returns.
    """
    shape = model.input_shape
    if model.source is not None:
        reason = f"its input holds ids, and what is measured is the output of '{model.source}'"
    elif not isinstance(shape, torch.Size):
        reason = f"its input has parts, of which {list(shape)} are measured"
    elif model.posterior.output is not None:
        reason = f"its outputs are the part {model.posterior.output!r} of what the network returns"
    else:
        return shape
    raise NotBoundedError(
        f"the theorem is about a network of one real tensor that returns one, and of this model "
        f"{reason}; wrap the network in a module with such an input and output, and certify a "
        "model of that"
    )


def entries(model: Extension) -> int:
    """Returns the number of entries of one input."""
    return math.prod(tensor_shape(model))


def input_kernel(model: Extension) -> InputKernel:
    """Returns the variance that the input of a fitted model guarantees at a distance."""
    residual = model.residual
    weights, start = residual.guaranteed()
    offset = residual.at(0).offset
    return InputKernel(
        entries=entries(model),
        weight=float(weights[0]),
        start=start,
        offset=0.0 if offset is None else float(offset.double().pow(3).sum() ** (1 / 3)),
    )


def at_distance(model: Extension, x: Tensor, distance: float) -> Tensor:
    """Returns the inputs, each moved along its line through the training mean to this distance."""
    coordinates: Any = model.residual.at(0)
    z = coordinates(x).double()
    z = z / torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp_min(1e-300)
    moved: Tensor = coordinates.mean.double() + coordinates.scale.double() * z * distance
    return moved.reshape(x.shape).to(x.dtype)


def network_dtype(model: Extension) -> torch.dtype:
    """Returns the dtype that the network computes in."""
    return network_dtype_device(model.posterior.network)[0] or torch.get_default_dtype()


def rounding(model: Extension) -> float:
    """Returns by how much the model's own arithmetic may change a number, relative to its size.

    It is sixteen units of rounding of the network's dtype.
    """
    return float(16 * torch.finfo(network_dtype(model)).eps)
