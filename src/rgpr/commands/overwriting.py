"""A call writes over nothing that it reads, and writes no file twice."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

__all__ = ["refuse_overwriting"]

# What commands read and write, by the names of their options.
_READ = ("file", "data", "model", "weights", "train", "val", "test", "fitted", "ood")
_WRITTEN = ("out", "state", "log", "prometheus", "plot")


def refuse_overwriting(options: argparse.Namespace) -> None:
    """Refuse to write over what the same call reads, or twice to one file.

    Raises:
        ValueError: Two options name one file, directly or by a link.
    """
    taken: dict[str, str] = {}
    for name in (*_READ, *_WRITTEN):
        for option, path in _paths(options, name):
            real = os.path.realpath(path)
            # A model may be calibrated in its place; then --out replaces FILE.
            in_place = (options.command, name, taken.get(real)) == ("calibrate", "out", "FILE")
            if name in _WRITTEN and real in taken and not in_place:
                raise ValueError(
                    f"{option} {path} is the same file as {taken[real]}, which it would overwrite; "
                    f"name another file by {option}"
                )
            taken[real] = option


def _paths(options: argparse.Namespace, name: str) -> list[tuple[str, Path]]:
    """The files that an option names, and how each was given."""
    value: Any = getattr(options, name, None)
    if value is None:
        return []
    if name == "model":  # most often a function of a module, which is no file
        return [("--model", Path(value))] if value.endswith(".pt2") else []
    if isinstance(value, list):  # --ood NAME=DATA
        return [(f"--{name} {part}", path) for part, path in value]
    return [(name.upper() if name in ("file", "data") else f"--{name}", value)]
