"""``layers="auto"``, which :class:`rgpr.RGPR` uses by default: three to twelve representations.

A stage is a block (a submodule made of submodules, like the ``layer1`` .. ``layer4`` of a ResNet)
together with the activation that follows it, or a layer with weights together with the
normalisation, activation and pooling that follow it. A normalisation after a block belongs to what
comes next: it takes away how large the block's output is, which is a sign of strangeness. The last
stage makes the outputs and is left out, and so is a stem before the first of several blocks. Plain
``nn.Sequential`` containers are looked through. A block that holds more than half of all layers is
opened, again and again, so that stages are spread over the depth whatever the network is wrapped
in, and so is one whose output cannot be read; of more stages than can be read, some are taken, as
evenly as their depths allow. Where the activation is a function call, the representation is what
goes into it: hooks see modules only.

What goes into the last layer, the head, is always read: all that the network knows about an input
passes there. It is the last stage's output itself, or takes its place under the name ``"fc:input"``
(for a head called ``fc``) where something lies between the two, such as the pooling of a ResNet, a
functional activation, or the choice of a class token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from ..representation import INPUT
from ..trace import Call, Side, Trace
from .base import register_layer_picker

__all__ = ["auto"]

# Representations, the input among them.
_FEWEST, _MOST = 3, 12
_SILENT = (
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.modules.dropout._DropoutNd,
    nn.Softmax,
    nn.LogSoftmax,
)


def auto(seen: Trace, keep_last: bool) -> list[str]:
    """Names of the representations, the input first."""
    hidden = _hidden(seen, keep_last)
    head = None if keep_last else _head(seen)
    if head is None or not _adds_features(head, hidden, seen.root.given):
        return [INPUT, *map(seen.label, _spread(seen, hidden, _MOST - 1))]
    if hidden and hidden[-1].made.width == head.given.width:
        hidden.pop()  # the head's input is the same stage, further on
    names = [seen.label(call) for call in _spread(seen, hidden, _MOST - 2)]
    return [INPUT, *names, seen.label(head, goes_in=True)]


def _head(seen: Trace) -> Call | None:
    """The last layer with weights, which makes the outputs."""
    layers = [call for call in seen.every if call.layers and not call.calls]
    return seen.head or (layers[-1] if layers else None)


def _adds_features(head: Call, hidden: Iterable[Call], x: Side) -> bool:
    """Whether what goes into the head is neither the input nor one of these outputs.

    Vectors that are pooled of images with one pixel hold the same numbers as these, but are other
    memory: the certificate needs the vectors themselves.
    """
    given = head.given
    known = [side for side in (x, *(c.made for c in hidden)) if len(side.shape) == len(given.shape)]
    return not given.problem and not any(given.is_same(side) for side in known)


def _spread(seen: Trace, stages: list[Call], most: int) -> list[Call]:
    """So many of the stages at most, the last one among them, evenly over the depth."""
    if len(stages) <= most:
        return stages
    depths, depth = {}, 0
    ends = {id(call) for call in stages}
    for call in _finished(seen.root):
        depth += 0 if call.calls else call.layers
        if id(call) in ends:
            depths[id(call)] = depth
    last = depths[id(stages[-1])]
    wanted = [last * (number + 1) / most for number in range(most)]
    taken = {next(i for i, s in enumerate(stages) if depths[id(s)] >= depth) for depth in wanted}
    return [stages[index] for index in sorted(taken)]


def _finished(call: Call) -> Iterable[Call]:
    """All runs, in the order in which they ended."""
    for inner in call.calls:
        yield from _finished(inner)
    yield call


@dataclass
class _Stage:
    """A block or a layer with weights, and the last informative output before the next one."""

    start: Call
    output: Call

    @property
    def is_block(self) -> bool:
        return bool(self.start.calls)


def _hidden(seen: Trace, keep_last: bool) -> list[Call]:
    """The outputs of the hidden stages; see the head of this file for the rule."""
    calls, opened = _flatten(seen.root), set[int]()
    while True:
        stages = _stages(calls, opened)
        blocks = [c for c in calls if c.calls and c.layers and id(c) not in opened]
        # One whose output cannot be read is opened whatever its size.
        largest = max(blocks, key=lambda c: (bool(c.made.problem), c.layers), default=None)
        if largest is None:
            break
        small = len(stages) >= _FEWEST + keep_last and 2 * largest.layers <= seen.root.layers
        if small and not largest.made.problem:
            break
        index = calls.index(largest)
        # The block itself stays, for what it adds at its end.
        calls[index:index] = _flatten(largest)
        opened.add(id(largest))
    hidden = stages if keep_last else stages[: _index_of(seen.head, stages)]
    first_block = next((i for i, stage in enumerate(hidden) if stage.is_block), 0)
    if len(hidden) - first_block < _FEWEST - 1:
        first_block = 0  # too little would be left without the stem
    return [stage.output for stage in hidden[first_block:] if not stage.output.made.problem]


def _index_of(head: Call | None, stages: list[_Stage]) -> int:
    """Which stage makes the outputs: what runs behind it leads to other ones."""
    holds = [head is not None and head in _finished(stage.start) for stage in stages]
    return holds.index(True) if True in holds else -1


def _flatten(call: Call) -> list[Call]:
    """The runs inside ``call``, looking through sequences that hold layers directly."""
    flat: list[Call] = []
    for child in call.calls:
        sequence = isinstance(child.module, nn.Sequential) and child.calls
        if sequence and any(not grandchild.calls for grandchild in child.calls):
            flat.extend(_flatten(child))
        else:
            flat.append(child)
    return flat


def _stages(calls: Iterable[Call], opened: set[int]) -> list[_Stage]:
    stages: list[_Stage] = []
    for call in calls:
        if id(call) in opened:
            if stages and not call.made.problem and call.made.shape == stages[-1].output.made.shape:
                same = call.made.is_same(stages[-1].output.made)
                stages[-1].output = stages[-1].output if same else call
        elif call.layers:
            stages.append(_Stage(call, call))
        elif stages and (_activates(call) if stages[-1].is_block else _refines(call)):
            stages[-1].output = call
    return stages


def _refines(call: Call) -> bool:
    """Poolings, and what has the same shape in and out: normalisations and activations."""
    return _pools(call) or _keeps_shape(call)


def _activates(call: Call) -> bool:
    """Activations, also a user's own: the same shape in and out, and nothing that was learnt."""
    plain = isinstance(call.module, nn.PReLU) or next(call.module.parameters(), None) is None
    return plain and _keeps_shape(call) and not _pools(call)


def _pools(call: Call) -> bool:
    return type(call.module).__module__ == nn.modules.pooling.__name__


def _keeps_shape(call: Call) -> bool:
    if isinstance(call.module, _SILENT):
        return False
    return len(call.made.shape) > 0 and call.given.shape == call.made.shape


register_layer_picker("auto", auto)
