"""Data of a user, from files: batches of tensors that can be read any number of times.

==========================  ========================================================================
path                        what is read
==========================  ========================================================================
``x.npz``                   inputs under x, X, images or data; targets under y, labels or target
``x.parquet``, ``x.csv``    the target's column, and all other columns of numbers as inputs
a folder of images          ``folder/class/image.png``, or ``folder/image.png`` without targets
==========================  ========================================================================

Batches have the same rows whatever the form is, so that a network gives the same digits for each.
Tables and images are read as they are needed; only ``.npz`` files are held in memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._backend.precision import at_least_float32
from .._network.sources import Batches, check_columns

__all__ = ["Data", "Piece", "Reading", "Source", "read"]

INPUT_KEYS = ("x", "X", "images", "data")
TARGET_KEYS = ("y", "labels", "target")


@dataclass(frozen=True)
class Reading:
    """How data are read.

    Attributes:
        target: The column or the key of the targets; several with commas between them.
        columns: The columns or the key of the inputs; ``None`` for the usual ones.
        batch_size: Rows of a batch.
        dtype: Of inputs that are floating point.
        classes: Names of the folders of classes in the order of their labels; ``None`` sorts them.
        size: Height and width that images are resized to; ``None`` leaves them as they are.
        channels: 1 or 3 for images; ``None`` for those of the first image.
        mean: Subtracted from each channel, after images were scaled to [0, 1].
        std: Each channel is divided by it.
        on_error: What to do with an image that cannot be read: ``"stop"`` or ``"skip"``.
        preprocess: Applied to the inputs of every batch.
    """

    target: str | None = None
    columns: tuple[str, ...] | None = None
    batch_size: int = 256
    dtype: torch.dtype = torch.float32
    classes: tuple[str, ...] | None = None
    size: tuple[int, int] | None = None
    channels: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    on_error: str = "stop"
    preprocess: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Piece:
    """One batch.

    Attributes:
        x: Inputs ``(B, ...)``.
        y: Targets, where there are any.
        names: Where each row comes from, if rows have files of their own.
        skipped: What could not be read, with the reason.
    """

    x: Tensor
    y: Tensor | None = None
    names: tuple[str, ...] | None = None
    skipped: tuple[str, ...] = ()


class Source(ABC):
    """One form of data.

    Attributes:
        about: What is read, in one sentence.
        columns: Names of the input's columns, of a table.
        classes: Names of the classes, of image folders.
        labelled: Whether there are targets.
    """

    about: str
    columns: tuple[str, ...] | None = None
    classes: tuple[str, ...] | None = None
    labelled: bool = False

    @abstractmethod
    def rows(self) -> int:
        """How many rows there are."""

    @abstractmethod
    def pieces(self, batch_size: int, start: int) -> Iterator[Piece]:
        """Batches from row ``start`` on, a multiple of the batch's size."""


class Data:
    """Batches ``(x, y)``, or ``x`` without targets; they can be read any number of times.

    Args:
        path: Where the data are.
        source: What reads them.
        reading: How.

    Attributes:
        skipped: Images that could not be read in the last pass, with the reason.
    """

    def __init__(self, path: Path, source: Source, reading: Reading) -> None:
        self.path, self.source, self.reading = path, source, reading
        self.skipped: list[str] = []
        self._rows: int | None = None

    @property
    def about(self) -> str:
        """What is read, in one sentence."""
        return self.source.about

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Names of the input's columns, of a table that is not preprocessed."""
        return None if self.reading.preprocess else self.source.columns

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes, in the order of their labels, of image folders."""
        return self.source.classes

    def __len__(self) -> int:
        if self._rows is None:
            self._rows = self.source.rows()
        return self._rows

    def __iter__(self) -> Iterator[Any]:
        for piece in self.pieces():
            if len(piece.x):
                yield piece.x if piece.y is None else (piece.x, piece.y)

    def pieces(self, start: int = 0) -> Iterator[Piece]:
        """Batches with the names of their rows, also those of which no row could be read.

        Args:
            start: The first row, a multiple of the batch's size.
        """
        self.skipped = []
        for piece in self.source.pieces(self.reading.batch_size, start):
            self.skipped += piece.skipped
            yield replace(piece, x=self._prepared(piece.x)) if len(piece.x) else piece

    def _prepared(self, x: Tensor) -> Tensor:
        x = x.to(self.reading.dtype) if x.is_floating_point() else x
        prepare = self.reading.preprocess
        if prepare is None:
            return x
        found = prepare(x)
        if not isinstance(found, Tensor) or len(found) != len(x):
            what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"preprocess made {what} of a batch of shape {tuple(x.shape)}; it must return a "
                "tensor with as many rows"
            )
        return found

    def batches(self, fitted: Iterable[str] | None = None) -> Batches:
        """The same batches in the form that models know, with the names of columns.

        Args:
            fitted: The columns that a model was fitted on, which must be these.

        Raises:
            ValueError: The columns are others.
        """
        self.check_columns(fitted)
        return _Batches(self)

    def check_columns(self, fitted: Iterable[str] | None) -> None:
        """Refuse a table whose columns are not those that a model was fitted on."""
        if fitted is None:
            return
        try:
            check_columns(_Batches(self), tuple(fitted))
        except ValueError as error:
            problem = str(error).removeprefix("the frame's columns").rpartition(" Pass ")[0]
            raise ValueError(
                f"{self.path}: the columns{problem} Name the inputs by --columns "
                f"{','.join(fitted)}, and a target by --target"
            ) from None


class _Batches(Batches):
    """Data, as models take them: counted in batches."""

    def __init__(self, data: Data) -> None:
        self.data, self.columns, self.index = data, data.columns, None

    @property
    def dataset(self) -> range:  # type: ignore[override]
        return range(len(self.data))

    def __len__(self) -> int:
        return max(1, -(-len(self.data) // self.data.reading.batch_size))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


def read(path: str | Path, *, target: str | None = None, batch_size: int = 256, **how: Any) -> Data:
    """Data from a file or a folder.

    Args:
        path: A ``.npz``, ``.parquet`` or ``.csv`` file, or a folder of images.
        target: The column or the key of the targets.
        batch_size: Rows of a batch.
        how: The other fields of :class:`Reading`.

    Raises:
        FileNotFoundError: There is no such file or folder.
        ValueError: Nothing there can be read, or an option does not fit.
    """
    path = Path(path)
    reading = Reading(target=target, batch_size=batch_size, **how)
    if batch_size < 1:
        raise ValueError(f"a batch of {batch_size} rows: give at least 1")
    if not path.exists():
        raise FileNotFoundError(f"no file or folder {path}")
    source: Source
    if path.is_dir():
        from .images import Images

        source = Images(path, reading)
    elif path.suffix == ".npz":
        source = _Arrays(path, reading)
    elif path.suffix in (".parquet", ".csv"):
        from .tables import Table

        source = Table(path, reading)
    else:
        raise ValueError(
            f"{path} is none of the forms that are read: .npz, .parquet, .csv, or a folder of "
            "images; save it as one of these"
        )
    return Data(path, source, reading)


class _Arrays(Source):
    """A ``.npz`` file."""

    def __init__(self, path: Path, reading: Reading) -> None:
        _refuse_image_options(path, reading)
        try:
            with np.load(path, allow_pickle=False) as file:
                if not isinstance(file, np.lib.npyio.NpzFile):
                    raise ValueError("it holds one array without a name")
                given = reading.columns
                if given is not None and len(given) != 1:
                    raise ValueError(f"--columns names the one key of the inputs, not {given}")
                wanted = INPUT_KEYS if given is None else given
                key = _first(file, wanted)
                if key is None:
                    raise ValueError(
                        f"it has the keys {sorted(file)} and none of {list(wanted)} for the "
                        "inputs; name one by --columns"
                    )
                self.x = _numbers(file[key], key)
                y = _first(file, TARGET_KEYS if reading.target is None else (reading.target,))
                if y is None and reading.target is not None:
                    raise ValueError(f"it has the keys {sorted(file)} and no '{reading.target}'")
                self.y = None if y is None else _targets(_numbers(file[y], y), reading.dtype)
        except (ValueError, OSError, EOFError) as error:
            raise ValueError(f"{path}: {error}") from error
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
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        raise ValueError(
            f"'{key}' holds {array.dtype} of shape {array.shape}; expected numbers, a row for each "
            "example"
        )
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), order="C", copy=False))


def _targets(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Whole numbers as labels, others in at least single precision."""
    return y.to(at_least_float32(dtype)) if y.is_floating_point() else y.long()


def _refuse_image_options(path: Path, reading: Reading) -> None:
    """Refuse what is meant for images where there are none."""
    options = ("classes", "size", "mean", "std")
    given = [name for name in options if getattr(reading, name) is not None]
    if given:
        raise ValueError(
            f"--{given[0]} is for image folders, and {path} is none; prepare the inputs before, or "
            "by --preprocess"
        )
