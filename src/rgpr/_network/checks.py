"""Inputs and options that do not fit are refused with words."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn

__all__ = [
    "check_batch",
    "check_input",
    "check_n_samples",
    "network_dtype_device",
    "not_finite",
    "one_of",
]


def check_input(x: Tensor, network: nn.Module, shape: torch.Size | None) -> None:
    """Refuse an input that the network cannot take or that differs from the training inputs.

    Args:
        x: A batch.
        network: The network it goes into.
        shape: Shape of one training input, or ``None`` before the fit.

    Raises:
        TypeError: Not a floating-point tensor, or not of the network's dtype.
        ValueError: On another device, without a batch dimension, or of another shape.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"the input is a {type(x).__name__}; expected a tensor")
    if not x.is_floating_point():
        raise TypeError(
            f"the input has dtype {x.dtype}; the residual measures distances, so it takes "
            "floating-point inputs. Convert as in training, e.g. x.float() / 255"
        )
    if x.dim() < 2:
        raise ValueError(
            f"the input has shape {tuple(x.shape)}; expected a batch, (B, ...). "
            "For a single example use x[None]"
        )
    dtype, device = network_dtype_device(network)
    if dtype is not None and x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"the input has dtype {x.dtype} but the network computes in {dtype}; "
            f"use x.to({dtype}) or cast the network"
        )
    if device is not None and x.device != device:
        raise ValueError(f"the input is on {x.device} but the network is on {device}; move one")
    if shape is not None and x.shape[1:] != shape:
        raise ValueError(
            f"one input has shape {tuple(x.shape[1:])}, but the model was fitted on inputs of "
            f"shape {tuple(shape)}; the moments of one do not apply to the other"
        )


def check_batch(
    number: int, x: Tensor, network: nn.Module, shape: torch.Size | None, *, values: bool = True
) -> None:
    """:func:`check_input` for a batch of training data, which must also be finite.

    Looking at ``values`` waits for a GPU; whoever notices them otherwise need not.
    """
    try:
        check_input(x, network, shape)
    except (TypeError, ValueError) as error:
        raise type(error)(f"batch {number}: {error}") from None
    if values and not bool(x.isfinite().all()):
        raise not_finite(f"batch {number}")


def not_finite(which: str) -> ValueError:
    """The error for a batch of training data with such values."""
    return ValueError(
        f"{which} holds values that are not finite (NaN or inf), from which nothing can be "
        "learned. Remove these examples"
    )


def check_n_samples(n_samples: int) -> None:
    """Refuse anything but a positive whole number."""
    if not isinstance(n_samples, int) or n_samples < 1:
        raise ValueError(f"n_samples = {n_samples} must be a whole number, at least 1")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    """The value, refused by name unless it is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}")
    return value


def network_dtype_device(network: nn.Module) -> tuple[torch.dtype | None, torch.device | None]:
    """What the network computes in; ``(None, None)`` for one without floating-point tensors."""
    for tensor in chain(network.parameters(), network.buffers()):  # usually the very first
        if tensor.is_floating_point():
            return tensor.dtype, tensor.device
    return None, None
