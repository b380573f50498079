"""What a folder of answers remembers of the run that began it, so that another run is refused.

The model is compared by its content, options by their values, and files of inputs by their names,
sizes and times of change. Functions cannot be compared, so a worker compares what they lead to: it
scores the first rows of a finished file again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..._atomic import replacing
from ..._resuming import check_same
from .columns import Array

__all__ = ["ROWS", "check_begun", "check_scores", "digest"]

# Readers of folders of parquet leave out names that begin with an underscore.
_ABOUT = "_rgpr.json"
# Functions cannot be compared, and the model's file may be moved.
_NOT_COMPARED = ("network", "preprocess", "path")
# So many rows of a finished file are scored again before a run goes on.
ROWS = 64
# Scores that differ by less are taken for the same, also for large scores by this share of them.
# Rounding changes a score by less than a hundredth, in half precision too; a batch that was
# prepared in another way changes it by far more.
_ROUNDING = 0.1


def digest(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_begun(folder: Path, files: Sequence[str], model: str, options: dict[str, Any]) -> None:
    """Note what a run begins with, or refuse a run that differs from the one that began.

    Args:
        folder: The folder of answers, which is made if it is not there.
        files: The files of inputs.
        model: The digest of the model's file.
        options: All other arguments by their names.

    Raises:
        ValueError: The folder holds answers of another model, other options or other inputs, or
            somebody else's files; the error names what differs.
    """
    about = {key: str(value) for key, value in options.items() if key not in _NOT_COMPARED}
    about = {"model": model, "inputs": _named(files), "their content": _looks(files), **about}
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / _ABOUT
    if kept.exists():
        remedy = "Call it as before to go on, or name another folder"
        check_same(folder, json.loads(kept.read_text()), about, remedy)
        return
    if any(folder.rglob("*.parquet")):
        raise ValueError(f"{folder} holds parquet files of somebody else; name another folder")
    with replacing(kept) as temporary:
        temporary.write_text(json.dumps(about, indent=1))


def _named(files: Sequence[str]) -> str:
    return f"{len(files)} files, {_shortened(files)}"


def _looks(files: Sequence[str]) -> str:
    """The sizes and times of change of some files, which tell that one was written anew."""
    found = [os.stat(file) for file in files]
    times = _shortened(f"{each.st_size} {each.st_mtime_ns}" for each in found)
    return f"{sum(each.st_size for each in found)} bytes, {times}"


def _shortened(lines: Any) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def check_scores(file: Path, now: Array) -> None:
    """Refuse to go on with a run if the first rows of a finished file get other scores now.

    Half of the rows must agree, and not all of them, because some posteriors draw samples.

    Args:
        file: The finished file of answers.
        now: The scores that its first rows get now.

    Raises:
        ValueError: They are others; the error names what may have changed.
    """
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    with pq.ParquetFile(file) as content:  # which may give fewer rows at a time
        first = next(content.iter_batches(batch_size=len(now), columns=["score"]))
    before = first.column("score").to_numpy(zero_copy_only=False)
    now = now[: len(before)]
    same = np.isclose(now, before, rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True)
    if same.mean() < 0.5:
        was, is_now = (np.round(scores[:3], 2).tolist() for scores in (before, now))
        raise ValueError(
            f"{file} holds answers of another run: its first rows have the scores {was}, and now "
            f"they get {is_now}. Another preprocess=, or other code of the network, may be the "
            "reason. Call it as before to go on, or name another folder"
        )
