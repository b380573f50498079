"""Kernels of :mod:`rgpr.triton_kernels` as operators, which a compiled graph calls as they are."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import triton_kernels
from .hooks import at_least_float32

__all__ = ["packed_mean_cubes", "pooled"]


def _operator(schema: str, kernel: Any) -> Any:
    # Inputs come in whatever order of memory the compiler chose for them.
    return torch.library.custom_op(
        f"rgpr::{kernel.__name__}",
        kernel,
        mutates_args=(),
        schema=schema,
        tags=(torch.Tag.flexible_layout,),
    )


pooled = _operator("(Tensor h) -> Tensor", triton_kernels.pooled)
packed_mean_cubes = _operator(
    "(Tensor rows, Tensor numbers, Tensor table, Tensor spans, int classes, bool starts,"
    " bool aligned) -> Tensor",
    triton_kernels.packed_mean_cubes,
)


@pooled.register_fake
def _(h: Tensor) -> Tensor:
    channels = h.shape[2] if h.dim() == 3 else h.shape[1]
    return h.new_empty(h.shape[0], channels, dtype=at_least_float32(h.dtype))


@packed_mean_cubes.register_fake
def _(rows: Tensor, numbers: Tensor, table: Tensor, spans: Tensor, *_: int) -> Tensor:
    return rows.new_empty(rows.shape[0], spans.shape[0] - 1, dtype=torch.float64)
