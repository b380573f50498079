"""What a folder of answers remembers of the run that began it, so that another run is refused.

The model is compared by its content, and options by their values. Functions cannot be compared, so
a worker compares what they lead to: it scores the first rows of a finished file again.
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
# Functions cannot be compared; the model's file may be moved; and the size of a batch changes
# answers by no more than rounding.
_NOT_COMPARED = ("network", "preprocess", "path", "batch_size")
# So many rows of a finished file are scored again before a run goes on.
ROWS = 64
# Scores that differ by less are taken for the same, also large ones by this share of them: other
# machines and other sizes of batches round in other ways, in half precision by a hundredth.
_ROUNDING = {False: 1e-2, True: 1e-1}
# So large a share of the rows must have the same scores. Rounding moves the scores of single rows
# far if the network itself hardly says anything of them.
_MOST = 0.9


def digest(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_begun(
    folder: Path, files: Sequence[str], model: str, options: dict[str, Any], *, anew: bool
) -> None:
    """Note what a run begins with, or refuse a run that differs from the one that began.

    Args:
        folder: The folder of answers, which is made if it is not there.
        files: The files of inputs.
        model: The digest of the model's file.
        options: All other arguments by their names.
        anew: Whether no file of answers is finished, so that any run may begin.

    Raises:
        ValueError: The folder holds answers of another model, other options or other inputs, or
            somebody else's files; the error names what differs.
    """
    about = {key: str(value) for key, value in options.items() if key not in _NOT_COMPARED}
    named = hashlib.sha256("\n".join(files).encode()).hexdigest()
    about = {"model": model, "inputs": f"{len(files)} files, {named[:16]}", **about}
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / _ABOUT
    if kept.exists() and not anew:
        remedy = "Call it as before to go on, or name another folder"
        check_same(folder, json.loads(kept.read_text()), about, remedy)
        return
    if not kept.exists() and any(folder.rglob("*.parquet")):
        raise ValueError(f"{folder} holds parquet files of somebody else; name another folder")
    with replacing(kept) as temporary:
        temporary.write_text(json.dumps(about, indent=1))


def check_scores(file: Path, once: Array, again: Array, *, rounded: bool) -> None:
    """Refuse to go on with a run if the first rows of a finished file get other scores now.

    Args:
        file: The finished file of answers.
        once: The scores that its first rows get now.
        again: The same a second time. Posteriors that draw samples differ from one time to the
            next, and may differ from what is in the file by as much.
        rounded: Whether the network runs in half precision.

    Raises:
        ValueError: They are others; the error names what may have changed.
    """
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    with pq.ParquetFile(file) as content:  # which may give fewer rows at a time
        first = next(content.iter_batches(batch_size=len(once), columns=["score"]))
    before = first.column("score").to_numpy(zero_copy_only=False)
    once, again = once[: len(before)], again[: len(before)]
    both = np.isfinite(once) & np.isfinite(again)
    drawn = float(np.abs(once[both] - again[both]).max(initial=0.0))
    rounding = _ROUNDING[rounded]
    same = np.isclose(once, before, rtol=rounding, atol=rounding + 3 * drawn, equal_nan=True)
    if same.mean() < _MOST:
        was, now = (np.round(scores[~same][:3], 2).tolist() for scores in (before, once))
        raise ValueError(
            f"{file} holds answers of another run: some of its first rows have the scores {was}, "
            f"and now they get {now}. Another preprocess=, or other code of the network, may be "
            "the reason. Call it as before to go on, or name another folder"
        )
