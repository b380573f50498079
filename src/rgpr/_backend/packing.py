"""Matrices as kernels on tensor cores read them: in two parts, block by block.

A network has many layers, and most are so small that launching kernels for each takes longer than
their work. On a GPU their rows wait for the end of the pass and are taken together: here the
prototypes of several representations lie in one piece of memory, for one kernel to read.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .arithmetic import in_graph, kernels_take, packed_cubes
from .buffers import StableBuffers

__all__ = [
    "COLUMNS",
    "STEP",
    "Originals",
    "Packed",
    "Packing",
    "Parts",
    "in_blocks",
    "originals_of",
    "power_of_two",
]

# A program takes so many coordinates, in steps of so many units.
COLUMNS, STEP = 32, 32
# More units or classes than these are better off with products of their own.
_WIDEST = 512
_MOST_CLASSES = 64


Originals = Mapping[Hashable, Tensor]


class Parts(NamedTuple):
    """Tensors of one :class:`rgpr.residual.prototypes.Prototypes`."""

    origin: Tensor
    onto: Tensor
    centers: Tensor
    halves: Tensor
    offset: Tensor | None

    @property
    def fit(self) -> bool:
        """Whether the kernel can take them, and is better at it."""
        k, n = self.centers.shape
        small = n <= _WIDEST and k <= _MOST_CLASSES
        return small and self.onto.shape[1] > k and self.onto.dtype == torch.float32


class Packed:
    """Copies of all parts, and a table of where they are.

    Args:
        parts: By the index of the representation; at least one.

    Attributes:
        layers: The parts, in the order in which they are packed.
        arguments: What :func:`rgpr._backend.arithmetic.packed_cubes` takes beside the rows.
            ``numbers`` holds, for each layer, its axes in blocks, its products with the centers
            (both transposed and in two parts), half of each center's squared length, the centers,
            and the origin.
            ``table`` has a row for every block of coordinates that one program takes: the layer,
            where its rows begin, units, centers, the block's first coordinate, and where in
            ``numbers`` the block, the products, the halves and the origin begin.
            ``spans`` says where each layer's blocks begin in the table, and where the last ends.
            ``offsets`` has one number for each layer. Then come a number of classes that no layer
            exceeds, and whether all layers have a multiple of 16 units.
    """

    def __init__(self, parts: Mapping[int, Parts]) -> None:
        # The widest first: their programs take longest.
        by_width = sorted(parts.items(), key=lambda item: -item[1].centers.shape[1])
        self._originals = originals_of(parts)
        self._versions = _versions(self._originals)
        self.layers = parts = dict(by_width)
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

        offsets = []
        for number, (origin, onto, centers, halves, offset) in enumerate(parts.values()):
            k, n = centers.shape
            offsets.append(onto.new_zeros(1) if offset is None else offset.reshape(1))
            close = add(in_blocks(onto[:, n:], classes))
            others = add(F.pad(halves, (0, classes - k)), centers)
            middle = add(origin)
            blocks = in_blocks(onto[:, :n])
            begin, size = add(blocks), blocks[0].numel()
            table += [
                [number, place, n, k, index * COLUMNS, begin + index * size, close, others, middle]
                for index in range(len(blocks))
            ]
            spans.append(len(table))
            place += n
        numbers = torch.cat(pieces)
        self.arguments = (
            numbers,
            torch.tensor(table, device=numbers.device),
            torch.tensor(spans, device=numbers.device),
            torch.cat(offsets).double(),
            classes,
            all(layer.centers.shape[1] % 16 == 0 for layer in parts.values()),
        )
        _finish(numbers)

    def is_of(self, originals: Originals) -> bool:
        """Whether it was made of these very tensors, and they did not change since."""
        if originals.keys() != self._originals.keys():
            return False
        same = all(tensor is self._originals[key] for key, tensor in originals.items())
        return same and _versions(originals) == self._versions

    def unit_variances(self, rows: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """``u`` of each layer, ``(B,)`` in float64, from its rows ``(B, N)`` in float32."""
        u = packed_cubes([rows[index] for index in self.layers], *self.arguments)
        return dict(zip(self.layers, u.unbind(1), strict=True))


def in_blocks(matrix: Tensor, columns: int = COLUMNS) -> Tensor:
    """A matrix ``(N, M)`` of float32 as ``(blocks, 2, columns, N')``, with zeros where it ends.

    Tensor cores read numbers as TF32, eleven bits of them, and leave out what is below. The first
    of the two is rounded to that, the second is what rounding took away.
    """
    n, m = matrix.shape
    padded = F.pad(matrix.T, (0, -n % STEP, 0, -m % columns)).contiguous()
    high = ((padded.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    both = torch.stack([high, padded - high], 1).view(-1, columns, 2, padded.shape[1])
    return both.transpose(1, 2).contiguous()


def power_of_two(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def originals_of(parts: Mapping[int, Parts]) -> Originals:
    """All tensors of all parts."""
    return {
        (index, place): tensor
        for index, part in parts.items()
        for place, tensor in enumerate(part)
        if tensor is not None
    }


def _versions(originals: Originals) -> dict[Hashable, int]:
    """Numbers that grow with every change in place, where torch counts them."""
    return {key: t._version for key, t in originals.items() if not t.is_inference()}


def _finish(made: Tensor) -> None:
    """Other threads may read it in other streams."""
    if made.is_cuda:
        torch.cuda.current_stream(made.device).synchronize()


class Packing(StableBuffers):
    """A module that keeps copies of some of its tensors for kernels, while they do not change."""

    _packed: Packed | None = None

    @abstractmethod
    def _parts(self) -> Mapping[int, Parts]:
        """What one kernel can take together, by the index of the representation."""
        raise NotImplementedError

    def packed(self, x: Tensor) -> Packed | None:
        """The copies, if this call can have them."""
        if not kernels_take(x):
            return None
        return self._packed if in_graph(x) else self.pack()  # whoever makes a graph did so before

    def pack(self) -> Packed | None:
        """Pack what can be, unless that was done and nothing has changed."""
        if not self.fits(self._packed):
            with torch.inference_mode(False), torch.no_grad():
                parts = self._parts()
                self._packed = Packed(parts) if parts else None
        return self._packed

    def fits(self, copies: Packed | None) -> bool:
        """Whether these copies, or none, are what :meth:`pack` would give now."""
        originals = originals_of(self._parts())
        return not originals if copies is None else copies.is_of(originals)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        self._packed = None
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __getstate__(self):  # type: ignore[no-untyped-def]
        return super().__getstate__() | {"_packed": None}  # type: ignore[no-untyped-call]
