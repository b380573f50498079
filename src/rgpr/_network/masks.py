"""Which positions of sequences count, where a batch has a mask.

Every representation ``(B, C, T)`` of the mask's length is averaged over the positions that count,
so that padding changes no answer of a network that it does not change itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["Mask", "is_mask", "mask_of", "noting"]

T = TypeVar("T")

# One where a position counts; and torch's own, True where a position is to be ignored.
_ATTENDED = "attention_mask"
_IGNORED = ("key_padding_mask", "src_key_padding_mask")
# Some libraries mean the one by it, and some the other.
_OPEN = "mask"


@dataclass(frozen=True)
class Mask:
    """A mask of a batch.

    Attributes:
        name: The name of the part.
        counted: Which positions count, ``(B, T)`` booleans; which do not, if the name is open.
    """

    name: str
    counted: Tensor

    def fits(self, h: Tensor) -> bool:
        """Whether a representation ``(B, C, T)`` is a sequence of the mask's length.

        Raises:
            ValueError: It is, and nobody knows what the mask means.
        """
        if h.dim() != 3 or (h.shape[0], h.shape[2]) != self.counted.shape:
            return False
        if self.name == _OPEN:
            raise ValueError(
                f"the input has a '{_OPEN}' of shape {tuple(self.counted.shape)}, and whether True "
                "in it means to keep a position or to ignore it differs from library to library. "
                f"Call it '{_ATTENDED}' if one or True means keep, '{_IGNORED[0]}' if True means "
                "ignore, in the batch and in forward; to leave the network as it is, wrap it: "
                f"def forward(self, x, {_ATTENDED}): return self.network(x, {_ATTENDED})"
            )
        return True

    def mean(self, h: Tensor) -> Tensor:
        """The mean of ``(B, C, T)`` over the positions that count, ``(B, C)``.

        It is NaN in rows of which none does.
        """
        total = torch.where(self.counted[:, None], h, 0.0).sum(2)
        return total / self.counted.sum(1, keepdim=True).to(h.dtype)

    def at(self, h: Tensor, token: int) -> Tensor:
        """The first position of ``(B, C, T)`` that counts, or the last one for -1, ``(B, C)``."""
        places = torch.arange(h.shape[2], device=h.device)
        last = torch.where(self.counted, places, -1).amax(1)
        first = torch.where(self.counted, places, h.shape[2]).amin(1).clamp_max(h.shape[2] - 1)
        place = first if token == 0 else last.clamp_min(0)
        return h.take_along_dim(place[:, None, None], 2)[..., 0]

    def check_rows(self, which: str) -> None:
        """Refuse rows of which no position counts.

        Raises:
            ValueError: The message names the row.
        """
        none = ~self.counted.any(1)
        if self.name != _OPEN and bool(none.any()):
            raise ValueError(
                f"{which}: '{self.name}' counts no position in row {int(none.nonzero()[0])}, so "
                "there is nothing to average. Remove such rows; if it should count all, look at "
                f"what True means: '{_ATTENDED}' keeps what is one, '{_IGNORED[0]}' what is False"
            )

    def warn_of(self, lengths: Mapping[str, int]) -> None:
        """Say so where sequences are averaged over padding, too.

        Args:
            lengths: Of each layer that was not averaged by this mask, the length of its sequences.
        """
        if not lengths or self.name == _OPEN:
            return
        layer, length = next(iter(lengths.items()))
        more = f", and so are {list(lengths)[1:]}" if len(lengths) > 1 else ""
        warnings.warn(
            f"layer '{layer}' has sequences of length {length} and '{self.name}' is of length "
            f"{self.counted.shape[1]}, so it is averaged over all positions, padding too{more}: "
            "answers may depend on how far a batch is padded. Where a class token comes first, "
            f"layers={{'{layer}': 'first'}} reads that alone; or choose other layers",
            stacklevel=2,
        )


def noting(lengths: dict[str, int], layer: str, take: Callable[[Tensor], T]) -> Callable[..., T]:
    """The same function, which also notes how long the sequences of a layer are, if it has any."""

    def noted(h: Tensor) -> T:
        if h.dim() == 3:
            lengths[layer] = h.shape[2]
        return take(h)

    return noted


def is_mask(name: str) -> bool:
    """Whether a part of this name says which positions count, instead of being a measurement."""
    return name == _ATTENDED or name in _IGNORED


def mask_of(parts: Mapping[str, Tensor]) -> Mask | None:
    """The mask among the parts of a batch, if there is one; one that is clear comes first."""
    for name, part in parts.items():
        if part.dim() == 2 and is_mask(name):
            return Mask(name, part != 0 if name == _ATTENDED else part == 0)
    unclear = parts.get(_OPEN)
    if unclear is not None and unclear.dim() == 2 and not unclear.is_floating_point():
        return Mask(_OPEN, unclear != 0)
    return None
