"""Chunks of answers as one file: parquet, csv or npz, with one chunk in memory at a time.

The same chunks give the same bytes: nothing of the time or of the machine goes into a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile, ZipInfo

import numpy as np

__all__ = ["FORMS", "Joined", "join"]

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]
FORMS = (".parquet", ".csv", ".npz")


@dataclass(frozen=True)
class Joined:
    """What a file holds.

    Attributes:
        rows: How many rows.
        flagged: How many of them are too strange; ``None`` without flags.
        names: Names of the answers.
    """

    rows: int
    flagged: int | None
    names: tuple[str, ...]


def join(chunks: Iterable[Arrays], out: Path) -> Joined:
    """Write chunks into one file, in the form that its name ends in.

    Args:
        chunks: Arrays by name, each with a row for each input; read more than once.
        out: The file; one that is there is written over.

    Raises:
        ValueError: There is no chunk, or no such form.
    """
    rows, flagged, names = 0, 0, tuple[str, ...]()
    for chunk in chunks:
        names = tuple(chunk)
        rows += len(chunk["score"])
        flagged += int(chunk["flag"].sum()) if "flag" in chunk else 0
    if not names:
        raise ValueError("there are no rows to write: nothing could be read")
    if out.suffix == ".npz":
        _npz(chunks, names, rows, out)
    elif out.suffix == ".csv":
        _csv(chunks, out)
    elif out.suffix == ".parquet":
        _parquet(chunks, out)
    else:
        raise ValueError(f"{out}: expected a name that ends in one of {', '.join(FORMS)}")
    return Joined(rows, flagged if "flag" in names else None, names)


def _npz(chunks: Iterable[Arrays], names: tuple[str, ...], rows: int, out: Path) -> None:
    dtypes: dict[str, list[Any]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for chunk in chunks:
        for name, array in chunk.items():
            dtypes.setdefault(name, []).append(array.dtype)
            shapes[name] = array.shape[1:]
    with ZipFile(out, "w") as archive:
        for name in names:
            dtype = np.result_type(*dtypes[name])  # texts are as wide as the widest
            header = {"descr": dtype.str, "fortran_order": False, "shape": (rows, *shapes[name])}
            with archive.open(ZipInfo(f"{name}.npy"), "w", force_zip64=True) as file:
                np.lib.format.write_array_header_2_0(file, header)
                for chunk in chunks:
                    file.write(np.ascontiguousarray(chunk[name], dtype).tobytes())


def _table(chunk: Arrays) -> Any:
    """A chunk as a table: what has several numbers for a row has as many columns, from 0."""
    import pyarrow as pa  # type: ignore[import-untyped]

    columns: dict[str, Any] = {}
    for name, array in chunk.items():
        if array.ndim == 1:
            columns[name] = pa.array(array.tolist() if array.dtype.kind == "U" else array)
        else:
            flat = array.reshape(len(array), -1)
            columns |= {
                f"{name}_{number}": pa.array(np.ascontiguousarray(flat[:, number]))
                for number in range(flat.shape[1])
            }
    return pa.table(columns)


def _csv(chunks: Iterable[Arrays], out: Path) -> None:
    import pyarrow.csv as pc  # type: ignore[import-untyped]

    _written(chunks, out, pc.CSVWriter)


def _parquet(chunks: Iterable[Arrays], out: Path) -> None:
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    _written(chunks, out, pq.ParquetWriter)


def _written(chunks: Iterable[Arrays], out: Path, kind: Callable[..., Any]) -> None:
    """Write a table for each chunk by one of pyarrow's writers, which the first chunk opens."""
    writer = None
    for chunk in chunks:
        table = _table(chunk)
        writer = writer or kind(out, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()
