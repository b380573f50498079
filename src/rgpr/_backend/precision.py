"""The dtype that variances are computed in, whatever dtype the network uses."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["at_least_float32", "full_precision"]


def full_precision(like: Tensor) -> AbstractContextManager[Any]:
    """Return a context without autocast on the device of ``like``.

    Variances need all their digits, also where the network computes in half precision.
    """
    kind = like.device.type
    if not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64, and float32 for every other dtype.

    ``torch.promote_types`` would do the same, but would become a part of exported graphs.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32
