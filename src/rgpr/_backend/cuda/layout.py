"""How the numbers of a tensor lie in memory, and how they are divided among programs."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,import-untyped"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["PROGRAMS", "dense", "in_order", "parts_of", "power_of_two", "unit_at"]

# So many programs keep a large GPU busy.
PROGRAMS = 512


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def parts_of(size: int, part: int) -> int:
    """Return how many parts cover the size.

    Triton has a function for this, but calling it takes as long as launching a kernel.
    """
    return -(-size // part)


def dense(h: Tensor, parameters: Tensor) -> tuple[Tensor, int]:
    """Return the tensor without gaps in memory, and the number of channels that lie side by side.

    That number is one unless channels are the last dimension in memory.

    Args:
        h: The rows, ``(B, ...)`` with ``N`` entries each.
        parameters: A tensor of ``N`` entries.

    Raises:
        ValueError: The rows do not have as many entries as the parameters.
    """
    if h.shape[1:].numel() != parameters.numel():
        raise ValueError(
            f"rows of shape {tuple(h.shape[1:])} do not fit {parameters.numel()} parameters"
        )
    h, channels_last = in_order(h)
    return h, h.shape[1] if channels_last else 1


def in_order(h: Tensor) -> tuple[Tensor, bool]:
    """Return the tensor without gaps in memory, and whether its channels lie side by side."""
    if h.is_contiguous():
        return h, False
    if h.dim() > 2 and h.movedim(1, -1).is_contiguous():
        return h, True
    return h.contiguous(), False


@triton.jit
def unit_at(j, n, channels, CHANNELS_LAST: tl.constexpr):
    """Where the parameters of the unit are that lies at place ``j`` of a row."""
    return (j % channels) * (n // channels) + j // channels if CHANNELS_LAST else j
