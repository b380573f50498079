"""Which layers of a network the residual reads.

A representation is named by its module, as in ``network.named_modules()``; a module that runs
several times in one pass is numbered, ``"relu#0"``, ``"relu#1"``. The input is always the first
representation, under the name ``"input"``; a module of that name is ``"./input"``. What goes into a
module instead of what comes out is ``"fc:input"``.

A choice is a list of names and globs, a function of name and module, or the name of a *picker*,
which looks at the network and chooses: :mod:`rgpr._network.pickers` holds those that there are.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from .batches import Batch
from .pickers import PICKERS
from .running import GOES_IN, INPUT, parse_layer
from .trace import Call, few, label, trace

__all__ = ["LayerChoice", "check_layers", "choose_layers"]

LayerChoice = str | Sequence[str] | Callable[[str, nn.Module], bool]


def check_layers(network: nn.Module, choice: LayerChoice) -> None:
    """Refuse names that no module of the network has, before any data is seen.

    Raises:
        ValueError: Names the unknown layer and the nearest known ones.
    """
    if callable(choice) or _is_picker(network, choice):
        return
    if not isinstance(choice, str | Sequence):
        raise TypeError(
            f"layers={choice!r}; expected 'auto', 'input', names of modules or globs, or a "
            "function of name and module"
        )
    names = [name for name, _ in network.named_modules(remove_duplicate=False) if name]
    for pattern in _patterns(choice):
        if not _matching(parse_layer(pattern)[0], names):
            raise ValueError(_unknown(pattern, names))


def choose_layers(
    network: nn.Module, choice: LayerChoice, x: Batch, *, keep_last: bool = False
) -> list[str]:
    """Names of the representations, in the order in which they are computed, input first.

    Args:
        network: The network; it runs once on a few rows of ``x``, in evaluation mode.
        choice: The name of a picker; names and globs; or a function of (name, module) to bool.
        x: A batch of inputs.
        keep_last: A picker takes the last stage too: it makes features here, not outputs.

    Raises:
        ValueError: A name matches nothing that ran, or a chosen layer has no representation.
    """
    x = few(x)
    if _is_picker(network, choice):
        picked = PICKERS[str(choice)](network, x, keep_last)
        if choice == "auto" or picked == [INPUT]:
            return picked
        choice = picked
    root = trace(network, x)
    events = _events(root)
    finished = [call for call, begins in events if not begins]
    runs = Counter(call.module for call in finished)
    aliases: dict[int, list[str]] = {id(module): [] for module in network.modules()}
    for name, module in network.named_modules(remove_duplicate=False):
        aliases[id(module)].append(name)
    ids: set[int] = set()
    into: set[int] = set()
    if callable(choice):
        ids = {id(call) for call in finished if choice(call.name, call.module)}
        if not ids:
            raise ValueError("the function given as layers chose none; use layers='input' for that")
    else:
        every_name = [name for names in aliases.values() for name in names]
        for pattern in _patterns(choice):
            name, number, goes_in = parse_layer(pattern)
            matching = set(_matching(name, every_name))
            matches = [
                call
                for call in finished
                if matching & set(aliases[id(call.module)]) and number in ("", str(call.number))
            ]
            if not matches:
                raise ValueError(_unknown(pattern, [label(call, runs) for call in finished]))
            (into if goes_in else ids).update(id(call) for call in matches)
    chosen = [INPUT]
    for call, begins in events:
        if id(call) in (into if begins else ids):
            name = label(call, runs) + (GOES_IN if begins else "")
            problem = call.input_problem if begins else call.problem
            if problem:
                raise ValueError(f"layer '{name}' cannot be a representation: {problem}")
            chosen.append(name)
    return chosen


def _is_picker(network: nn.Module, choice: LayerChoice) -> bool:
    """Whether a picker is meant; a module of the same name comes first, but for ``"auto"``."""
    if not isinstance(choice, str) or choice not in PICKERS:
        return False
    return choice == "auto" or choice not in dict(network.named_modules())


def _patterns(choice: str | Sequence[str]) -> list[str]:
    patterns = [choice] if isinstance(choice, str) else list(choice)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"layers holds {pattern!r}; expected names of modules or globs")
    return [pattern for pattern in patterns if pattern != INPUT]


def _matching(pattern: str, names: Sequence[str]) -> list[str]:
    """The name itself if it is there, whatever characters it has; else as a glob."""
    return [pattern] if pattern in names else [n for n in names if fnmatchcase(n, pattern)]


def _unknown(pattern: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(pattern, names, n=3)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    shown = ", ".join(names[:40]) + (f" and {len(names) - 40} more" if len(names) > 40 else "")
    return (
        f"no layer '{pattern}' runs in this network{hint} Candidates: {shown or 'none'}. "
        "A functional activation such as F.relu has no name: take the module before it. Rules that "
        f"pick layers: {', '.join(sorted(PICKERS))}"
    )


def _events(call: Call) -> list[tuple[Call, bool]]:
    """All runs below ``call`` but itself, each where it begins (``True``) and where it ends."""
    found = []
    for child in call.calls:
        inside = _events(child) if child.calls else []
        found += [(child, True), *inside, (child, False)]
    return found
