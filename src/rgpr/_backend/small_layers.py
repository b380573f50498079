"""Small layers are measured together, when the pass through the network is done.

A network has many layers, and most are so small that launching kernels for each of them takes
longer than their work. So their rows wait until the end of the pass, and one kernel takes them all
(:func:`rgpr._backend.arithmetic.packed_cubes`). The kernel reads the prototypes of these layers
from copies, which lie in one piece of memory in the order in which tensor cores want them. A device
without such a kernel needs no copies and measures each layer where the network makes it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .arithmetic import faster, few_rows, packed_cubes, tracing_few_rows
from .buffers import StableBuffers

__all__ = [
    "COLUMNS",
    "STEP",
    "Blocks",
    "Originals",
    "Packed",
    "Packing",
    "Parts",
    "in_blocks",
    "originals_of",
]

# One program of the kernel takes COLUMNS coordinates, and reads STEP units at a time.
COLUMNS, STEP = 32, 32
# Layers with more units or classes than these are faster with a matrix product of their own.
_WIDEST = 512
_MOST_CLASSES = 64


Originals = Mapping[Hashable, Tensor]
_version = attrgetter("_version")


class Parts(NamedTuple):
    """The tensors of one :class:`rgpr.residual.prototypes.Prototypes`.

    Attributes:
        origin: The point from which rows are measured, ``(N,)``.
        onto: The matrix that gives the coordinates and the products with the centers,
            ``(N, N + K)``, or the products alone, ``(N, K)``, where axes are not turned.
        centers: ``(K, N)``.
        halves: Half of each center's squared length, ``(K,)``.
        offset: The distance at which the cube starts, one number, or ``None`` for zero.
    """

    origin: Tensor
    onto: Tensor
    centers: Tensor
    halves: Tensor
    offset: Tensor | None

    @property
    def fit(self) -> bool:
        """Whether the kernel can take this layer, and is faster than a product of its own."""
        k, n = self.centers.shape
        small = n <= _WIDEST and k <= _MOST_CLASSES
        return small and self.onto.shape[1] > k and self.onto.dtype == torch.float32


class Blocks(NamedTuple):
    """Copies of the parts of all layers in one piece of memory, and a table of where they are.

    Attributes:
        numbers: The copies. For each layer these are the products with the centers and the axes
            (both as :func:`in_blocks` gives them), half of each center's squared length, the
            centers, and the origin.
        table: One row for every block of coordinates that one program takes: the layer, the first
            column of its rows, the number of units, the number of centers, the first coordinate of
            the block, and where in ``numbers`` the block, the products, the halves and the origin
            begin.
        spans: The row of the table at which the blocks of each layer begin, and the row after the
            last one.
        offsets: One number for each layer, in float64.
        classes: A number of classes that no layer exceeds: a power of two, and 16 or more.
        aligned: Whether the number of units is a multiple of 16 in all layers.
    """

    numbers: Tensor
    table: Tensor
    spans: Tensor
    offsets: Tensor
    classes: int
    aligned: bool


class Packed:
    """The copies for one kernel, and the tensors they were made of.

    Args:
        parts: The parts by the index of the representation; at least one.

    Attributes:
        layers: The same parts, in the order in which they are packed.
        blocks: The copies.
    """

    def __init__(self, parts: Mapping[int, Parts]) -> None:
        self._originals = originals_of(parts)
        # torch counts the changes in place of all tensors but those of inference mode.
        self._counted = [t for t in self._originals.values() if not t.is_inference()]
        self._versions = self._now()
        # The widest layers come first because their programs take longest.
        self.layers = dict(sorted(parts.items(), key=lambda item: -item[1].centers.shape[1]))
        self.blocks = _blocks_of(list(self.layers.values()))
        _finish(self.blocks.numbers)

    def is_of(self, originals: Originals) -> bool:
        """Whether the copies were made of these very tensors, and these did not change since."""
        if originals.keys() != self._originals.keys():
            return False
        same = all(tensor is self._originals[key] for key, tensor in originals.items())
        return same and self.is_current

    @property
    def is_current(self) -> bool:
        """Whether the tensors that the copies were made of did not change in place since."""
        return self._now() == self._versions

    def _now(self) -> list[int]:
        return [*map(_version, self._counted)]

    def unit_variances(self, rows: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return ``u`` of each layer, ``(B,)`` in float64, from its rows ``(B, N)`` in float32."""
        u = packed_cubes([rows[index] for index in self.layers], self)
        return dict(zip(self.layers, u.unbind(1), strict=True))


class _Memory:
    """Tensors that will lie one after the other in one piece of memory."""

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []
        self._end = 0

    def add(self, *tensors: Tensor) -> int:
        """Put tensors behind those that are there, and return where the first one begins."""
        begin, size = self._end, sum(tensor.numel() for tensor in tensors)
        # Loads are faster where every piece begins at a multiple of 16 numbers.
        padding = tensors[0].new_zeros(-size % 16)
        self._pieces += [*(tensor.flatten() for tensor in tensors), padding]
        self._end += size + len(padding)
        return begin

    def joined(self) -> Tensor:
        return torch.cat(self._pieces)


def _blocks_of(layers: list[Parts]) -> Blocks:
    """Copy the parts of these layers, in this order."""
    most = max(len(layer.centers) for layer in layers)
    classes = max(16, 1 << (most - 1).bit_length())
    memory, table, spans, offsets, place = _Memory(), [], [0], [], 0
    for number, (origin, onto, centers, halves, offset) in enumerate(layers):
        k, n = centers.shape
        offsets.append(onto.new_zeros(1) if offset is None else offset.reshape(1))
        close = memory.add(in_blocks(onto[:, n:], classes))
        others = memory.add(F.pad(halves, (0, classes - k)), centers)
        middle = memory.add(origin)
        blocks = in_blocks(onto[:, :n])
        begin, size = memory.add(blocks), blocks[0].numel()
        table += [
            [number, place, n, k, index * COLUMNS, begin + index * size, close, others, middle]
            for index in range(len(blocks))
        ]
        spans.append(len(table))
        place += n
    numbers = memory.joined()
    return Blocks(
        numbers,
        torch.tensor(table, device=numbers.device),
        torch.tensor(spans, device=numbers.device),
        torch.cat(offsets).double(),
        classes,
        all(layer.centers.shape[1] % 16 == 0 for layer in layers),
    )


def in_blocks(matrix: Tensor, columns: int = COLUMNS) -> Tensor:
    """Return a matrix ``(N, M)`` of float32, transposed and in two parts, in blocks of columns.

    Tensor cores read a number as TF32, which has eleven bits, and ignore the bits below. The first
    part is the number rounded to TF32, the second is what rounding took away.

    Args:
        matrix: ``(N, M)``.
        columns: The number of columns in a block.

    Returns:
        ``(blocks, 2, columns, N')``, where ``N'`` is the next multiple of ``STEP``. Zeros fill the
        places beyond ``N`` and ``M``.
    """
    n, m = matrix.shape
    padded = F.pad(matrix.T, (0, -n % STEP, 0, -m % columns)).contiguous()
    high = ((padded.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    both = torch.stack([high, padded - high], 1).view(-1, columns, 2, padded.shape[1])
    return both.transpose(1, 2).contiguous()


def originals_of(parts: Mapping[int, Parts]) -> Originals:
    """Return all tensors of all parts, by the index of the representation and their place."""
    return {
        (index, place): tensor
        for index, part in parts.items()
        for place, tensor in enumerate(part)
        if tensor is not None
    }


def _finish(made: Tensor) -> None:
    """Wait until a tensor is written, because other threads may read it in other streams."""
    if made.is_cuda:
        torch.cuda.current_stream(made.device).synchronize()


class Packing(StableBuffers):
    """A module that keeps copies of some of its tensors for a kernel, while they do not change."""

    _packed: Packed | None = None

    @abstractmethod
    def _parts(self) -> Mapping[int, Parts]:
        """Return what one kernel can take together, by the index of the representation."""
        raise NotImplementedError

    def packed(self, x: Tensor) -> Packed | None:
        """Return the copies if layers are to be measured together for this input, else ``None``."""
        # This question comes first: a graph that somebody else traces has no kernels, and must not
        # depend on the number of rows.
        if faster("packed_cubes", x) is None:
            return None
        if torch.compiler.is_compiling():
            # Whoever traces the graph has packed the layers before.
            return self._packed if tracing_few_rows() else None
        return self.pack() if few_rows(x) and not torch.is_grad_enabled() else None

    def pack(self) -> Packed | None:
        """Make the copies, unless there are some and nothing has changed since, and return them."""
        if not self.fits(self._packed):
            with torch.inference_mode(False), torch.no_grad():
                parts = self._parts()
                self._packed = Packed(parts) if parts else None
        return self._packed

    def fits(self, copies: Packed | None) -> bool:
        """Whether these copies, or none, are what :meth:`pack` would return now."""
        originals = originals_of(self._parts())
        return not originals if copies is None else copies.is_of(originals)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        self._packed = None
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __getstate__(self):  # type: ignore[no-untyped-def]
        return super().__getstate__() | {"_packed": None}  # type: ignore[no-untyped-call]
