"""The Triton kernels as operators, which a compiled graph calls as they are.

They have no derivatives: graphs that hold them are for calls without gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import triton_kernels
from .precision import at_least_float32

__all__ = ["packed_cubes", "pooled"]


def _operator(kernel: Callable[..., Tensor], schema: str, like: Callable[..., Tensor]) -> Any:
    """Make ``torch.ops.rgpr.<name>``; ``like`` gives a tensor of the answer's shape."""
    name = f"rgpr::{kernel.__name__}"
    # Inputs come in whatever order of memory the compiler chose for them.
    torch.library.define(name, schema, tags=(torch.Tag.flexible_layout,))
    torch.library.impl(name, "default", kernel)
    torch.library.register_fake(name, like)
    return getattr(torch.ops.rgpr, kernel.__name__)


def _like_pooled(h: Tensor) -> Tensor:
    channels = h.shape[2] if h.dim() == 3 else h.shape[1]
    return h.new_empty(h.shape[0], channels, dtype=at_least_float32(h.dtype))


def _like_packed(
    rows: list[Tensor], numbers: Tensor, table: Tensor, spans: Tensor, *_: Any
) -> Tensor:
    return numbers.new_empty(rows[0].shape[0], spans.shape[0] - 1, dtype=torch.float64)


pooled = _operator(triton_kernels.pooled, "(Tensor h) -> Tensor", _like_pooled)
packed_cubes = _operator(
    triton_kernels.packed_cubes,
    "(Tensor[] rows, Tensor numbers, Tensor table, Tensor spans, Tensor offsets, int classes,"
    " bool aligned) -> Tensor",
    _like_packed,
)
