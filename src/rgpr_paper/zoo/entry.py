"""One architecture of the zoo, and the list that holds all of them by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch import nn

from rgpr._discovery import import_files

from .samples import Samples

__all__ = ["ENTRIES", "Entry", "all_entries", "register"]

ENTRIES: dict[str, Entry] = {}


@dataclass(frozen=True)
class Entry:
    """An architecture, how to build it small, and the data that it is trained on.

    Attributes:
        family: The library, or the kind of network, that it comes from.
        name: Its name in that family.
        build: Makes the network with random weights, for the number of classes that it is given.
        data: Makes the training and held-out data.
        options: Options of :class:`rgpr.RGPR`, such as the name of the layer that embeds tokens.
        after: Turns the trained network into the one that is wrapped, such as a quantised one.
        excuses: For a check that this architecture cannot pass, by the check's name, the reason.
            A check with an excuse must fail: an excuse that is not needed any more is an error.
        small: Whether the entry is part of the slice that runs among the tests.
    """

    family: str
    name: str
    build: Callable[[int], nn.Module]
    data: Callable[[], Samples]
    options: dict[str, Any] = field(default_factory=dict)
    after: Callable[[nn.Module, Samples], nn.Module] | None = None
    excuses: dict[str, str] = field(default_factory=dict)
    small: bool = False

    @property
    def unit(self) -> str:
        """The name of the entry's file, which is unique among all families."""
        return f"{self.family}-{self.name}"


def register(entry: Entry) -> None:
    """Add an entry to the zoo.

    Raises:
        ValueError: The family has an entry of this name already.
    """
    if entry.unit in ENTRIES:
        raise ValueError(f"the zoo has '{entry.unit}' already; choose another name")
    ENTRIES[entry.unit] = entry


def all_entries() -> dict[str, Entry]:
    """Every entry by the name of its file: importing the folder of families registers them."""
    package = import_module(".families", __package__)
    import_files(package.__name__, package.__path__)
    return dict(sorted(ENTRIES.items()))
