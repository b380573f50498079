"""The contract of the detectors that are compared, and the registry that holds them by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor, nn

from ..methods import Contestants
from ..outputs import Outputs

__all__ = ["RIVALS", "Bench", "Fitted", "Reads", "Rival", "register_rival"]

Reads = Literal["logits", "features", "images"]


@dataclass(frozen=True)
class Bench:
    """What detectors are fitted on.

    Attributes:
        competing: The network, its data, and this library's methods over it.
        head: The network's last linear layer.
        train: Outputs of all training images.
        validation: Outputs of the validation images.
    """

    competing: Contestants
    head: nn.Linear
    train: Outputs
    validation: Outputs

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.competing.classes

    @property
    def device(self) -> str:
        """Where the network and its outputs are."""
        return self.competing.context.device

    @cached_property
    def weight(self) -> Tensor:
        """Weight of the head, ``(C, D)``."""
        return self.head.weight.detach()

    @cached_property
    def bias(self) -> Tensor:
        """Bias of the head, ``(C,)``."""
        bias = self.head.bias
        return self.weight.new_zeros(len(self.weight)) if bias is None else bias.detach()


@dataclass(frozen=True)
class Fitted:
    """A detector that is ready to score.

    Attributes:
        score: Gives a score ``(B,)``, higher for stranger inputs, from what the rival reads.
        setting: Values of the detector's parameters, which the unit keeps. Where they are from is
            said by :attr:`Rival.source`.
        seconds: How long the fit took, where it was shared with other methods and timed by them;
            ``None`` where the caller's clock is right.
    """

    score: Callable[[Tensor], Tensor]
    setting: str
    seconds: float | None = None


@dataclass(frozen=True)
class Rival:
    """A detector that is compared.

    Attributes:
        name: The name in tables.
        paper: Authors and year of the paper that has it.
        code: Whose code computes it.
        reads: What it scores: logits ``(B, C)``, features ``(B, D)`` or images.
        trains: Whether the fit needs outputs of the training images.
        fit: Makes it ready.
        source: Where the values of its parameters are from, in words; empty if it has none.
        ours: Whether it is this library's answer and not one that the answer competes with.
    """

    name: str
    paper: str
    code: str
    reads: Reads
    trains: bool
    fit: Callable[[Bench], Fitted]
    source: str = ""
    ours: bool = False


#: Every registered rival by its name, in the order of registration.
RIVALS: dict[str, Rival] = {}


def register_rival(rival: Rival) -> None:
    """List a detector.

    Raises:
        ValueError: Another one has this name already.
    """
    if rival.name in RIVALS:
        raise ValueError(f"there is a rival '{rival.name}' already; choose another name")
    RIVALS[rival.name] = rival
