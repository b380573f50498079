"""Targets that a loader gives in another form than a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["numbers"]


def numbers(target: Any) -> Tensor:
    """Targets as a tensor, from a list, a tuple or an array of numbers.

    Raises:
        TypeError: They are words, or no numbers at all.
    """
    kind = getattr(getattr(target, "dtype", None), "kind", "")  # of a numpy array
    listed = list(target) if isinstance(target, list | tuple) or kind in ("U", "S", "O") else []
    word = next((value for value in listed if isinstance(value, str | bytes)), None)
    if isinstance(target, str | bytes) or word is not None:
        raise TypeError(
            f"a batch has targets that are words, such as {str(word or target)!r}; give each class "
            "its number, in the order of the network's outputs: names = sorted(set(labels)), y = "
            "torch.tensor([names.index(label) for label in labels]). If they are no targets, "
            "yield the inputs alone"
        )
    try:
        return torch.as_tensor(target)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"a batch has targets of type {type(target).__name__}, which are no numbers; give a "
            "tensor, or yield the inputs alone"
        ) from None
