"""Batches that are a tensor, or a dict of tensors which the network takes by keyword."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Batch", "call", "changed", "redrawn", "rows_of", "scrambled", "taken"]

Batch = Tensor | dict[str, Tensor]


def call(network: nn.Module, x: Batch) -> Tensor:
    """The network's logits, whatever it wraps them in."""
    output: Any = network(**x) if isinstance(x, dict) else network(x)
    while not isinstance(output, Tensor):
        output = output.logits if hasattr(output, "logits") else output[0]
    return output


def changed(x: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The batch with its floating-point tensors changed, and all others as they are."""
    if isinstance(x, Tensor):
        return change(x)
    return {name: change(t) if t.is_floating_point() else t for name, t in x.items()}


def rows_of(x: Batch) -> int:
    """How many examples a batch holds."""
    return len(x) if isinstance(x, Tensor) else len(next(iter(x.values())))


def taken(x: Batch, rows: Tensor | slice) -> Batch:
    """Some of the examples of a batch."""
    return x[rows] if isinstance(x, Tensor) else {name: t[rows] for name, t in x.items()}


def scrambled(x: Batch) -> Batch:
    """Every example with its positions in an order of its own.

    An image keeps the channels of each pixel together, a table has columns for positions, and a
    sentence keeps its padding where it is.
    """
    generator = torch.Generator().manual_seed(1)
    if isinstance(x, dict) and "attention_mask" in x:
        hidden = x["attention_mask"] == 0
        keys = torch.rand(hidden.shape, generator=generator).masked_fill(hidden, 2.0)
        # Padding sorts behind every word, so words change places among themselves only.
        return {**x, "input_ids": x["input_ids"].gather(1, keys.argsort(dim=1, stable=True))}

    def shuffle(h: Tensor) -> Tensor:
        # Images and volumes (B, C, ...) have their positions last; sequences and tables are flat.
        flat = h.flatten(2) if h.dim() > 3 else h.flatten(1)[:, None]
        order = torch.rand(len(h), 1, flat.shape[2], generator=generator).argsort(2)
        return flat.gather(2, order.expand_as(flat)).reshape(h.shape)

    return changed(x, shuffle)


def redrawn(x: dict[str, Tensor]) -> Batch:
    """Sentences of the same lengths, with words drawn evenly from those of the batch."""
    generator = torch.Generator().manual_seed(1)
    ids, mask = x["input_ids"], x["attention_mask"]
    words = torch.unique(ids[mask.bool()])
    drawn = words[torch.randint(len(words), ids.shape, generator=generator)]
    return {**x, "input_ids": drawn * mask}
