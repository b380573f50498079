"""What tells the model that data went through from others, and in which way two models differ."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from .._network.processes import active, together
from ..saving.container import kinds, whole

__all__ = ["check_ranks", "check_same", "of_fitted", "of_model"]

# What is said of digests that differ: the digests themselves tell nobody anything.
_DIGESTS = {
    "values": "the network's weights have other values",
    "fit": "the model was fitted on other data or has another posterior",
}


def of_model(model: Any) -> dict[str, Any]:
    """What decides which numbers a network makes of an input, and what they stand for.

    What modules hold beside tensors, such as the slope of an activation, is not known.
    """
    network, output = model.posterior.network, model.posterior.output
    weights = network.state_dict()
    # A buffer that is not saved, such as the mean of a normalisation, may be another one.
    unsaved = {name: t for name, t in network.named_buffers() if name not in weights}
    return {
        "weights": kinds(weights),
        "values": digest({**weights, **unsaved}),
        "modules": {name: _class_of(module) for name, module in network.named_modules() if name},
        "likelihood": model.likelihood,
        "residual": dataclasses.asdict(model.recipe),
        "input": model.input,
        "output": "a function" if callable(output) else output,
    }


def of_fitted(model: Any) -> dict[str, Any]:
    """What decides what a fitted model says of an input.

    What objects of other libraries hold is not known.
    """
    posterior = model.posterior
    learned = {f"posterior.{k}": t for k, t in posterior.own_tensors().items()}
    learned |= {f"layer.{k}": t for k, t in model.residual.coordinates.state_dict().items()}
    learned["keys"] = model._fit_keys
    about = {} if posterior.kind is None else posterior.config()
    return {
        **of_model(model),
        "layers": model.layers,
        # As a file gives it back.
        "posterior": {"class": type(posterior).__name__, **json.loads(json.dumps(about))},
        "fit": digest(learned),
    }


def _class_of(module: Any) -> str:
    """The name of a module's class; ``fully_shard`` puts one of its own before it."""
    names = [kind.__name__ for kind in type(module).__mro__]
    return next(name for name in names if not name.startswith("FSDP"))


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
    different = _differences(theirs, ours)
    if different:
        raise ValueError(
            f"{what} was made for another model: {different}. Use the network, the weights and the "
            "options that it was made with"
        )


def check_ranks(of_rank: Callable[[], Mapping[str, Any]]) -> None:
    """Refuse processes of ``torch.distributed`` that have other models or other options.

    Args:
        of_rank: Gives what must be the same on all ranks.

    Raises:
        ValueError: On all ranks; the message says what differs.
    """
    if not active():
        return
    first, *others = together(of_rank)
    for rank, theirs in enumerate(others, start=1):
        different = _differences(theirs, first)
        if different:
            raise ValueError(
                f"rank {rank} has not what rank 0 has: {different}. All ranks need the same model "
                "and the same options. DistributedDataParallel leaves the statistics of BatchNorm "
                "different; this makes them those of rank 0: for t in network.state_dict()"
                ".values(): torch.distributed.broadcast(t, 0)"
            )


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """In which way two models differ, in words; empty if they do not."""
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
    return "; ".join(differences)
