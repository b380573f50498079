"""How many channels the modules of a network say they have, found without the library.

A layer of torch declares its channels in an attribute. A block, an activation or a pooling does
not; its channels are those that the last declaring layer before its end makes, or those that the
first declaring layer after it takes. Where the two differ, as after a concatenation, either will
do: what must not happen is that positions are taken for channels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rgpr._network.guards import evaluating
from rgpr._network.representation import parse_layer

from .batches import Batch, call

__all__ = ["Representation", "representations"]

_MADE = ("out_channels", "out_features", "num_features", "num_channels", "embedding_dim", "nf")
_TAKEN = ("in_channels", "in_features", "num_features", "num_channels", "input_size", "nx")


@dataclass(frozen=True)
class Representation:
    """A representation that the residual reads, as the network itself describes it.

    Attributes:
        name: The layer's name, with the number of its run and whether its input is meant.
        kind: The class of its module.
        shape: The shape of one example's representation.
        declared: Channel counts that the network's layers declare for it.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    declared: tuple[int, ...]


def representations(network: nn.Module, x: Batch, layers: Sequence[str]) -> list[Representation]:
    """What the network says about these layers; it runs once."""
    events = _events(network, x)
    return [_described(network, events, layer) for layer in layers]


@dataclass(frozen=True)
class _Event:
    """A module begins or ends its run, with the shape of what it takes or makes."""

    module: nn.Module
    run: int
    begins: bool
    shape: tuple[int, ...]


def _events(network: nn.Module, x: Batch) -> list[_Event]:
    events: list[_Event] = []
    runs: Counter[tuple[nn.Module, bool]] = Counter()

    def note(module: nn.Module, value: Any, begins: bool) -> None:
        while isinstance(value, tuple | list) and value:
            value = value[0]
        if isinstance(value, dict):  # what Hugging Face returns
            value = next(iter(value.values()))
        shape = tuple(value.shape[1:]) if isinstance(value, Tensor) else ()
        events.append(_Event(module, runs[module, begins], begins, shape))
        runs[module, begins] += 1

    handles = []
    for module in network.modules():
        handles += [
            module.register_forward_pre_hook(lambda m, args: note(m, args, True)),
            module.register_forward_hook(lambda m, _, out: note(m, out, False)),
        ]
    try:
        with torch.no_grad(), evaluating(network) as modes, modes:
            call(network, x)
    finally:
        for handle in handles:
            handle.remove()
    return events


def _described(network: nn.Module, events: list[_Event], layer: str) -> Representation:
    name, number, goes_in = parse_layer(layer)
    module = network.get_submodule(name)
    place, event = next(
        (place, event)
        for place, event in enumerate(events)
        if (event.module, event.run, event.begins) == (module, int(number or 0), goes_in)
    )
    own = _declared(module, _TAKEN if goes_in else _MADE)
    if own is not None:
        return Representation(layer, type(module).__name__, event.shape, (own,))
    made = (_declared(e.module, _MADE) for e in reversed(events[:place]) if not e.begins)
    taken = (_declared(e.module, _TAKEN) for e in events[place + 1 :] if e.begins)
    found = (next((n for n in numbers if n is not None), None) for numbers in (made, taken))
    declared = tuple(sorted({number for number in found if number is not None}))
    return Representation(layer, type(module).__name__, event.shape, declared)


def _declared(module: nn.Module, names: Sequence[str]) -> int | None:
    """The channels that a layer without submodules says it makes or takes."""
    if isinstance(module, nn.RNNBase) and names is _MADE:
        return (module.proj_size or module.hidden_size) * (1 + module.bidirectional)
    if isinstance(module, nn.MultiheadAttention):
        return int(module.embed_dim)
    if next(module.children(), None) is not None:
        return None
    shape = getattr(module, "normalized_shape", None)
    if shape is not None:
        return int(shape[-1])
    found = (getattr(module, name, None) for name in names)
    return next((number for number in found if isinstance(number, int)), None)
