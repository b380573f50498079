"""Columns of a table must be those that a model was fitted on, in the same order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .._text import MOST, listed
from .sources import Batches

__all__ = ["check_columns", "difference"]


def check_columns(data: Iterable[Any], fitted: Sequence[str] | None) -> None:
    """Refuse a frame whose columns are not those of the frame that the model was fitted on.

    Raises:
        ValueError: The message names the columns that differ.
    """
    columns = data.columns if isinstance(data, Batches) else None
    if fitted is None or columns is None or tuple(columns) == tuple(fitted):
        return
    same = "frame[columns], with the columns of the frame that fit got"
    if len(fitted) <= MOST:
        same = f"frame[{list(fitted)}]"
    raise ValueError(
        "the frame's columns are not those that the model was fitted on: "
        f"{difference(columns, fitted)}. Pass {same}"
    )


def difference(columns: Sequence[str], fitted: Sequence[str]) -> str:
    """In which way columns differ from those of the fit, in words."""
    lacking = [name for name in fitted if name not in columns]
    new = [name for name in columns if name not in fitted]
    words = [f"it lacks {listed(map(repr, lacking))}"] if lacking else []
    words += [f"it has {listed(map(repr, new))} besides"] if new else []
    return " and ".join(words) or f"they are in another order, [{listed(map(repr, columns))}]"
