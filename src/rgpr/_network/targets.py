"""Targets that a loader gives in another form than a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["check_words", "in_array", "numbers"]


def numbers(target: Any) -> Tensor:
    """Targets as a tensor, from a list, a tuple or an array of numbers.

    Raises:
        TypeError: They are words, or no numbers at all.
    """
    check_words(target)
    try:
        return torch.as_tensor(target)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"a batch has targets of type {type(target).__name__}, which are no numbers; give a "
            "tensor, or yield the inputs alone"
        ) from None


def in_array(target: list[Any] | tuple[Any, ...]) -> np.ndarray[Any, Any]:
    """Targets as an array.

    Raises:
        ValueError: They have differing lengths.
    """
    try:
        return np.asarray(target)
    except ValueError:
        raise ValueError(
            "the targets are a list whose entries differ in length; give each input a number, or "
            "as many numbers as any other"
        ) from None


def check_words(target: Any) -> None:
    """Refuse words in the place of targets.

    Raises:
        TypeError: The message says how to make numbers of them.
    """
    kind = getattr(getattr(target, "dtype", None), "kind", "")  # of numpy and pandas
    listed = list(target) if isinstance(target, list | tuple) or kind in ("U", "S", "O") else []
    word = next((value for value in listed if isinstance(value, str | bytes)), None)
    if isinstance(target, str | bytes) or word is not None:
        raise TypeError(
            f"the targets are words, such as {str(word or target)!r}; give each class "
            "its number, in the order of the network's outputs: names = sorted(set(labels)), y = "
            "torch.tensor([names.index(label) for label in labels]), if the network was trained "
            "with the classes in that order. If they are no targets, yield the inputs alone"
        )
