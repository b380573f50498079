"""What a picker is, and the table of those that are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..running import INPUT

__all__ = ["PICKERS", "Picker", "register_layer_picker"]

Picker = Callable[[nn.Module, Any, bool], list[str]]

# All pickers by the name that ``layers=`` gives them; every file of this folder adds its own.
PICKERS: dict[str, Picker] = {}


def register_layer_picker(name: str, pick: Picker) -> None:
    """Teach every model a new value of ``layers``.

    Args:
        name: What ``layers=`` calls it. A module of that name comes first.
        pick: ``pick(network, x, keep_last)`` gives names of layers, as ``layers=[...]`` takes them.
            ``x`` is a batch of a few rows. With ``keep_last`` the network makes features, and its
            last stage may be picked too.

    Raises:
        ValueError: ``"auto"`` and ``"input"`` stand for something else already.
    """
    if name == INPUT or (name == "auto" and name in PICKERS):
        raise ValueError(f"layers={name!r} has a meaning already; choose another name")
    PICKERS[name] = pick
