"""The tensor of outputs in whatever a network returns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from .batches import Batch, rows_of, run

__all__ = ["Output", "default_part", "outputs", "outputs_of", "part_of", "returning"]

# Which part of what a network returned holds its outputs: an index, a key or the name of an
# attribute, or a function that takes it out.
Output = int | str | Callable[[Any], Tensor] | None
# What a remedy calls the function that the user gave.
_GIVEN = "given"


def outputs(network: nn.Module, x: Batch, which: Output = None) -> Tensor:
    """Outputs ``(B, C)`` of the network, which runs once."""
    return outputs_of(network(x) if isinstance(x, Tensor) else run(network, x), x, which)


def outputs_of(output: Any, x: Batch, which: Output = None) -> Tensor:
    """Outputs ``(B, C)`` from what a network returned; one number per input becomes ``(B, 1)``.

    Args:
        output: What the network returned.
        x: The batch that it ran on.
        which: The part that holds the outputs; by default the tensor itself, or ``logits``.

    Raises:
        TypeError: There is no tensor.
        ValueError: There is no such part, or its shape is not ``(B, C)``.
    """
    returned = output
    output = returned
    if which is not None or not isinstance(returned, Tensor):
        output = default_part(returned) if which is None else part_of(returned, which)
    if not isinstance(output, Tensor):
        what = "output= took" if which is not None else "the network returned"
        raise TypeError(
            f"{what} {_described(output)}; expected a tensor of logits or outputs, or an object "
            "that holds one as .logits. Say which part it is, as in RGPR(network, output=0) or "
            "output='logits', or wrap the network in a module that returns the tensor"
        )
    found: Tensor = output
    rows = x.shape[0] if isinstance(x, Tensor) else rows_of(x)
    if found.dim() == 1 and found.shape[0] == rows:
        found = found[:, None]
    if found.dim() != 2 or found.shape[0] != rows:
        dense = ""
        if found.dim() > 2 and found.shape[0] == rows:
            taken = _written(returned, which)
            mean = f"{taken}.mean(1)" if found.dim() == 3 else f"{taken}.flatten(2).mean(2)"
            dense = (
                ". Outputs for every pixel or token are not answered one by one. The score of the "
                "whole input is there: take their mean over positions by "
                f"RGPR(network, output=lambda o: {mean}, likelihood='regression'), and fit and "
                "calibrate with inputs alone; then score, p_value and flag work"
            )
            if callable(which):
                dense += f". Here {_GIVEN} stands for the function that you pass as output= now"
        raise ValueError(
            f"the network returned shape {tuple(found.shape)} for {rows} inputs; "
            f"expected (B, C), one vector of outputs per input{dense}"
        )
    return found


def default_part(output: Any) -> Any:
    """What holds the outputs where nobody says: ``logits``, or else all that was returned."""
    if isinstance(output, Mapping):
        return output.get("logits", output)
    return output if isinstance(output, Tensor) else getattr(output, "logits", output)


def part_of(output: Any, which: Output) -> Any:
    """The part of what a network returned that holds its outputs, whatever it is."""
    if which is None:
        return output
    if callable(which):
        return which(output)
    try:
        if isinstance(which, str) and not isinstance(output, Mapping):
            return getattr(output, which)
        return output[which]
    except (AttributeError, IndexError, KeyError, TypeError):
        raise ValueError(
            f"output={which!r} is no part of what the network returned: {_described(output)}"
        ) from None


def _written(output: Any, which: Output) -> str:
    """The part that holds the outputs, as Python takes it out of what was returned, ``o``."""
    if callable(which):
        return f"{_GIVEN}(o)"
    if which is None:
        if default_part(output) is output:
            return "o"
        which = "logits"
    if isinstance(which, str) and not isinstance(output, Mapping):
        return f"o.{which}"
    return f"o[{which!r}]"


def _described(output: Any) -> str:
    """What came back, with the shapes of tensors in it."""
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, Mapping):
        inside = ", ".join(f"{key!r}: {_described(part)}" for key, part in output.items())
        return f"{type(output).__name__} of {{{inside}}}"
    if isinstance(output, tuple | list):
        return f"{type(output).__name__} of ({', '.join(map(_described, output))})"
    return type(output).__name__


@contextmanager
def returning(network: nn.Module, which: Output) -> Iterator[None]:
    """Inside, and for this thread, the network returns the part that holds its outputs."""
    if which is None:
        yield
        return
    owner = threading.get_ident()

    def pick(module: nn.Module, args: Any, output: Any) -> Any:
        return part_of(output, which) if threading.get_ident() == owner else output

    handle = network.register_forward_hook(pick)
    try:
        yield
    finally:
        handle.remove()
