"""Arrays: ``.npz`` files, held in memory; nothing in them is unpickled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._backend.precision import at_least_float32
from ..._text import listed, meant
from ..archives import opened_archive
from .sources import Piece, Reading, Source, refuse_image_options

__all__ = ["Arrays"]

INPUT_KEYS = ("x", "X", "images", "data")
TARGET_KEYS = ("y", "labels", "target")


class Arrays(Source):
    """A ``.npz`` file."""

    def __init__(self, path: Path, reading: Reading) -> None:
        refuse_image_options(path, reading)
        with opened_archive(path) as file:
            given = reading.columns
            if given is not None and len(given) != 1:
                raise ValueError(f"--columns names the one key of the inputs, not {given}")
            wanted = INPUT_KEYS if given is None else given
            key = _first(file, wanted)
            if key is None:
                raise ValueError(
                    f"it has the keys {listed(sorted(file))} and none of {listed(wanted)} for the "
                    "inputs; name one by --columns"
                )
            self.x = _numbers(file[key], key)
            y = _first(file, TARGET_KEYS if reading.target is None else (reading.target,))
            if y is None and reading.target is not None:
                close = meant(reading.target, file) or "."
                raise ValueError(
                    f"no key '{reading.target}' for the targets{close} There are "
                    f"{listed(sorted(file))}"
                )
            self.y = None if y is None else _targets(_numbers(file[y], y), reading.dtype)
        if self.y is not None and len(self.y) != len(self.x):
            raise ValueError(f"{path}: '{key}' has {len(self.x)} rows and '{y}' {len(self.y)}")
        self.labelled = self.y is not None
        targets = "no targets" if y is None else f"targets '{y}'"
        shape = tuple(self.x.shape[1:])
        self.about = f"{path}: {len(self.x)} rows of shape {shape}, inputs '{key}', {targets}"

    def rows(self) -> int:
        return len(self.x)

    def pieces(self, batch_size: int, start: int) -> Iterator[Piece]:
        for first in range(start, len(self.x), batch_size):
            rows = slice(first, first + batch_size)
            yield Piece(self.x[rows], None if self.y is None else self.y[rows])


def _first(file: Mapping[str, Any], keys: Iterable[str]) -> str | None:
    return next((key for key in keys if key in file), None)


def _numbers(array: np.ndarray[Any, Any], key: str) -> Tensor:
    if not isinstance(array, np.ndarray):  # numpy gives the bytes of what has no ending .npy
        raise ValueError(f"'{key}' is no array; write it by numpy.savez(path, {key}=...)")
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8 or array.ndim == 0:
        raise ValueError(
            f"'{key}' holds {array.dtype} of shape {array.shape}; expected numbers, a row for each "
            "example"
        )
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C", copy=False))


def _targets(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Whole numbers as labels, others in at least single precision."""
    return y.to(at_least_float32(dtype)) if y.is_floating_point() else y.long()
