"""A representation: what is read of a network, and which of its axes is which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from torch import Tensor

__all__ = ["GOES_IN", "INPUT", "Representation", "names_of", "parse_layer"]

# The name of the input among the representations.
INPUT = "input"
# The ending of a layer's name where its input is meant instead of its output.
GOES_IN = ":input"


@dataclass(frozen=True)
class Representation:
    """Where a representation is read, and how its axes lie.

    Attributes:
        name: The layer's name, see :mod:`rgpr._network.layers`.
        batch: The axis of the batch: 0, or 1 where a sequence comes first.
        channel: The axis of the channels once the batch is the first axis. All others are
            positions. ``None`` stands for what files of earlier versions mean: the last of three
            axes, else the second.
        token: The one position of a sequence that is read, 0 or -1; ``None`` for all of them.
        source: Of the input, the module whose output, averaged over positions, stands in for it.
        plain: Whether batch and channels are the first two axes and every position is read.
    """

    name: str
    batch: int = 0
    channel: int | None = 1
    token: int | None = None
    source: str | None = None
    plain: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        plain = (self.batch, self.channel, self.token) == (0, 1, None)
        object.__setattr__(self, "plain", plain)  # which a frozen dataclass has no other way for

    def arrange(self, h: Tensor) -> Tensor:
        """The representation as ``(B, C, ...)`` with positions last, in the memory where it is."""
        if self.batch:
            h = h.movedim(self.batch, 0)
        channel = self.channel if self.channel is not None else (-1 if h.dim() == 3 else 1)
        if h.dim() > 2 and channel != 1:
            h = h.movedim(channel, 1)
        return h


def names_of(representations: Sequence[Representation]) -> list[str]:
    """Their names."""
    return [each.name for each in representations]


@lru_cache(maxsize=4096)
def parse_layer(layer: str) -> tuple[str, str, bool]:
    """The module's name, the number of its run (empty for all), and whether its input is meant."""
    name, _, number = layer.removeprefix("./").removesuffix(GOES_IN).partition("#")
    return name, number, layer.endswith(GOES_IN)
