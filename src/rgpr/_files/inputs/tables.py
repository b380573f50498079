"""Tables: parquet and csv files, in record batches of pyarrow, never whole in memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._backend.precision import at_least_float32
from ..._text import listed, meant
from .sources import Piece, Reading, Source, refuse_image_options

__all__ = ["Table"]

TARGETS = ("y", "label", "target")
# What a frame's index is called in a file: by to_csv, when that is read and saved again, and by
# to_parquet.
_INDEX = ("", "Unnamed: 0", "__index_level_0__")
# Rows that are decoded at once: enough to be fast, and little memory even for a thousand columns.
_ROWS = 8192
# Numbers that are decoded at once, whatever the number of columns.
_NUMBERS = 1 << 22


class Table(Source):
    """A parquet or csv file: columns of numbers, of which one or more may be the targets."""

    def __init__(self, path: Path, reading: Reading) -> None:
        refuse_image_options(path, reading)
        self.path, self._dtype = path, reading.dtype
        with self._refusing():
            schema = self._schema()
        kinds = self._kinds = {field.name: field.type for field in schema}
        if len(kinds) < len(schema.names):
            twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
            raise ValueError(
                f"{path}: these columns are there more than once: {listed(twice)}; rename them"
            )
        self._target = self._targets(reading.target, kinds)
        left = [name for name in kinds if name not in self._target]
        numbers = [name for name in left if _is_number(kinds[name])]
        if reading.columns is None:
            self._refuse_index(numbers)
        self.columns = tuple(numbers if reading.columns is None else reading.columns)
        self._check(kinds, (*self.columns, *self._target))
        if not self.columns:
            raise ValueError(
                f"{path}: no column of numbers is left for the inputs; there are {listed(kinds)}"
            )
        both = [name for name in self.columns if name in self._target]
        if both:
            raise ValueError(
                f"{path}: inputs and targets at once are {listed(both)}; give each column one role"
            )
        self._whole = [name for name in self._target if _is_whole(kinds[name])]
        self.labelled = bool(self._target)
        unused = [name for name in left if name not in self.columns]
        targets = f"target {', '.join(self._target)}" if self._target else "no target"
        self.about = f"{path}: {len(self.columns)} columns as inputs, {targets}" + (
            f", not used: {listed(unused)}" if unused else ""
        )

    def _targets(self, target: str | None, kinds: dict[str, Any]) -> tuple[str, ...]:
        if target is None:
            return tuple(name for name in TARGETS if name in kinds)[:1]
        return (target,) if target in kinds else tuple(target.split(","))

    def _refuse_index(self, numbers: list[str]) -> None:
        """Numbers of rows are no input; frames that are saved with their index have such a column.

        Raises:
            ValueError: There is one.
        """
        found = [name for name in numbers if name in _INDEX]
        if found:
            what = f"the column '{found[0]}'" if found[0] else "a column without a name"
            raise ValueError(
                f"{self.path}: {what} would be an input, and is probably the index of the frame "
                "that was saved. Save it without, frame.to_csv(path, index=False), or name the "
                "columns of the inputs by --columns A,B"
            )

    def _check(self, kinds: dict[str, Any], used: tuple[str, ...]) -> None:
        missing = [name for name in used if name not in kinds]
        if missing:
            close = meant(missing[0], kinds) or "."
            raise ValueError(
                f"{self.path}: no column {listed(map(repr, missing))}{close} There are "
                f"{listed(kinds)}"
            )
        words = [f"'{name}' ({kinds[name]})" for name in used if not _is_number(kinds[name])]
        if words:
            raise ValueError(
                f"{self.path}: no numbers in {listed(words)}; encode them as the network was "
                "trained, classes as 0, 1, 2 and so on"
            )

    def rows(self) -> int:
        if self.path.suffix.lower() == ".parquet":
            import pyarrow.parquet as pq  # type: ignore[import-untyped]

            return int(pq.read_metadata(self.path).num_rows)
        with self._refusing():
            return sum(batch.num_rows for batch in self._csv(list((self.columns or ())[:1])))

    def pieces(self, batch_size: int, start: int) -> Iterator[Piece]:
        held: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        count, skip = 0, start
        for batch in self._batches():
            rows = batch.slice(skip)  # empty where more is to be skipped
            skip = max(0, skip - batch.num_rows)
            if not rows.num_rows:
                continue
            held.append((self._array(rows, self.columns or ()), self._array(rows, self._target)))
            count += rows.num_rows
            if count >= batch_size:
                x, y = (np.concatenate(parts) for parts in zip(*held, strict=True))
                whole = count - count % batch_size
                for first in range(0, whole, batch_size):
                    chosen = slice(first, first + batch_size)
                    yield self._piece(x[chosen], y[chosen])
                held, count = [(x[whole:], y[whole:])], count - whole
        if count:
            x, y = (np.concatenate(parts) for parts in zip(*held, strict=True))
            yield self._piece(x, y)

    def _piece(self, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> Piece:
        inputs = torch.from_numpy(x.copy())
        return Piece(inputs, self._labels(torch.from_numpy(y.copy())) if self._target else None)

    def _labels(self, y: Tensor) -> Tensor:
        whole = len(self._whole) == len(self._target) and bool((y.isfinite() & (y % 1 == 0)).all())
        y = y.long() if whole else y.to(at_least_float32(self._dtype))
        return y[:, 0] if len(self._target) == 1 else y

    def _array(self, batch: Any, names: tuple[str, ...]) -> np.ndarray[Any, Any]:
        """Columns side by side in double precision, missing values as NaN."""
        import pyarrow as pa

        found = np.empty((batch.num_rows, len(names)))
        for number, name in enumerate(names):
            column = batch.column(name)
            if pa.types.is_boolean(column.type):
                column = column.cast(pa.int8())
            column = column.cast(pa.float64(), safe=False)
            found[:, number] = column.to_numpy(zero_copy_only=False)
        return found

    # -- files -------------------------------------------------------------------------------------

    def _schema(self) -> Any:
        if self.path.suffix.lower() == ".parquet":
            import pyarrow.parquet as pq

            return pq.read_schema(self.path)
        import pyarrow.csv as pc  # type: ignore[import-untyped]

        self._refuse_other_separators()
        with pc.open_csv(self.path) as reader:
            return reader.schema

    def _refuse_other_separators(self) -> None:
        """Spreadsheets of some countries write semicolons, which would make one column of all.

        Raises:
            ValueError: The names of the columns have semicolons or tabs between them.
        """
        with self.path.open("rb") as file:
            names = re.sub(rb'"[^"]*"', b"", file.readline(1 << 20))  # quoted names may have any
        for separator, word in ((b";", "semicolons"), (b"\t", "tabs")):
            if separator in names and b"," not in names:
                raise ValueError(
                    f"{self.path}: its columns are separated by {word}; save it with commas "
                    "between columns, and points in decimal numbers"
                )

    def _batches(self) -> Iterator[Any]:
        names = [*(self.columns or ()), *self._target]
        with self._refusing():
            if self.path.suffix.lower() == ".csv":
                yield from self._csv(names)
                return
            import pyarrow.parquet as pq

            # Without a buffer for whole row groups, of which a file may have a single one.
            with pq.ParquetFile(self.path, pre_buffer=False, buffer_size=1 << 16) as file:
                rows = max(1, min(_ROWS, _NUMBERS // max(1, len(names))))
                yield from file.iter_batches(batch_size=rows, columns=names)

    def _csv(self, names: list[str]) -> Iterator[Any]:
        import pyarrow as pa
        import pyarrow.csv as pc

        # The first block says what a column is; a later one may have decimals in whole numbers.
        types = {name: pa.float64() for name in names if self._decimal(name)}
        options = pc.ConvertOptions(include_columns=names, column_types=types)
        with pc.open_csv(self.path, convert_options=options) as reader:
            for batch in reader:
                for first in range(0, batch.num_rows, _ROWS):
                    yield batch.slice(first, _ROWS)

    def _decimal(self, name: str) -> bool:
        """Whether a column of a csv file is read as decimal numbers: all but booleans."""
        import pyarrow as pa

        return not pa.types.is_boolean(self._kinds[name])

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Say which file pyarrow could not read."""
        import pyarrow as pa

        try:
            yield
        except pa.ArrowException as error:
            raise ValueError(f"{self.path} cannot be read: {error}") from error


def _is_number(kind: Any) -> bool:
    from pyarrow import types

    decided = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    # A column whose first rows are all empty is taken for numbers, until it turns out otherwise.
    return bool(decided or types.is_decimal(kind) or types.is_null(kind))


def _is_whole(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_integer(kind) or types.is_boolean(kind))
