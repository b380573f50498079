"""Inputs and options that do not fit are refused with words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import prod

import torch
from torch import Tensor, nn

from .batches import Batch, Shape, named, numbers, refuse_packed, shape_of, unmasked

__all__ = [
    "check_batch",
    "check_counts",
    "check_input",
    "check_source",
    "embeddings",
    "network_dtype_device",
    "not_finite",
    "one_of",
]


def check_input(
    x: Batch, network: nn.Module, shape: Shape | None, *, measured: bool = True
) -> None:
    """Refuse an input that the network cannot take or that differs from the training inputs.

    Args:
        x: A batch.
        network: The network it goes into.
        shape: Shape of one training input, or ``None`` before the fit.
        measured: Whether distances are measured between the inputs themselves, so that they must
            hold real numbers.

    Raises:
        TypeError: Nothing to measure, or not of the network's dtype.
        ValueError: On another device, without a batch dimension, or of another shape.
    """
    if isinstance(x, Tensor) and x.is_floating_point():
        if x.layout is not torch.strided or x.is_nested:
            refuse_packed(x)
        _check_part("the input", x, network)
        if x.shape[1:] != shape and shape is not None:
            _check_shapes(shape_of(network, x), shape)
        return
    parts, real = named(network, x), numbers(network, x)
    if not real:
        _check_integers(parts, network, measured)
    _, device = network_dtype_device(network)
    first, *others = parts.values()
    if any(part.dim() == 0 for part in parts.values()) or any(
        part.shape[0] != first.shape[0] for part in others
    ):
        sizes = ", ".join(f"'{name}' {tuple(part.shape)}" for name, part in parts.items())
        raise ValueError(
            f"the parts of the input have the shapes {sizes}; expected the same number of rows, "
            "(B, ...), in each. For a single example use x[None]"
        )
    for name, part in parts.items():
        what = f"the part '{name}' of the input" if name else "the input"
        if name in real:
            _check_part(what, part, network)
        elif device is not None and part.device != device:
            raise ValueError(f"{what} is on {part.device} but the network is on {device}; move one")
    if shape is not None:
        _check_shapes(shape_of(network, x), shape)


def _check_part(what: str, x: Tensor, network: nn.Module) -> None:
    """Refuse real numbers that are no batch, or not of the network's dtype or device."""
    if x.dim() < 2 and what == "the input":
        raise ValueError(
            f"{what} has shape {tuple(x.shape)}; expected a batch, (B, ...). "
            "For a single example use x[None]"
        )
    dtype, device = network_dtype_device(network)
    if dtype is not None and x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        tensors = chain(network.parameters(), network.buffers())
        every = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        if x.dtype not in every:  # which of several it takes first, only the network knows
            several = " and ".join(sorted(map(str, every)))
            raise TypeError(
                f"{what} has dtype {x.dtype} but the network computes in {several}; "
                f"use x.to({dtype}) or cast the network"
            )
    if device is not None and x.device != device:
        raise ValueError(f"{what} is on {x.device} but the network is on {device}; move one")


def _check_integers(parts: Mapping[str, Tensor], network: nn.Module, measured: bool) -> None:
    """Refuse a batch without real numbers, unless an embedding reads it in their place."""
    known = embeddings(network)
    if known and not measured:
        return
    of = " and ".join(sorted({str(part.dtype) for part in parts.values()}))
    if known:
        raise TypeError(
            f"the input has dtype {of}, and between ids there are no distances to measure; name "
            f"the embedding that reads them: RGPR(network, input='{known[0]}')"
            + (f", or one of {known[1:]}" if len(known) > 1 else "")
        )
    if not measured and all(part.dtype != torch.uint8 for part in parts.values()):
        return
    raise TypeError(
        f"the input has dtype {of}; the residual measures distances, so it takes "
        "floating-point inputs. Convert as in training, e.g. x.float() / 255"
    )


def embeddings(network: nn.Module) -> list[str]:
    """Names of the modules of a network that look up vectors for ids."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    return [name for name, module in network.named_modules() if isinstance(module, kinds)]


def check_source(network: nn.Module, name: str | None) -> None:
    """Refuse a module to stand in for the input that the network does not have.

    Raises:
        ValueError: Names the embeddings that there are.
    """
    if name is None or (name and name in dict(network.named_modules(remove_duplicate=False))):
        return
    raise ValueError(
        f"input={name!r}: the network has no module of that name. Its embeddings are "
        f"{embeddings(network) or 'none'}; network.named_modules() lists all modules"
    )


def _check_shapes(one: Shape, fitted: Shape) -> None:
    """Refuse inputs of another shape; single parts are compared whatever they are called."""
    ours, theirs = (
        {"": tuple(shape)} if isinstance(shape, torch.Size) else shape for shape in (one, fitted)
    )
    if ours.keys() != theirs.keys():
        if len(ours) != 1 or len(theirs) != 1:
            raise ValueError(
                f"one input has the parts {list(ours)} to measure, but the model was fitted on "
                f"{list(theirs)}; pass all of them"
            )
        ours = dict(zip(theirs, ours.values(), strict=True))
    for name, shape in ours.items():
        wanted = theirs[name]
        pairs = zip(shape, wanted, strict=False)
        if len(shape) != len(wanted) or any(a != b for a, b in pairs if None not in (a, b)):
            what = f"the part '{name}' of one input" if name else "one input"
            raise ValueError(
                f"{what} has shape {_shown(shape)}, but the model was fitted on inputs of "
                f"shape {_shown(wanted)}{_turn(shape, wanted)}"
            )


def _turn(shape: Sequence[int | None], wanted: Sequence[int | None]) -> str:
    """How to bring inputs into a shape that holds as many numbers."""
    if None in (*shape, *wanted) or prod(shape) != prod(wanted):  # type: ignore[arg-type]
        return "; pass inputs as they were for fit"
    return f"; x.reshape({', '.join(['-1', *map(str, wanted)])}) has this shape"


def _shown(shape: Sequence[int | None]) -> str:
    """A shape as it is printed, with T for a length that may differ."""
    sizes = [("T" if size is None else str(size)) for size in shape]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def check_batch(
    number: int,
    x: Batch,
    network: nn.Module,
    shape: Shape | None,
    *,
    values: bool = True,
    measured: bool = True,
) -> None:
    """:func:`check_input` for a batch of training data, which must also be finite.

    Each of its rows must have positions that count, if there is a mask.

    Looking at ``values`` waits for a GPU; whoever notices them otherwise need not.
    """
    try:
        check_input(x, network, shape, measured=measured)
    except (TypeError, ValueError) as error:
        raise type(error)(f"batch {number}: {error}") from None
    if not values:
        return
    tensors: Iterable[Tensor] = [x] if isinstance(x, Tensor) else numbers(network, x).values()
    mask = None if isinstance(x, Tensor) else unmasked(network, x)
    if mask is not None:
        mask.check_rows(f"batch {number}")
    if not all(bool(part.isfinite().all()) for part in tensors):
        raise not_finite(f"batch {number}")


def not_finite(which: str) -> ValueError:
    """The error for a batch of training data with such values."""
    return ValueError(
        f"{which} holds values that are not finite (NaN or inf), from which nothing can be "
        "learned. Remove these examples"
    )


def check_counts(**counts: int) -> None:
    """Refuse anything but positive whole numbers, by the names under which they were given."""
    for name, count in counts.items():
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} = {count} must be a whole number, at least 1")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    """The value, refused by name unless it is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}")
    return value


def network_dtype_device(network: nn.Module) -> tuple[torch.dtype | None, torch.device | None]:
    """What the network computes in; ``(None, None)`` for one without floating-point tensors."""
    # Usually it is the very first, which takes less time than to start ``network.parameters()``.
    for table in ("_parameters", "_buffers"):
        for module in network.modules():
            for tensor in getattr(module, table).values():
                if tensor is not None and tensor.is_floating_point():
                    return tensor.dtype, tensor.device
    return None, None
