"""Inputs and targets: what comes out of a loader, split as the network's signature asks for.

A network with ``k`` parameters by position gets the first ``k`` tensors of a batch ``(a, b, y)``,
and the next one is the target. Of a dict it gets the entries that its ``forward`` takes, less those
that are usual names of a target.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .batches import Batch, Taken, mapped, taken_by
from .processes import active
from .targets import numbers

__all__ = ["inputs", "inputs_and_targets", "labelled", "on_device"]

_TARGET_KEYS = ("y", "label", "labels", "target", "targets")
_INPUT_KEYS = ("x", "input", "inputs", "image", "images", "pixel_values", "features", "data")
# A network of which nothing is known is taken to want one tensor.
_ONE = Taken(("x",), frozenset(), ("x",), False, "Tensor")


def inputs(
    loader: Iterable[Any], network: nn.Module | None = None, *, progress: bool, description: str
) -> Iterator[Batch]:
    """The inputs of every batch, from a loader of ``(x, ...)``, ``x`` or dicts.

    Args:
        loader: The loader.
        network: The network that they are for; without one, each batch has one tensor of inputs.
        progress: Show a progress bar where there is a terminal.
        description: Label of the progress bar.

    Raises:
        TypeError: A batch holds no tensor where the input is expected.
        KeyError: A dict has no entry that the network takes.
        ValueError: The loader has no batch at all, or a batch has too few tensors.
    """
    for x, _ in _pairs(loader, network, progress=progress, description=description):
        yield x


def _batches(loader: Iterable[Any], *, progress: bool, description: str) -> Iterator[Any]:
    empty = True
    # `disable=None` hides the bar where nobody watches: no terminal, no bar.
    for batch in tqdm(loader, desc=description, leave=False, disable=None if progress else True):
        empty = False
        yield batch
    if empty and not active():  # one of several shards may be empty
        raise ValueError(
            "the loader gave no batch; is it empty, or an iterator that was used up before?"
        )


def labelled(
    loader: Iterable[Any], network: nn.Module | None = None, *, progress: bool, description: str
) -> Iterator[tuple[Batch, Tensor]]:
    """Inputs and targets of every batch, from a loader of ``(x, y)`` or dicts; see :func:`inputs`.

    Raises:
        TypeError: A batch has no targets.
        ValueError: The loader has no batch at all.
    """
    pairs = inputs_and_targets(loader, network, progress=progress, description=description)
    for x, target in pairs:
        if target is None:
            raise TypeError(
                "a batch has no targets, and they are needed here; yield (x, y), or dicts with "
                "the target under one of: " + ", ".join(_TARGET_KEYS)
            )
        yield x, target


def inputs_and_targets(
    loader: Iterable[Any], network: nn.Module | None = None, *, progress: bool, description: str
) -> Iterator[tuple[Batch, Tensor | None]]:
    """Inputs of every batch, and its targets where it has any; see :func:`inputs`."""
    for x, target in _pairs(loader, network, progress=progress, description=description):
        if target is not None and not isinstance(target, Tensor):
            target = numbers(target)
        yield x, target


def _pairs(
    loader: Iterable[Any], network: nn.Module | None, *, progress: bool, description: str
) -> Iterator[tuple[Batch, Any]]:
    """Inputs of every batch, and whatever stands where its target is expected."""
    while isinstance(network, nn.Sequential) and len(network):
        network = network[0]  # a sequence takes whatever its first module takes
    taken = _ONE if network is None else taken_by(type(network))
    for batch in _batches(loader, progress=progress, description=description):
        yield _split(batch, taken)


def _split(batch: Any, taken: Taken) -> tuple[Batch, Any]:
    """The inputs of a batch, and what stands where its target is expected."""
    count = max(1, len(taken.required))
    if isinstance(batch, list | tuple) and count == 1 and batch and isinstance(batch[0], Tensor):
        return batch[0], batch[1] if len(batch) > 1 else None
    if isinstance(batch, Mapping):
        target = next((batch[key] for key in _TARGET_KEYS if key in batch), None)
        return _entries(batch, taken), target
    if not isinstance(batch, list | tuple) or len(batch) == 0:
        return _tensor(batch), None
    first = batch[0]
    if isinstance(first, Mapping | list | tuple):  # the inputs have a bracket of their own
        x: Batch = _entries(first, taken) if isinstance(first, Mapping) else _several(first)
        return x, batch[1] if len(batch) > 1 else None
    if count == 1:
        return _tensor(first), batch[1] if len(batch) > 1 else None
    if len(batch) < count:
        raise ValueError(
            f"a batch has {len(batch)} tensors and the network takes {count}, "
            f"({', '.join(taken.required)}); yield them in this order, and the target after them"
        )
    return _several(batch[:count]), batch[count] if len(batch) > count else None


def _entries(batch: Mapping[str, Any], taken: Taken) -> Batch:
    """The entries of a dict that the network takes: a single one as a tensor."""
    others = {key: batch[key] for key in batch if key not in _TARGET_KEYS}
    chosen = {key: part for key, part in others.items() if key in taken.names}
    if not chosen and taken.any_name and not taken.required:
        chosen = others
    if chosen and taken.by_keyword(list(chosen)):
        if list(chosen) == list(taken.positional[:1]):
            return _tensor(*chosen.values())
        return {key: _tensor(part) for key, part in chosen.items()}
    usual = next((key for key in _INPUT_KEYS if key in others), None)
    wants_dict = any(word in taken.annotation.lower() for word in ("mapping", "dict", "encoding"))
    if len(taken.required) == 1 and usual is not None and not wants_dict:
        return _tensor(others[usual])
    if len(taken.required) == 1 and "Tensor" not in taken.annotation and others:
        return {key: part for key, part in others.items() if isinstance(part, Tensor)}
    raise KeyError(
        f"a batch has the keys {sorted(map(str, batch))}, and the network takes ({taken}): no "
        "entry fits. Name the entries like these parameters, yield (x, y) pairs instead, or call "
        f"the one input of the network by a usual name ({', '.join(_INPUT_KEYS)})"
    )


def _several(parts: Any) -> tuple[Tensor, ...]:
    return tuple(_tensor(part) for part in parts)


def _tensor(part: Any) -> Tensor:
    if not isinstance(part, Tensor):
        raise TypeError(
            f"a batch gives {type(part).__name__} where a tensor of inputs was expected; "
            "loaders yield (x, y), x alone, as many tensors as the network takes, or a dict with "
            "the inputs named like its parameters or one of: " + ", ".join(_INPUT_KEYS)
        )
    return part


def on_device(x: Batch, device: torch.device | None) -> Any:
    """The batch on a network's device, if that has one.

    What goes to a GPU is not waited for, or it would have to finish all its work first. So pinned
    memory, once handed out, must not be written to again; torch's loaders never do.
    """
    if device is None:
        return x
    if not isinstance(x, Tensor):
        return mapped(x, lambda part: on_device(part, device))
    return x.to(device, non_blocking=device.type == "cuda" and not x.is_cuda)
