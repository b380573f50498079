"""What tells the model that data went through from others, and in which way two models differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from ..saving.container import kinds, whole

__all__ = ["check_same", "digest", "of_model"]

# What is said of digests that differ: the digests themselves tell nobody anything.
_DIGESTS = {
    "values": "the network's weights have other values",
    "fit": "the model was fitted on other data or has another posterior",
}


def of_model(model: Any) -> dict[str, Any]:
    """What decides which numbers a network makes of an input, and what they stand for."""
    weights = model.posterior.network.state_dict()
    output = model.posterior.output
    return {
        "weights": kinds(weights),
        "values": digest(weights),
        "likelihood": model.likelihood,
        "residual": dataclasses.asdict(model.recipe),
        "input": model.input,
        "output": "a function" if callable(output) else output,
    }


def digest(tensors: Mapping[str, Any]) -> str:
    """A number that changes with any bit of any tensor.

    All processes of a sharded network must call it, since it gathers the weights.
    """
    found = sha256()
    for _, value in sorted(tensors.items()):
        for tensor in _within(value):
            values = whole(tensor)
            values = values.dequantize() if values.is_quantized else values
            found.update(values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _within(value: Any) -> Iterator[Tensor]:
    """The tensors in an entry of a state: quantised modules pack weight and bias into a tuple."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _within(each)


def check_same(what: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse a state that was made for another model.

    Args:
        what: The state, in words.
        theirs: What tells its model from others.
        ours: Likewise of the model at hand.

    Raises:
        ValueError: The message says what differs.
    """
    differences: list[str] = []
    for name in ours:
        before, now = theirs[name], ours[name]
        if before == now:
            continue
        if name in _DIGESTS:
            differences.append(_DIGESTS[name])
        elif isinstance(before, Mapping) and isinstance(now, Mapping):
            every = [key for key in {**before, **now} if before.get(key) != now.get(key)]
            differences += [f"'{k}' was {before.get(k)} and is {now.get(k)}" for k in every[:3]]
            differences += [f"{len(every) - 3} more of its {name}"] if len(every) > 3 else []
        else:
            differences.append(f"{name} was {before!r} and is {now!r}")
    if differences:
        raise ValueError(
            f"{what} was made for another model: {'; '.join(differences)}. Use the network, the "
            "weights and the options that it was made with"
        )
