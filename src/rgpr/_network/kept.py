"""Rows of many batches, of whatever form, kept together and taken apart again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .batches import Batch, first_part

__all__ = ["Form", "Kept", "cat", "form_of", "joined"]


def cat(parts: Sequence[Tensor]) -> Tensor:
    """The rows of several tensors; zeros fill up every axis that is shorter in some of them."""
    if len({part.shape[1:] for part in parts}) <= 1:
        return torch.cat(list(parts))
    sizes = [max(column) for column in zip(*(part.shape[1:] for part in parts), strict=True)]
    whole = parts[0].new_zeros(sum(map(len, parts)), *sizes)
    start = 0
    for part in parts:
        whole[(slice(start, start + len(part)), *map(slice, part.shape[1:]))] = part
        start += len(part)
    return whole


def joined(batches: Sequence[Batch]) -> Batch:
    """Several batches of one form as one."""
    first = batches[0]
    if isinstance(first, Tensor):
        return cat([first_part(x) for x in batches])
    if isinstance(first, Mapping):
        return {name: cat([x[name] for x in batches]) for name in first}  # type: ignore[call-overload, index]
    return tuple(cat(column) for column in zip(*batches, strict=True))


Form = None | list[str] | int


def form_of(x: Batch) -> Form:
    """What, beside its parts, it takes to build the batch again: names, or how many there are."""
    if isinstance(x, Tensor):
        return None
    return list(x) if isinstance(x, Mapping) else len(x)


@dataclass(frozen=True)
class Kept:
    """Rows that were kept of many batches, as columns that a reservoir holds.

    Sequences of batches may differ in length, on any axis. They are filled up to the longest to be
    kept together, and cut to their own sizes before the network sees them again.

    Attributes:
        form: The form of the batches.
        columns: A tensor for each part; unless the batch is one tensor of real numbers, a last one
            ``(N, axes)`` holds the sizes of all parts, one after the other.
    """

    form: Form
    columns: Sequence[Tensor]

    @staticmethod
    def columns_of(x: Batch) -> list[Tensor]:
        """The columns of one batch."""
        if isinstance(x, Tensor) and x.is_floating_point():
            return [x]
        parts = [x] if isinstance(x, Tensor) else list(x.values() if isinstance(x, Mapping) else x)
        # A zero in the place of the rows, so that there is a number even if no part has more axes.
        sizes = torch.tensor([size for part in parts for size in (0, *part.shape[1:])])
        return [*parts, sizes.expand(len(parts[0]), -1).to(parts[0].device)]

    def split(self, size: int) -> tuple[Tensor | slice, list[Batch]]:
        """Batches of at most so many rows, each of one length, and the order to put them back."""
        if len(self.columns) == 1:
            return slice(None), list(torch.split(self.columns[0], size))
        *parts, sizes = self.columns
        distinct, group = torch.unique(sizes, dim=0, return_inverse=True)
        every = [
            (rows, own.split([part.dim() for part in parts]))
            for number, own in enumerate(distinct.cpu())
            for rows in torch.split((group == number).nonzero().flatten(), size)
        ]
        batches = [
            self._batch([_cut(p[rows], own) for p, own in zip(parts, each, strict=True)])
            for rows, each in every
        ]
        return torch.cat([rows for rows, _ in every]).argsort(), batches

    def _batch(self, parts: list[Tensor]) -> Batch:
        if isinstance(self.form, list):
            return dict(zip(self.form, parts, strict=True))
        return parts[0] if self.form is None else tuple(parts)


def _cut(part: Tensor, sizes: Tensor) -> Tensor:
    """The rows without what fills up their other axes."""
    return part[(slice(None), *map(slice, sizes.tolist()[1:]))]
