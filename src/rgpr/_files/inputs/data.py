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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from ..._network.columns import difference
from ..._network.sources import Batches
from ..._text import MOST, listed
from .arrays import Arrays
from .images import Images
from .sources import Piece, Reading, Source
from .tables import Table

__all__ = ["Data", "read"]


class Data:
    """Batches ``(x, y)``, or ``x`` without targets; they can be read any number of times.

    Args:
        path: Where the data are.
        source: What reads them.
        reading: How.

    Attributes:
        skipped: Images that could not be read in the last pass, with the reason.
        begun: The data whose pass was begun last and has not come to its end: what goes wrong
            outside of a pass is about its last batch.
    """

    begun: ClassVar[Data | None] = None

    def __init__(self, path: Path, source: Source, reading: Reading) -> None:
        self.path, self.source, self.reading = path, source, reading
        self.skipped: list[str] = []
        self._rows: int | None = None

    @property
    def name(self) -> str:
        """The path, and the option that it was given by."""
        option = self.reading.option
        return str(self.path) if option is None else f"{self.path} ({option})"

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
        return (batch for batch, _ in self.named())

    def named(self) -> Iterator[tuple[Any, Sequence[str] | None]]:
        """The same batches, with the files of their rows if each row has one."""
        empty = True
        for piece in self.pieces():
            if len(piece.x):
                empty = False
                yield piece.x if piece.y is None else (piece.x, piece.y), piece.names
        if empty:
            raise self.without_rows()

    def without_rows(self) -> ValueError:
        """What to raise after a pass that found no row."""
        why = f" that can be read: {self.skipped[0]}" if self.skipped else ""
        return ValueError(f"{self.name} has no rows{why}")

    def first(self) -> Any:
        """The first batch."""
        found = next(iter(self))
        Data.begun = None
        return found

    def pieces(self, start: int = 0) -> Iterator[Piece]:
        """Batches with the names of their rows, also those of which no row could be read.

        Args:
            start: The first row, a multiple of the batch's size.
        """
        self.skipped, Data.begun = [], self
        for piece in self.source.pieces(self.reading.batch_size, start):
            self.skipped += piece.skipped
            yield replace(piece, x=self._prepared(piece.x)) if len(piece.x) else piece
        Data.begun = None

    def _prepared(self, x: Tensor) -> Tensor:
        divide, prepare = self.reading.divide, self.reading.preprocess
        x = x.to(self.reading.dtype) if x.is_floating_point() or divide is not None else x
        x = x if divide is None else x / divide
        if prepare is None:
            return x
        try:
            found = prepare(x)
        except Exception as error:  # code of the user's own
            raise ValueError(
                f"preprocess failed with {type(error).__name__}: {error}, for a batch of shape "
                f"{tuple(x.shape)}; --traceback shows where"
            ) from error
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
        columns = self.columns
        if fitted is None or columns is None or columns == tuple(fitted):
            return
        fitted = tuple(fitted)
        new = [name for name in columns if name not in fitted]
        remedies = []
        if new and not self.source.labelled:
            likely = new[0] if len(new) == 1 else "NAME"
            remedies = [f"pass --target {likely} if that column holds the targets"]
        if set(fitted) <= set(columns):
            named = f"NAMES with commas, which are {listed(fitted)}"
            if len(fitted) <= MOST:
                named = ",".join(fitted)
            remedies += [f"name the inputs by --columns {named}"]
        else:
            remedies += ["give the columns the names that they had in the data of the fit"]
        remedy = ", or ".join(remedies)
        raise ValueError(
            f"{self.path}: the columns are not those that the model was fitted on: "
            f"{difference(columns, fitted)}. {remedy[0].upper()}{remedy[1:]}"
        )


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

    def named(self) -> Iterator[tuple[Any, Sequence[str] | None]]:
        return self.data.named()


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
        source = Images(path, reading)
    elif path.suffix.lower() == ".npz":
        source = Arrays(path, reading)
    elif path.suffix.lower() in (".parquet", ".csv"):
        source = Table(path, reading)
    else:
        raise ValueError(
            f"{path} is none of the forms that are read: .npz, .parquet, .csv, or a folder of "
            "images; save it as one of these"
        )
    return Data(path, source, reading)
