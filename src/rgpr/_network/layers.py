"""Which layers of a network the residual reads, and reading them in the pass that predicts.

A representation is named by its module, as in ``network.named_modules()``; a module that runs
several times in one pass is numbered, ``"relu#0"``, ``"relu#1"``. The input is always the first
representation, under the name ``"input"``; a module of that name is ``"./input"``.

``layers="auto"`` takes the output of every hidden stage. A stage is a block (a submodule made of
submodules, like the ``layer1`` .. ``layer4`` of a ResNet) or a layer with weights together with
the normalisation, activation and pooling that follow it. The last stage makes the outputs and is
left out, and so is a stem before the first block. Plain ``nn.Sequential`` containers are looked
through. Where the activation is a function call, the representation is what goes into it: hooks
see modules only.

If the outputs are those of an ``nn.Linear`` as it made them, what goes into that layer is always
read: all that the network knows about an input passes there. It is the last stage's output itself,
or takes its place under the name ``"fc:input"`` (for a head called ``fc``) where something lies
between the two, such as the pooling of a ResNet, a functional activation, or the choice of a class
token. A subclass with a ``forward`` of its own may do anything, and is no such layer.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from .capture import _GOES_IN, INPUT, _parse
from .trace import _Call, _few, _sampled, _trace

__all__ = ["LayerChoice", "check_layers", "choose_layers"]

LayerChoice = str | Sequence[str] | Callable[[str, nn.Module], bool]

_SILENT = (
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.modules.dropout._DropoutNd,
    nn.Softmax,
    nn.LogSoftmax,
)
_NORMALISATIONS = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.LocalResponseNorm,
    nn.RMSNorm,
)


def check_layers(network: nn.Module, choice: LayerChoice) -> None:
    """Refuse names that no module of the network has, before any data is seen.

    Raises:
        ValueError: Names the unknown layer and the nearest known ones.
    """
    if callable(choice) or choice == "auto":
        return
    if not isinstance(choice, str | Sequence):
        raise TypeError(
            f"layers={choice!r}; expected 'auto', 'input', names of modules or globs, or a "
            "function of name and module"
        )
    names = [name for name, _ in network.named_modules(remove_duplicate=False) if name]
    for pattern in _patterns(choice):
        if not _matching(_parse(pattern)[0], names):
            raise ValueError(_unknown(pattern, names))


def choose_layers(
    network: nn.Module, choice: LayerChoice, x: Tensor, *, keep_last: bool = False
) -> list[str]:
    """Names of the representations, in the order in which they are computed, input first.

    Args:
        network: The network; it runs once on a few rows of ``x``, in evaluation mode.
        choice: ``"auto"``; names and globs; or a function of (name, module) to bool.
        x: A batch of inputs.
        keep_last: ``"auto"`` takes the last stage too: it makes features here, not outputs.

    Raises:
        ValueError: A name matches nothing that ran, or a chosen layer has no representation.
    """
    x = _few(x)
    root = _trace(network, x)
    events = list(_events(root))
    finished = [call for call, begins in events if not begins]
    runs = Counter(id(call.module) for call in finished)

    def label(call: _Call) -> str:
        name = f"./{call.name}" if call.name == INPUT else call.name
        return f"{name}#{call.number}" if runs[id(call.module)] > 1 else name

    if choice == "auto":
        hidden = _auto(root, keep_last)
        names = [INPUT, *(label(call) for call in hidden)]
        if keep_last or root.head is None or not _adds_features(root.head, hidden, x):
            return names
        if hidden and _width(hidden[-1].output_shape) == _width(root.head.input_shape):
            names.pop()  # the head's input is the same stage, further on
        return [*names, label(root.head) + _GOES_IN]
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
            name, number = _parse(pattern)
            matching = set(_matching(name, every_name))
            matches = [
                call
                for call in finished
                if matching & set(aliases[id(call.module)]) and number in ("", str(call.number))
            ]
            if not matches:
                raise ValueError(_unknown(pattern, [label(call) for call in finished]))
            (into if pattern.endswith(_GOES_IN) else ids).update(id(call) for call in matches)
    chosen = [INPUT]
    for call, begins in events:
        if id(call) in (into if begins else ids):
            name = label(call) + (_GOES_IN if begins else "")
            problem = call.input_problem if begins else call.problem
            if problem:
                raise ValueError(f"layer '{name}' cannot be a representation: {problem}")
            chosen.append(name)
    return chosen


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
        "A functional activation such as F.relu has no name: take the module before it"
    )


def _adds_features(head: _Call, hidden: Sequence[_Call], x: Tensor) -> bool:
    """Whether what goes into the head is neither the input nor one of these outputs.

    An image that is flattened before the head holds the same numbers, but the residual reads the
    means over its positions, so it is not the same representation.
    """
    features = head.given
    if features is None or head.input_problem or features.dim() != 2:
        return False
    known = [(x.shape, _sampled(x))]
    known += [
        (call.output_shape, call.made)
        for call in hidden
        if call.output_shape is not None and call.made is not None
    ]
    ours = _sampled(features)
    return not any(
        shape.numel() == features.numel()
        and shape[1:].numel() == _width(shape)
        and made.dtype == ours.dtype
        and torch.equal(made, ours)
        for shape, made in known
    )


def _width(shape: torch.Size | None) -> int | None:
    """How many units there are in a row once positions are pooled."""
    return None if shape is None else shape[2 if len(shape) == 3 else 1]


def _events(call: _Call) -> Iterator[tuple[_Call, bool]]:
    """All runs below ``call`` but itself, each where it begins (``True``) and where it ends."""
    for child in call.calls:
        yield child, True
        yield from _events(child)
        yield child, False


@dataclass
class _Stage:
    """A block or a layer with weights, and the last informative output before the next one."""

    start: _Call
    output: _Call

    @property
    def is_block(self) -> bool:
        return bool(self.start.calls)


def _auto(root: _Call, keep_last: bool) -> list[_Call]:
    """The outputs of the hidden stages; see the head of this file for the rule."""
    calls = _flatten(root)
    stages = _stages(calls)
    # One stage that is itself a network (a wrapper, a backbone below a head): look inside.
    while len(stages) <= 2 and any(stage.is_block for stage in stages):
        calls = [inner for call in calls for inner in (_flatten(call) if call.calls else [call])]
        stages = _stages(calls)
    hidden = stages if keep_last else stages[:-1]
    first_block = next((i for i, stage in enumerate(hidden) if stage.is_block), 0)
    outputs = [stage.output for stage in hidden[first_block:]]
    return [call for call in outputs if not call.problem]


def _flatten(call: _Call) -> list[_Call]:
    """The runs inside ``call``, looking through sequences that hold layers directly."""
    flat: list[_Call] = []
    for child in call.calls:
        sequence = isinstance(child.module, nn.Sequential) and child.calls
        if sequence and any(not grandchild.calls for grandchild in child.calls):
            flat.extend(_flatten(child))
        else:
            flat.append(child)
    return flat


def _stages(calls: Iterable[_Call]) -> list[_Stage]:
    stages: list[_Stage] = []
    for call in calls:
        if call.calls or _has_weights(call.module):
            stages.append(_Stage(call, call))
        elif stages and (_refines(call) or (_pools(call) and not stages[-1].is_block)):
            stages[-1].output = call
    return stages


def _has_weights(module: nn.Module) -> bool:
    refinement = isinstance(module, (*_NORMALISATIONS, nn.PReLU))
    return not refinement and next(module.parameters(), None) is not None


def _pools(call: _Call) -> bool:
    return type(call.module).__module__ == nn.modules.pooling.__name__


def _refines(call: _Call) -> bool:
    """Normalisations and activations, also a user's own: same shape in and out, no weights."""
    if _pools(call) or isinstance(call.module, _SILENT):
        return False
    return call.input_shape is not None and call.input_shape == call.output_shape
