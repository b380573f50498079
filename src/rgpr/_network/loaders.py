"""Inputs and targets: what comes out of a loader, split as the network's signature asks for.

A network with ``k`` required parameters gets the first ``k`` tensors of a batch ``(a, b, y)``, and
the next one is the target. Of a dict it gets the entries that its ``forward`` takes, less those
that are usual names of a target, unless it requires them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._progress import bar
from .batches import INPUT_KEYS, Batch, Taken, mapped, refuse_packed, taken_of
from .processes import active
from .targets import numbers

__all__ = ["inputs", "inputs_and_targets", "labelled", "on_device"]

_TARGET_KEYS = ("y", "label", "labels", "target", "targets")


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
    taken = taken_of(network)
    for batch in _batches(loader, progress=progress, description=description):
        yield _split(batch, taken)[0]


def _batches(loader: Iterable[Any], *, progress: bool, description: str) -> Iterator[Any]:
    empty = True
    for batch in bar(loader, description, progress):
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
    taken = taken_of(network)
    for batch in _batches(loader, progress=progress, description=description):
        x, target = _split(batch, taken)
        if target is not None and not isinstance(target, Tensor):
            target = numbers(target)
        yield x, target


def _split(batch: Any, taken: Taken) -> tuple[Batch, Any]:
    """The inputs of a batch, and what stands where its target is expected."""
    count = max(1, len(taken.required))
    # What loaders mostly yield: one tensor of inputs, alone or with a target.
    pair: Any = batch if type(batch) in (tuple, list) else (batch,)
    if count == 1 and 0 < len(pair) < 3 and isinstance(pair[0], Tensor):
        return pair[0], pair[1] if len(pair) == 2 else None
    refuse_packed(batch)
    if isinstance(batch, Mapping):
        names = [key for key in _TARGET_KEYS if key in batch and key not in taken.required]
        return _entries(batch, taken), batch[names[0]] if names else None
    parts = list(batch) if isinstance(batch, list | tuple) and len(batch) else [batch]
    first, target = parts[0], parts[1] if len(parts) > 1 else None
    if isinstance(first, Mapping):  # the inputs have a bracket of their own
        return _entries(first, taken), target
    if isinstance(first, list | tuple) and first:
        refuse_packed(first)
        return _bracket(first, taken), target
    if len(parts) < count:
        raise ValueError(
            f"a batch has {_tensors(len(parts))} and the network takes {count}, "
            f"({', '.join(taken.required)}); yield them in this order, and the target after them"
        )
    _check_count(parts, count, taken)
    if count == 1:
        return _tensor(first), target
    x = _several(parts[:count])
    if len(parts) == count and x[-1].dim() == 1 and not x[-1].is_floating_point():
        warnings.warn(
            f"a batch has {_tensors(count)} and forward takes ({taken}), so the last, whole "
            f"numbers of shape {tuple(x[-1].shape)}, goes in as '{taken.required[-1]}' and there "
            "are no targets. If these are the targets, yield them after all inputs; if not, yield "
            f"(({', '.join(taken.required)}), None), which is not asked about",
            stacklevel=2,
        )
    return x, parts[count] if len(parts) > count else None


def _bracket(parts: Any, taken: Taken) -> Batch:
    """The inputs of a batch ``((a, b), y)``."""
    x = _several(parts)
    if not taken.by_position(len(x)):
        raise ValueError(
            f"the inputs of a batch are {_tensors(len(x))}, and forward takes ({taken}): give as "
            "many as it takes, in this order. If it takes a list of tensors as one argument, let "
            "it take any number of them instead: forward(self, *tensors)"
        )
    return x


def _check_count(parts: list[Any], count: int, taken: Taken) -> None:
    """Refuse a batch of which it is open where the inputs end and the target begins.

    What the network can do without may be among the tensors, ``(x, lengths, y)``, or not.
    """
    given = [part for part in parts if isinstance(part, Tensor)]
    open_ = [name for name in taken.optional if name not in _TARGET_KEYS]
    if len(given) > count + 1 and (open_ or taken.any_number):
        first = ", ".join([*taken.required, *open_][: max(2, count)] or ["a", "b"])
        raise ValueError(
            f"a batch has {_tensors(len(given))} and forward takes ({taken}), so which of them is "
            f"the target? Yield (({first}), y) with all inputs in a bracket of their own, a dict "
            "with the names of the parameters, or no more than the required inputs and y"
        )


def _tensors(count: int) -> str:
    return f"{count} tensor{'s' if count != 1 else ''}"


def _entries(batch: Mapping[str, Any], taken: Taken) -> Batch:
    """The entries of a dict that the network takes: a single one as a tensor."""
    others = {k: batch[k] for k in batch if k not in _TARGET_KEYS or k in taken.required}
    chosen = {key: part for key, part in others.items() if key in taken.names}
    if not chosen and taken.any_name and not taken.required:
        chosen = others
    if chosen and taken.by_keyword(list(chosen)):
        if list(chosen) == list(taken.positional[:1]):
            return _tensor(*chosen.values())
        return {key: _tensor(part) for key, part in taken.in_order(chosen).items()}
    whole = taken.one_argument(others) if len(taken.required) == 1 else None
    if isinstance(whole, Mapping):
        return {k: part for k, part in taken.in_order(whole).items() if isinstance(part, Tensor)}
    if whole is not None:
        return _tensor(whole)
    raise KeyError(
        f"a batch has the keys {sorted(map(str, batch))}, and the network takes ({taken}): no "
        "entry fits. Name the entries like these parameters, yield (x, y) pairs instead, or call "
        f"the one input of the network by a usual name ({', '.join(INPUT_KEYS)})"
    )


def _several(parts: Any) -> tuple[Tensor, ...]:
    return tuple(_tensor(part) for part in parts)


def _tensor(part: Any) -> Tensor:
    refuse_packed(part)
    if not isinstance(part, Tensor):
        raise TypeError(
            f"a batch gives {type(part).__name__} where a tensor of inputs was expected; "
            "loaders yield (x, y), x alone, as many tensors as the network takes, or a dict with "
            "the inputs named like its parameters or one of: " + ", ".join(INPUT_KEYS)
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
