"""What a picker is, and the table of those that are known."""

from __future__ import annotations

from collections.abc import Callable

from ..representation import INPUT
from ..trace import Trace

__all__ = ["PICKERS", "Picker", "register_layer_picker"]

Picker = Callable[[Trace, bool], list[str]]

# All pickers by the name that ``layers=`` gives them; every file of this folder adds its own.
PICKERS: dict[str, Picker] = {}


def register_layer_picker(name: str, pick: Picker) -> None:
    """Teach every model a new value of ``layers``.

    Args:
        name: What ``layers=`` calls it. A module of that name comes first.
        pick: ``pick(seen, keep_last)`` gives names of layers, as ``layers=[...]`` takes them.
            ``seen`` tells what a run of the network did: ``seen.network``, ``seen.x`` (a few rows),
            and ``seen.every``, the modules that ran, each with its ``name``, its ``module``, and
            the shapes ``given.shape`` and ``made.shape``. With ``keep_last`` the network makes
            features, and its last stage may be picked too.

    Raises:
        ValueError: ``"auto"`` and ``"input"`` stand for something else already.
    """
    if name == INPUT or (name == "auto" and name in PICKERS):
        raise ValueError(f"layers={name!r} has a meaning already; choose another name")
    PICKERS[name] = pick
