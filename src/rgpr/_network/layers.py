"""Which layers of a network the residual reads.

A representation is named by its module, as in ``network.named_modules()``; a module that runs
several times in one pass is numbered, ``"relu#0"``, ``"relu#1"``. The input is always the first
representation, under the name ``"input"``; a module of that name is ``"./input"``. What goes into a
module instead of what comes out is ``"fc:input"``.

A choice is a list of names and globs, a dict of them with how each is read, a function of name and
module, or the name of a *picker*, which looks at the network and chooses:
:mod:`rgpr._network.pickers` holds those that there are. In a glob ``*`` stands for anything
without a dot, so that ``"blocks.*"`` are the blocks and not their parts, and ``**`` for anything.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from .batches import Batch
from .pickers import PICKERS
from .representation import INPUT, Representation, parse_layer
from .trace import Call, Side, Trace, few, trace

__all__ = [
    "How",
    "LayerChoice",
    "as_choice",
    "check_layers",
    "choose_layers",
    "choose_of",
    "stand_in",
]

# How a layer is read: the axis of its channels, or which position of a sequence.
How = int | str | None
LayerChoice = str | Sequence[str] | Mapping[str, How] | Callable[[str, nn.Module], bool]

_POSITIONS = {"first": 0, "last": -1, "mean": None}


def check_layers(network: nn.Module, choice: LayerChoice) -> None:
    """Refuse names that no module of the network has, before any data is seen.

    Raises:
        TypeError: Not a choice of layers.
        ValueError: Names the unknown layer and the nearest known ones.
    """
    if callable(choice) or _is_picker(network, choice):
        return
    if not isinstance(choice, str | Sequence | Mapping):
        raise TypeError(
            f"layers={choice!r}; expected 'auto', 'input', names of modules or globs, a dict of "
            "them with the axis of the channels of each, or a function of name and module"
        )
    names = [name for name, _ in network.named_modules(remove_duplicate=False) if name]
    for pattern, how in _patterns(choice).items():
        if isinstance(how, bool) or not (how is None or isinstance(how, int) or how in _POSITIONS):
            raise TypeError(
                f"layers={{{pattern!r}: {how!r}}}; expected the axis of the channels as a number, "
                "'first', 'last' or 'mean' for the position of a sequence that is read, or None"
            )
        if not _matching(parse_layer(pattern)[0], names):
            raise ValueError(_unknown(pattern, names))


def choose_layers(
    network: nn.Module, choice: LayerChoice, x: Batch, *, keep_last: bool = False
) -> list[Representation]:
    """The representations, in the order in which they are computed, input first.

    Args:
        network: The network; it runs on a few rows of ``x``, in evaluation mode.
        choice: The name of a picker; names and globs; or a function of (name, module) to bool.
        x: A batch of inputs.
        keep_last: A picker takes the last stage too: it makes features here, not outputs.

    Raises:
        ValueError: A name matches nothing that ran, or a chosen layer has no representation.
    """
    return choose_of(trace(network, few(x)), choice, keep_last=keep_last)


def stand_in(seen: Trace, source: str) -> Representation:
    """The output of a module in the place of the input."""
    module = seen.network.get_submodule(source)
    call = next((call for call in seen.every if call.module is module), None)
    if call is None or call.made.problem:
        why = "it does not run" if call is None else call.made.problem
        ran = [c.name for c in seen.every if isinstance(c.module, nn.Embedding)]
        instead = f"; embeddings that do are {list(dict.fromkeys(ran))}" if ran else ""
        raise ValueError(f"input={source!r} cannot stand in for the input: {why}{instead}")
    return replace(seen.representation(call), name=INPUT, source=source)


def choose_of(seen: Trace, choice: LayerChoice, *, keep_last: bool = False) -> list[Representation]:
    """:func:`choose_layers` of a network that was looked at."""
    automatic = isinstance(choice, str) and choice == "auto"
    if _is_picker(seen.network, choice):
        choice = PICKERS[str(choice)](seen, keep_last)
    wanted = _by_function(seen, choice) if callable(choice) else _by_name(seen, choice)
    chosen = [replace(seen.representation(seen.root, goes_in=True), name=INPUT)]
    for call, goes_in in _events(seen.root):
        if (id(call), goes_in) in wanted:
            side = call.given if goes_in else call.made
            representation = seen.representation(call, goes_in=goes_in)
            if side.problem:
                raise ValueError(
                    f"layer '{representation.name}' cannot be a representation: {side.problem}"
                )
            chosen.append(_read_as(representation, side, wanted[id(call), goes_in]))
    if automatic and len(chosen) == 1:
        _warn_of_input_alone(seen)
    return chosen


def _by_function(
    seen: Trace, choice: Callable[[str, nn.Module], bool]
) -> dict[tuple[int, bool], How]:
    """The runs that a function chose, each with how it is read."""
    found: dict[tuple[int, bool], How] = {
        (id(call), False): None for call in seen.every if choice(call.name, call.module)
    }
    if not found:
        raise ValueError("the function given as layers chose none; use layers='input' for that")
    return found


def _by_name(
    seen: Trace, choice: str | Sequence[str] | Mapping[str, How]
) -> dict[tuple[int, bool], How]:
    """The runs that names and globs stand for, by every name that a module has."""
    aliases: dict[nn.Module, list[str]] = {}
    for name, module in seen.network.named_modules(remove_duplicate=False):
        aliases.setdefault(module, []).append(name)
    every_name = [name for names in aliases.values() for name in names]
    found: dict[tuple[int, bool], How] = {}
    for pattern, how in _patterns(choice).items():
        name, number, goes_in = parse_layer(pattern)
        matching = set(_matching(name, every_name))
        matches = [
            call
            for call in seen.every
            if number in ("", str(call.number)) and not matching.isdisjoint(aliases[call.module])
        ]
        if not matches:
            raise ValueError(_unknown(pattern, [seen.label(call) for call in seen.every]))
        found |= {(id(call), goes_in): how for call in matches}
    return found


def _read_as(representation: Representation, side: Side, how: How) -> Representation:
    """The representation as the user wants it read."""
    if how is None:
        return representation
    name, dims, shape = representation.name, len(side.shape), tuple(side.shape)
    if isinstance(how, str):
        if dims != 3:
            raise ValueError(
                f"layer '{name}' is to be read at its {how} position, but has shape {shape}, "
                "which is no sequence"
            )
        return replace(representation, token=_POSITIONS[how])
    axis = how + dims if how < 0 else how
    if not 0 <= axis < dims or axis == side.batch:
        raise ValueError(
            f"layers={{{name!r}: {how}}}: its channels cannot be on axis {how} of shape {shape}, "
            f"whose batch is axis {side.batch}"
        )
    return replace(representation, channel=axis + (axis < side.batch), token=None)


def as_choice(read: Sequence[Representation]) -> dict[str, How]:
    """The choice that gives just these representations, the input first, of the same network."""
    words = {0: "first", -1: "last"}
    choice: dict[str, How] = {}
    for each in read[1:]:
        axis = 0 if each.batch and each.channel == 1 else each.channel
        choice[each.name] = axis if each.token is None else words[each.token]
    return choice


def _warn_of_input_alone(seen: Trace) -> None:
    """Say so where a network has hidden layers and none of them was taken."""
    hidden = [call for call in seen.every if call.layers and not call.calls][:-1]
    names = [seen.label(call) for call in hidden if not call.made.problem]
    why = next((f" ('{c.name}': {c.made.problem})" for c in hidden if c.made.problem), "")
    if hidden:
        warnings.warn(
            f"no hidden layer of this network is read, the input alone{why}; name some by "
            f"layers=[...]. Candidates: {_shown(names)}. rgpr.layers(network, x) shows all",
            stacklevel=2,
        )


def _is_picker(network: nn.Module, choice: LayerChoice) -> bool:
    """Whether a picker is meant; a module of the same name comes first, but for ``"auto"``."""
    if not isinstance(choice, str) or choice not in PICKERS:
        return False
    return choice == "auto" or choice not in dict(network.named_modules())


def _patterns(choice: str | Sequence[str] | Mapping[str, How]) -> dict[str, How]:
    if isinstance(choice, Mapping):
        patterns = dict(choice)
    else:
        patterns = dict.fromkeys([choice] if isinstance(choice, str) else choice)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"layers holds {pattern!r}; expected names of modules or globs")
    patterns.pop(INPUT, None)
    return patterns


def _matching(pattern: str, names: Sequence[str]) -> list[str]:
    """The name itself if it is there, whatever characters it has; else as a glob."""
    if pattern in names:
        return [pattern]
    parts = re.split(r"(\*\*|\*|\?|\[[^]]+\])", pattern)
    signs = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    regex = "".join(
        signs.get(part) or (part.replace("[!", "[^") if part.startswith("[") else re.escape(part))
        for part in parts
    )
    return [name for name in names if re.fullmatch(regex, name)]


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - 40} more" if len(names) > 40 else ""
    return ", ".join(names[:40]) + more or "none"


def _unknown(pattern: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(pattern, names, n=3)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    if "*" in pattern and _matching(pattern.replace("**", "*").replace("*", "**"), names):
        hint += " A * does not cross dots, and ** does."
    return (
        f"no layer '{pattern}' runs in this network{hint} Candidates: {_shown(names)}. "
        "A functional activation such as F.relu has no name: take the module before it. "
        "print(rgpr.layers(network, x)) shows all, and a rule chooses if layers is one of "
        f"{', '.join(map(repr, sorted(PICKERS)))}"
    )


def _events(call: Call) -> list[tuple[Call, bool]]:
    """All runs below ``call`` but itself, each where it begins (``True``) and where it ends."""
    found = []
    for child in call.calls:
        inside = _events(child) if child.calls else []
        found += [(child, True), *inside, (child, False)]
    return found
