"""The contract of a family of corruptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["Family"]

# For each kind a function of images in [0, 1], a generator and a setting, and its five settings.
Family = dict[str, tuple[Callable[..., Tensor], list[tuple[Any, ...]]]]
