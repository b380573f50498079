"""Inputs: what comes out of a loader, and whether a network can take it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from .processes import active

__all__ = ["inputs", "inputs_and_targets", "labelled", "on_device"]

_TARGET_KEYS = ("y", "label", "labels", "target", "targets")
_INPUT_KEYS = ("x", "input", "inputs", "image", "images", "pixel_values", "features", "data")


def inputs(loader: Iterable[Any], *, progress: bool, description: str) -> Iterator[Tensor]:
    """The input tensor of every batch, from a loader of ``(x, ...)``, ``x`` or dicts.

    Raises:
        TypeError: A batch holds no tensor where the input is expected.
        KeyError: A dict has none of the usual names of an input.
        ValueError: The loader has no batch at all.
    """
    for batch in _batches(loader, progress=progress, description=description):
        yield _input_of(batch)


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
    loader: Iterable[Any], *, progress: bool, description: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of every batch, from a loader of ``(x, y)`` or dicts.

    Raises:
        TypeError: A batch has no targets.
        ValueError: The loader has no batch at all.
    """
    pairs = inputs_and_targets(loader, progress=progress, description=description)
    for x, target in pairs:
        if target is None:
            raise TypeError(
                "a batch has no targets, and they are needed here; yield (x, y), or dicts with "
                "the target under one of: " + ", ".join(_TARGET_KEYS)
            )
        yield x, target


def inputs_and_targets(
    loader: Iterable[Any], *, progress: bool, description: str
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Inputs of every batch, and its targets where it has any."""
    for batch in _batches(loader, progress=progress, description=description):
        target: Any = None
        if isinstance(batch, Mapping):
            target = next((batch[key] for key in _TARGET_KEYS if key in batch), None)
        elif isinstance(batch, list | tuple) and len(batch) > 1:
            target = batch[1]
        yield _input_of(batch), target if isinstance(target, Tensor) else None


def _input_of(batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        for key in _INPUT_KEYS:
            if key in batch:
                batch = batch[key]
                break
        else:
            raise KeyError(
                f"a batch has the keys {sorted(map(str, batch))}, and none of them is a usual "
                f"name of an input ({', '.join(_INPUT_KEYS)}); yield (x, y) pairs instead"
            )
    elif isinstance(batch, list | tuple) and len(batch) > 0:
        batch = batch[0]
    if not isinstance(batch, Tensor):
        raise TypeError(
            f"a batch gives {type(batch).__name__} where a tensor of inputs was expected; "
            "loaders yield (x, y), x alone, or a dict with the input under one of: "
            + ", ".join(_INPUT_KEYS)
        )
    return batch


def on_device(tensor: Tensor, device: torch.device | None) -> Tensor:
    """The tensor on a network's device, if that has one.

    What goes to a GPU is not waited for, or it would have to finish all its work first. So pinned
    memory, once handed out, must not be written to again; torch's loaders never do.
    """
    if device is None:
        return tensor
    return tensor.to(device, non_blocking=device.type == "cuda" and not tensor.is_cuda)
