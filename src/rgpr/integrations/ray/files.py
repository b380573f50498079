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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..._atomic import replacing
from ..._images import ENDINGS, opened
from ..._network.checks import network_dtype_device
from .ahead import ahead
from .begun import ROWS, check_begun, check_scores, digest
from .columns import Array, Workers
from .scoring import Predictor, check_file, check_names

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

    Raises:
        ValueError: The file of the model was replaced since the run began, or rows of the finished
            part get other scores now.
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
        if content is not None and digest(options["path"]) != content:
            raise ValueError(
                f"{options['path']} is no longer the model that this run began with; put that one "
                "back to go on, or name another folder for the answers of the new one"
            )
        if finished is not None:
            files, out = finished
            with closing(self._batches(files, ROWS)) as batches:
                check_scores(Path(out), self._answers(next(batches)[1])["score"])

    def __call__(self, batch: dict[str, Array]) -> dict[str, Array]:
        """The number of rows of every part, once its answers are in their file."""
        parts = zip(batch["files"], batch["out"], strict=True)
        return {
            "rows": np.array([self._score(json.loads(files), Path(out)) for files, out in parts])
        }

    def _score(self, files: Sequence[str], out: Path) -> int:
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]

        out.parent.mkdir(parents=True, exist_ok=True)
        rows, writer = 0, None
        batches = ahead(self._batches(files, self.batch_size))
        with replacing(out) as temporary, closing(batches):
            try:
                for kept, columns in batches:
                    answers = self._answers(columns)
                    check_names(kept.column_names, answers)
                    for name, array in answers.items():
                        kept = kept.append_column(name, _as_column(pa, array))
                    if writer is None:
                        writer = pq.ParquetWriter(temporary, kept.schema)
                    writer.write_table(kept)
                    rows += kept.num_rows
            finally:
                if writer is not None:
                    writer.close()
        return rows

    def _answers(self, columns: dict[str, Array]) -> dict[str, Array]:
        """What the model says; for no rows, empty columns of the same kinds."""
        network = self.model.posterior.network
        if len(columns[self.inputs.column]):
            return self.answers(self.inputs.of(columns, network, self.device))
        dtype, shape = network_dtype_device(network)[0] or torch.float32, self.model._input_shape
        assert isinstance(shape, torch.Size)  # of one tensor: a column is one
        # Some networks cannot run on no rows, so they run on one that is left out.
        some = torch.zeros(1, *shape, dtype=dtype, device=self.device)
        return {name: array[:0] for name, array in self.answers(some).items()}

    def _batches(self, files: Sequence[str], rows: int) -> Generator[_Read, None, None]:
        """The columns of so many rows at a time; it runs in a thread, while others are scored."""
        import pyarrow as pa

        column = self.inputs.column
        if not _is_parquet(files[0]):
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
            keep = (
                [n for n in table.column_names if n != column] if self.keep is None else self.keep
            )
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

    Args:
        inputs: A folder of parquet files or of images, also in folders below it, or a list of them.
            Every machine must see them, and ``out``: folders of a disk that they share.
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
        ValueError: The folder holds answers of another model, other options or other inputs, or
            lies in that of the inputs; a column to keep has the name of an answer.
        ray.exceptions.RayError: A worker failed. If a run goes on with another ``preprocess`` or
            ``network``, so that finished rows get other scores now, the message says so.
    """
    import ray

    folder, files = Path(out).resolve(), _files(inputs)
    _check_apart(inputs, folder)
    parts = _parts(files, folder, images_per_file)
    options: dict[str, Any] = {
        "path": check_file(path),
        "network": network,
        "column": column,
        "keep": keep,
        "scale": scale,
        "preprocess": preprocess,
        "autocast": autocast,
        "compile": compile,
        "size": size,
        "batch_size": batch_size,
    }
    content = digest(options["path"])
    check_begun(folder, files, content, options | {"images_per_file": images_per_file})
    left = [
        {"files": json.dumps(part), "out": str(name)}
        for name, part in parts.items()
        if not name.exists()
    ]
    if left:
        todo = ray.data.from_items(left, override_num_blocks=len(left))
        workers = Workers(actors, gpus, cpus)
        begun = {"content": content, "finished": _finished(parts)}
        workers.map(todo, FileScorer, 1, **begun, **options).materialize()
    return list(parts)


def _files(inputs: Any) -> list[str]:
    """The files of inputs, all of one kind, in the order of their names."""
    if isinstance(inputs, str | os.PathLike):
        root = Path(inputs)
        found = [root] if root.is_file() else [each for each in root.rglob("*") if each.is_file()]
    else:
        found = [Path(each) for each in inputs]
    wanted = sorted(
        str(p.resolve()) for p in found if _is_parquet(p) or p.suffix.lower() in ENDINGS
    )
    missing = [name for name in wanted if not os.path.exists(name)]
    if missing or not wanted:
        what = missing[0] if missing else f"{inputs} with parquet files or images"
        raise FileNotFoundError(f"there is no {what}")
    if len({_is_parquet(name) for name in wanted}) > 1:
        raise ValueError(f"{inputs} holds both parquet files and images; pass one kind at a time")
    return wanted


def _is_parquet(file: str | os.PathLike[str]) -> bool:
    return Path(file).suffix.lower() == ".parquet"


def _check_apart(inputs: Any, folder: Path) -> None:
    """Refuse a folder of answers in which a later run would look for inputs."""
    if isinstance(inputs, str | os.PathLike) and Path(inputs).is_dir():
        root = Path(inputs).resolve()
        if folder.is_relative_to(root):
            raise ValueError(
                f"{folder} is in the folder of inputs {root}, where a later run would take the "
                "answers for inputs; name a folder outside of it"
            )


def _parts(files: list[str], folder: Path, images: int) -> dict[Path, list[str]]:
    """Which files go into which file of answers."""
    if _is_parquet(files[0]):
        root = os.path.commonpath([os.path.dirname(name) for name in files])
        return {folder / os.path.relpath(name, root): [name] for name in files}
    starts = range(0, len(files), images)
    return {
        folder / f"images-{start:09d}.parquet": files[start : start + images] for start in starts
    }


def _finished(parts: dict[Path, list[str]]) -> tuple[list[str], str] | None:
    """A part whose file of answers is there and has rows, as its inputs and that file."""
    import pyarrow.parquet as pq

    for name, files in parts.items():
        if name.exists() and pq.read_metadata(name).num_rows > 0:
            return files, str(name)
    return None


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
