"""Prototypes of several representations in one piece of memory, for one kernel to read.

A network has many layers, and most are so small that launching kernels for each takes longer than
their work. On a GPU their rows wait for the end of the pass and are taken together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .fused import packed_mean_cubes

__all__ = ["Packed", "Parts"]

# More units or centers than these are better off with products of their own.
_WIDEST = 512
_MOST_CENTERS = 64


class Parts(NamedTuple):
    """Tensors of one :class:`rgpr.coordinates.Prototypes`."""

    onto: Tensor
    centers: Tensor
    halves: Tensor
    offset: Tensor | None

    @property
    def fit(self) -> bool:
        """Whether the kernel can take them, and is better at it."""
        (k, n), dense = self.centers.shape, self.onto.shape[1] > len(self.centers)
        float32 = self.onto.dtype == torch.float32
        return dense and float32 and n <= _WIDEST and k <= _MOST_CENTERS


class Packed:
    """Copies of all parts, and a table of where they are.

    Args:
        parts: By the index of the representation; at least one.

    Attributes:
        layers: The parts, in the order in which they are packed.
        arguments: What :func:`rgpr.fused.packed_mean_cubes` takes beside the rows. ``numbers`` are
            of each layer a matrix of products with the centers beside axes, half of each center's
            squared length, the centers and offsets. ``table`` has a row for every block of
            coordinates that one program takes: the layer, where its rows begin, units, centers,
            the block's first coordinate, and where in ``numbers`` matrix and halves begin.
            ``spans`` tell where each layer's blocks begin in the table, and where the last ends.
            Then as many classes as no layer exceeds, and whether any has offsets and all have a
            multiple of 16 units.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, parts: Mapping[int, Parts]) -> None:
        from .triton_kernels import COLUMNS, power_of_two

        # The widest first: their programs take longest.
        by_width = sorted(parts.items(), key=lambda item: -item[1].centers.shape[1])
        self.layers = parts = dict(by_width)
        self._versions = _versions(parts)
        most = max(len(layer.centers) for layer in parts.values())
        classes = max(16, power_of_two(most))
        table, spans, place, end = [], [0], 0, 0
        pieces: list[Tensor] = []

        def add(*tensors: Tensor) -> int:
            nonlocal end
            begin, size = end, sum(tensor.numel() for tensor in tensors)
            padding = tensors[0].new_zeros(-size % 16)  # loads want to be aligned
            pieces.extend([*(tensor.flatten() for tensor in tensors), padding])
            end += size + len(padding)
            return begin

        for number, (onto, centers, halves, offset) in enumerate(parts.values()):
            k, n = centers.shape
            wide = F.pad(onto[:, n:], (0, classes - k))
            offset = onto.new_zeros(n) if offset is None else offset
            matrix = torch.cat([wide, onto[:, :n]], 1)
            begins = add(matrix), add(F.pad(halves, (0, classes - k)), centers, offset)
            table += [[number, place, n, k, first, *begins] for first in range(0, n, COLUMNS)]
            spans.append(len(table))
            place += n
        numbers = torch.cat(pieces)
        self.arguments = (
            numbers,
            torch.tensor(table, device=numbers.device),
            torch.tensor(spans, device=numbers.device),
            classes,
            any(layer.offset is not None for layer in parts.values()),
            all(layer.centers.shape[1] % 16 == 0 for layer in parts.values()),
        )
        if numbers.is_cuda:  # other threads may read them in other streams
            torch.cuda.current_stream(numbers.device).synchronize()

    def is_of(self, parts: Mapping[int, Parts]) -> bool:
        """Whether these very tensors were packed, and did not change since."""
        if self.layers.keys() != parts.keys():
            return False
        parts = {index: parts[index] for index in self.layers}
        pairs = zip(self.layers.values(), parts.values(), strict=True)
        same = all(a is b for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
        return same and self._versions == _versions(parts)

    def unit_variances(self, rows: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """``u`` of each layer, ``(B,)`` in float64, from its rows ``(B, N)`` in float32."""
        side_by_side = torch.cat([rows[index] for index in self.layers], 1)
        u = packed_mean_cubes(side_by_side, *self.arguments)
        return dict(zip(self.layers, u.unbind(1), strict=True))


def _versions(parts: Mapping[int, Parts]) -> list[int]:
    """Numbers that grow with every change in place, where torch counts them."""
    tensors = [t for part in parts.values() for t in part if t is not None]
    return [tensor._version for tensor in tensors if not tensor.is_inference()]
