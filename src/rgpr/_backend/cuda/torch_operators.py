"""Some kernels as ``torch.ops.rgpr``, which a compiled graph calls as they are.

Operators have no derivatives, so graphs that hold them are for calls without gradients. The
arguments of an operator are tensors and numbers, because a graph holds no dataclass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..arithmetic import register, tracing_few_rows
from ..precision import at_least_float32
from ..small_layers import Packed
from . import pooling, small_layers
from . import weighted_squares as squares

__all__ = ["packed_cubes", "pooled", "weighted_squares"]


@register("cuda", in_graphs=True)
def pooled(h: Tensor) -> Tensor:
    """See :func:`rgpr._backend.arithmetic.pooled`."""
    found: Tensor = _pooled(h)
    return found


@register("cuda", in_graphs=True)
def packed_cubes(rows: list[Tensor], packed: Packed) -> Tensor:
    """See :func:`rgpr._backend.arithmetic.packed_cubes`."""
    found: Tensor = _packed_cubes(rows, *packed.blocks)
    return found


@register("cuda", in_graphs=True)
def weighted_squares(rows: Tensor, matrix: Tensor, weights: Tensor) -> Tensor | None:
    """See :func:`rgpr._backend.arithmetic.weighted_squares`."""
    if not (tracing_few_rows() and squares.fits(rows, weights)):
        return None
    found: Tensor = _weighted_squares(rows, matrix, weights)
    return found


def _operator(
    name: str, schema: str, kernel: Callable[..., Tensor], like: Callable[..., Tensor]
) -> Any:
    """Make ``torch.ops.rgpr.<name>``.

    Args:
        name: The name of the operator.
        schema: The types of its arguments and its answer.
        kernel: The function that the operator calls.
        like: A function that returns an empty tensor of the shape and dtype of the answer.
    """
    # The tag says that inputs may come in whatever order of memory the compiler chose for them.
    torch.library.define(f"rgpr::{name}", schema, tags=(torch.Tag.flexible_layout,))
    torch.library.impl(f"rgpr::{name}", "default", kernel)
    torch.library.register_fake(f"rgpr::{name}", like)
    return getattr(torch.ops.rgpr, name)


def _like_pooled(h: Tensor) -> Tensor:
    return h.new_empty(h.shape[0], h.shape[1], dtype=at_least_float32(h.dtype))


def _like_packed(
    rows: list[Tensor], numbers: Tensor, table: Tensor, spans: Tensor, *_: Any
) -> Tensor:
    return numbers.new_empty(rows[0].shape[0], spans.shape[0] - 1, dtype=torch.float64)


_pooled = _operator("pooled", "(Tensor h) -> Tensor", pooling.pooled, _like_pooled)
_packed_cubes = _operator(
    "packed_cubes",
    "(Tensor[] rows, Tensor numbers, Tensor table, Tensor spans, Tensor offsets, int classes,"
    " bool aligned) -> Tensor",
    small_layers.of_blocks,
    _like_packed,
)
_weighted_squares = _operator(
    "weighted_squares",
    "(Tensor rows, Tensor matrix, Tensor weights) -> Tensor",
    squares.of_any_rows,
    lambda rows, matrix, weights: rows.new_empty(
        rows.shape[0], weights.shape[1], dtype=torch.float64
    ),
)
