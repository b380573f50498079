"""Scoring files: one parquet file of answers for each file of inputs, and a run that can go on.

A file of answers gets its name once it is whole, so what has its name is finished: a second run
leaves it alone and does the rest. Every row is in the answers exactly once, whatever was killed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..._atomic import replacing
from ..._images import opened
from ..._network.checks import check_counts, network_dtype_device
from ..._resuming import digest
from ..._text import said
from .ahead import ahead
from .begun import ROWS, check_answers, check_begun
from .columns import Array, Workers, check_keep, kept_names
from .planning import (
    INPUTS,
    check_apart,
    check_known,
    input_files,
    is_finished,
    is_parquet,
    looks,
    parts_of,
)
from .scoring import Predictor, check_file, check_names, check_network

__all__ = ["FileScorer", "score_files"]

# Columns to keep, and those with the inputs.
_Read = tuple[Any, dict[str, Array]]


class FileScorer(Predictor):
    """Scores whole files, for ``map_batches``.

    Args:
        batch_size: Rows scored together.
        size: Height and width that images are brought to; as they are by default.
        content: The digest of the model's file, if it must be the one that a run began with.
        finished: A part of the same run that was finished before, if there is one: its files of
            inputs, and its file of answers.
        options: For :class:`Predictor`.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        size: tuple[int, int] | None,
        content: str | None = None,
        finished: tuple[Sequence[str], str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.batch_size, self.size = batch_size, size
        self._content, self._finished, self._path = content, finished, options["path"]

    def __call__(self, batch: dict[str, Array]) -> dict[str, Array]:
        """Why each part could not be scored, in words; nothing once its answers are in a file.

        What a worker raises would reach the caller in the middle of messages of Ray's, and keep
        other parts from being scored.
        """
        parts = zip(batch["files"], batch["out"], strict=True)
        return {"failed": np.array([self._tried(files, out) for files, out in parts], dtype=object)}

    def _tried(self, files: str, out: str) -> str:
        if self._refused:
            return self._refused
        try:
            self._score(json.loads(files), Path(out))
        except Exception as error:
            return _reason(error)
        return ""

    @cached_property
    def _refused(self) -> str:
        """Why this worker must not work for the run, found out once; nothing if it may."""
        if self._content is not None and digest(self._path) != self._content:
            return (
                f"{self._path} is no longer the model that this run began with; put that one back "
                "to go on, or name another folder for the answers of the new one"
            )
        try:
            if self._finished is not None:
                self._check_functions(*self._finished)
        except Exception as error:
            return _reason(error)
        return ""

    def _check_functions(self, files: Sequence[str], out: str) -> None:
        """Refuse to go on if rows of a finished part get other scores than those in its file."""
        with closing(self._batches(files, min(ROWS, self.batch_size))) as batches:
            columns = next(batches)[1]
        once, again = self._answers(columns), self._answers(columns)
        dtype = network_dtype_device(self.model.posterior.network)[0]
        rounded = self.autocast is not None or dtype in (torch.float16, torch.bfloat16)
        check_answers(Path(out), once, again, rounded=rounded)

    def _score(self, files: Sequence[str], out: Path) -> None:
        """Write the answers of a part, unless another worker has."""
        if is_finished(out, files):
            return
        try:
            self._write(files, out)
        except Exception as error:
            if any(file in str(error) for file in files):
                raise
            which = f"one of the {len(files)} files from {files[0]} on" if files[1:] else files[0]
            raise ValueError(f"{which} could not be scored: {_reason(error)}") from error

    def _write(self, files: Sequence[str], out: Path) -> None:
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]

        out.parent.mkdir(parents=True, exist_ok=True)
        about = {INPUTS: looks(files)}  # as they are before they are read
        writer = None
        batches = ahead(self._batches(files, self.batch_size))
        with replacing(out) as temporary, closing(batches):
            try:
                for kept, columns in batches:
                    answers = self._answers(columns)
                    check_names(kept.column_names, answers)
                    for name, array in answers.items():
                        kept = kept.append_column(name, _as_column(pa, array))
                    if writer is None:
                        schema = kept.schema
                        schema = schema.with_metadata({**(schema.metadata or {}), **about})
                        writer = pq.ParquetWriter(temporary, schema)
                    writer.write_table(kept)
            finally:
                if writer is not None:
                    writer.close()

    def _answers(self, columns: dict[str, Array]) -> dict[str, Array]:
        """What the model says; for no rows, empty columns of the same kinds."""
        network = self.model.posterior.network
        if len(columns[self.inputs.column]):
            return self.answers(self.inputs.of(columns, network, self.device))
        dtype, shape = network_dtype_device(network)[0] or torch.float32, self.model._input_shape
        if not isinstance(shape, torch.Size):  # ids, whose number may differ
            raise ValueError("it has no rows, so nothing is known of its inputs; leave it out")
        # Some networks cannot run on no rows, so they run on one that is left out.
        some = torch.zeros(1, *shape, dtype=dtype, device=self.device)
        return {name: array[:0] for name, array in self.answers(some).items()}

    def _batches(self, files: Sequence[str], rows: int) -> Generator[_Read, None, None]:
        """The columns of so many rows at a time; it runs in a thread, while others are scored."""
        import pyarrow as pa

        column = self.inputs.column
        if not is_parquet(files[0]):
            for start in range(0, len(files), rows):
                some = files[start : start + rows]
                images = np.empty(len(some), dtype=object)
                images[:] = [_image(file, self.size) for file in some]
                yield pa.table({"path": list(some)}), {column: images}
            return
        for table in _tables(files[0], rows):
            if column not in table.column_names:
                raise KeyError(
                    f"{files[0]} has the columns {table.column_names}, and no '{column}'; name the "
                    "inputs with column="
                )
            keep = kept_names(table.column_names, column, self.keep)
            values = _array(table.column(column)) if table.num_rows else np.empty(0)
            yield table.select(keep), {column: values}


def score_files(
    inputs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    path: str | os.PathLike[str],
    network: Callable[[], nn.Module],
    *,
    column: str = "x",
    keep: Sequence[str] | None = None,
    scale: float = 1.0,
    preprocess: Callable[[Tensor], Tensor] | None = None,
    autocast: torch.dtype | None = None,
    compile: bool = False,
    size: tuple[int, int] | None = None,
    images_per_file: int = 1024,
    batch_size: int = 512,
    actors: int | tuple[int, int] = 1,
    gpus: float = 0.0,
    cpus: float = 1.0,
) -> list[Path]:
    """Score files, each into one parquet file of answers; a killed run goes on when called again.

    Files of inputs that came since are scored, and those that were written anew are scored again.
    What cannot be scored, such as a damaged file, is named once all other files are scored.

    Args:
        inputs: A folder of parquet files or of images, also in folders below it, or a list of
            folders and files. In folders, names that begin with a dot or an underscore are left
            out. Every machine must see them, and ``out``: folders of a disk that they share.
        out: The folder for the answers. A file of inputs gives a file of the same name there;
            ``images_per_file`` images give one file together, with their paths.
        path: The file that :meth:`rgpr.RGPR.save` wrote.
        network: Makes the network that the weights go into.
        column: Name of the inputs in parquet files: lists, or arrays that Ray wrote.
        keep: Other columns to keep; all but the inputs by default.
        scale: What inputs are multiplied by, e.g. ``1 / 255`` for images, which are bytes.
        preprocess: What is done to a batch of inputs after that; see :class:`Predictor`. Images
            come as (rows, height, width, 3), so ``lambda x: x.permute(0, 3, 1, 2)`` puts their
            channels where convolutions want them.
        autocast: A dtype that ``torch.autocast`` runs the network in.
        compile: Compile network and model as one graph, at the first batch of each actor.
        size: Height and width that images are brought to; as they are by default.
        images_per_file: How many images have their answers in one file.
        batch_size: Rows scored together.
        actors: How many, or the fewest and the most.
        gpus: Number of GPUs that each actor reserves.
        cpus: Number of CPUs that each actor reserves.

    Returns:
        The files of answers, of this run and of those before it.

    Raises:
        FileNotFoundError: There is no such model, or no file of inputs.
        TypeError: ``network`` is no function.
        ValueError: The folder holds answers of another model, other options, or inputs that are
            gone, or lies in that of the inputs; a column to keep has the name of an answer; a file
            of inputs is neither parquet nor an image, or could not be scored; or finished rows get
            other scores now, by another ``preprocess`` or ``network``.
    """
    import ray

    check_counts(batch_size=batch_size, images_per_file=images_per_file)
    named = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    folder, files = Path(out).resolve(), input_files(named)
    parts = parts_of(files, folder, images_per_file)
    check_apart(named, files, parts)
    options: dict[str, Any] = {
        "path": check_file(path),
        "network": check_network(network),
        "column": column,
        "keep": check_keep(keep),
        "scale": float(scale),
        "preprocess": preprocess,
        "autocast": autocast,
        "compile": compile,
        "size": None if size is None else tuple(size),
        "batch_size": batch_size,
    }
    check_known(folder, parts)
    content = digest(options["path"])
    done = {name: part for name, part in parts.items() if is_finished(name, part)}
    compared = options | {"images_per_file": images_per_file}
    check_begun(folder, content, compared, anew=not any(part.exists() for part in parts))
    known = next(((part, str(name)) for name, part in done.items() if _rows(name)), None)
    left = [name for name in parts if name not in done]
    workers = Workers(actors, gpus, cpus)
    if not left:
        # One worker finds out whether the functions are those that the run had.
        left, workers = [] if known is None else [Path(known[1])], Workers(1, gpus, cpus)
    if left:
        items = [{"files": json.dumps(parts[name]), "out": str(name)} for name in left]
        todo = ray.data.from_items(items, override_num_blocks=len(items))
        begun = {"content": content, "finished": known}
        rows = workers.map(todo, FileScorer, 1, **begun, **options).take_all()
        failed = list(dict.fromkeys(row["failed"] for row in rows if row["failed"]))
        if failed:
            more = f" (and {len(failed) - 1} more such errors)" if len(failed) > 1 else ""
            raise ValueError(failed[0] + more)
    return list(parts)


def _reason(error: Exception) -> str:
    """What an error says, or the name of its class where it says nothing."""
    return said(error) or type(error).__name__


def _rows(answers: Path) -> int:
    """How many rows a file of answers has."""
    import pyarrow.parquet as pq

    return int(pq.read_metadata(answers).num_rows)


def _tables(file: str, rows: int) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq
    import ray.data  # noqa: F401  which teaches pyarrow the type of Ray's arrays

    with pq.ParquetFile(file) as content:
        if content.metadata.num_rows == 0:
            yield content.schema_arrow.empty_table()
        for batch in content.iter_batches(batch_size=rows):
            yield pa.Table.from_batches([batch])


def _array(column: Any) -> Array:
    """A column of lists, or of arrays that Ray wrote, as one array a row."""
    whole = column.combine_chunks()
    if hasattr(whole, "chunks"):  # a chunked column
        whole = whole.chunk(0)
    if hasattr(whole, "to_numpy_ndarray"):  # fixed shapes
        return np.asarray(whole.to_numpy_ndarray())
    values = whole.to_numpy(zero_copy_only=False)
    return np.asarray(values)


def _as_column(pa: Any, array: Array) -> Any:
    """An array as a column that every reader of parquet knows; several numbers a row as a list."""
    if array.ndim == 1:
        return pa.array(array)
    flat = pa.array(np.ascontiguousarray(array).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, math.prod(array.shape[1:]))


def _image(file: str, size: tuple[int, int] | None) -> Array:
    """An image as bytes, (height, width, 3)."""
    from PIL import Image

    picture = opened(file).convert("RGB")
    if size is not None:
        picture = picture.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return np.asarray(picture)
