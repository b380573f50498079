"""Progress of long work: a bar on a terminal, and now and then a line where there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

__all__ = ["bar"]

# Seconds between lines; work that takes less says nothing.
_EVERY = 30.0


def bar(items: Iterable[Any] | None, description: str, progress: bool, **options: Any) -> Any:
    """The items, with their progress on stderr.

    Args:
        items: What is gone through; ``None`` if the caller counts by ``update``.
        description: What is done.
        progress: Whether to show anything.
        **options: Others of tqdm.
    """
    if sys.stderr.isatty():
        how: dict[str, Any] = {}
    else:  # a log: no bar that is drawn over itself, but lines that end
        words = "{desc}: {n_fmt} of {total_fmt} in {elapsed}\n"
        how = {"delay": _EVERY, "mininterval": _EVERY, "bar_format": words}
    return tqdm(items, desc=description, leave=False, disable=not progress, **how, **options)
