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

__all__ = ["check_ranks", "check_same", "of_answers", "of_choice", "of_fitted", "of_model"]

# What is said of digests that differ: the digests themselves tell nobody anything.
_DIGESTS = {
    "values": "the network's weights have other values",
    "fit": "the model was fitted on other data or has another posterior",
}
# What states of earlier versions do not say.
_LATER = ("modules", "posterior")
# Why ranks of torch have other weights although they trained together, and what to do.
_BROADCAST = (
    ". DistributedDataParallel leaves the statistics of BatchNorm different; this makes them those "
    "of rank 0: for t in network.state_dict().values(): torch.distributed.broadcast(t, 0)"
)


def of_model(model: Any) -> dict[str, Any]:
    """What decides which numbers a network makes of an input, and what they stand for.

    What modules hold beside their weights is not known, such as the slope of an activation or a
    buffer that is not saved: some networks keep there what they computed last.
    """
    network, output = model.posterior.network, model.posterior.output
    weights = network.state_dict()
    return {
        "weights": kinds(weights),
        "values": digest(weights),
        "modules": {n or "the network": _class_of(m) for n, m in network.named_modules()},
        "likelihood": model.likelihood,
        "residual": dataclasses.asdict(model.recipe),
        "input": model.input,
        "output": "a function" if callable(output) else output,
    }


def of_fitted(model: Any) -> dict[str, Any]:
    """What decides what a fitted model says of an input.

    What objects of other libraries hold is not known.
    """
    learned = {f"posterior.{k}": t for k, t in model.posterior.own_tensors().items()}
    learned |= {f"layer.{k}": t for k, t in model.residual.coordinates.state_dict().items()}
    learned["keys"] = model._fit_keys
    return {**of_model(model), **_about(model), "fit": digest(learned)}


def of_choice(model: Any, **options: Any) -> dict[str, Any]:
    """What a fit depends on beside the data."""
    choice = model._choice
    layers = "a function" if callable(choice) else choice
    layers = layers if isinstance(layers, str | Mapping) else list(layers)
    return {**of_model(model), "layers": str(layers), **options}


def of_answers(model: Any, **options: Any) -> dict[str, Any]:
    """What a fitted model's answers depend on, up to rounding, which may differ between ranks."""
    scales = {"sigma2": model.sigma2.tolist(), "temperature": [float(model.temperature)]}
    rounded = {name: [f"{each:.3g}" for each in scale] for name, scale in scales.items()}
    return {**of_model(model), **_about(model), **rounded, **options}


def _about(model: Any) -> dict[str, Any]:
    posterior = model.posterior
    config = {} if posterior.kind is None else posterior.config()
    # As a file gives it back.
    config = json.loads(json.dumps(config, default=str))
    about = {"class": type(posterior).__name__, "config": config}
    return {"layers": model.layers, "posterior": about}


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
    ours = {name: each for name, each in ours.items() if name in theirs or name not in _LATER}
    different = _differences(theirs, ours, "'{}' was {} and is {}", "{} was {!r} and is {!r}")
    if different:
        raise ValueError(
            f"{what} was made for another model: {'; '.join(different)}. Use the network, the "
            "weights and the options that it was made with"
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
        words = f"is {{}} on rank {rank} and {{}} on rank 0"
        different = _differences(theirs, first, f"'{{}}' {words}", f"{{}} {words}")
        if different:
            remedy = _BROADCAST if theirs["values"] != first["values"] else ""
            raise ValueError(
                "all ranks need the same model and the same options: "
                f"{'; '.join(different)}{remedy}"
            )


def _differences(
    theirs: Mapping[str, Any], ours: Mapping[str, Any], of_part: str, of_whole: str
) -> list[str]:
    """In which way two models differ.

    Args:
        theirs: What tells one from others.
        ours: Likewise of the other.
        of_part: A sentence on one entry of a mapping, for its name, theirs and ours.
        of_whole: Likewise on what is no mapping.
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
            differences += [of_part.format(k, before.get(k), now.get(k)) for k in every[:3]]
            differences += [f"{len(every) - 3} more of its {name}"] if len(every) > 3 else []
        else:
            differences.append(of_whole.format(name, before, now))
    return differences
