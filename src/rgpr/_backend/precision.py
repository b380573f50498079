"""The dtype to compute in, whatever the network uses."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["at_least_float32", "full_precision"]


def full_precision(like: Tensor) -> AbstractContextManager[Any]:
    """No autocast inside: variances need their digits, whatever the network computes in."""
    kind = like.device.type
    if not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in; ``torch.promote_types`` would become a part of exported graphs."""
    return torch.float64 if dtype == torch.float64 else torch.float32
