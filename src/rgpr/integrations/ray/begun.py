"""What a folder of answers remembers of the run that began it, so that another run is refused.

The model is compared by its content, and options by their values. Functions cannot be compared, so
a worker compares what they lead to: it scores the first rows of a finished file again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..._atomic import replacing
from ..._resuming import check_same
from .columns import Array

__all__ = ["ROWS", "check_answers", "check_begun"]

# Readers of folders of parquet leave out names that begin with an underscore.
_ABOUT = "_rgpr.json"
# Functions cannot be compared; the model's file may be moved; and the size of a batch changes
# answers by no more than rounding.
_NOT_COMPARED = ("network", "preprocess", "path", "batch_size")
# So many rows of a finished file are scored again before a run goes on.
ROWS = 64
# Answers that differ by less are taken for the same, also large ones by this share of them: other
# machines and other sizes of batches round in other ways, in half precision by a hundredth.
_ROUNDING = {False: 1e-2, True: 1e-1}
# So large a share of the rows must have the same answers. Rounding moves the score of a row far if
# the network itself hardly says anything of it.
_MOST = 0.9


def check_begun(folder: Path, model: str, options: dict[str, Any], *, anew: bool) -> None:
    """Note what a run begins with, or refuse a run that differs from the one that began.

    Args:
        folder: The folder of answers, which is made if it is not there.
        model: The digest of the model's file.
        options: All other arguments by their names.
        anew: Whether there is no file of answers, so that any run may begin.

    Raises:
        ValueError: The folder holds answers of another model or other options; the error names
            what differs.
    """
    about = {key: str(value) for key, value in options.items() if key not in _NOT_COMPARED}
    about = {"model": model, **about}
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / _ABOUT
    if kept.exists() and not anew:
        remedy = "Call it as before to go on, or name another folder"
        check_same(folder, json.loads(kept.read_text()), about, remedy)
        return
    with replacing(kept) as temporary:
        temporary.write_text(json.dumps(about, indent=1))


def check_answers(
    file: Path, once: Mapping[str, Array], again: Mapping[str, Array], *, rounded: bool
) -> None:
    """Refuse to go on with a run if the first rows of a finished file get other answers now.

    Args:
        file: The finished file of answers.
        once: The answers that its first rows get now.
        again: The same a second time. Posteriors that draw samples differ from one time to the
            next, and may differ from what is in the file by as much.
        rounded: Whether the network runs in half precision.

    Raises:
        ValueError: They are others; the error names what may have changed.
    """
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    names = [name for name in ("score", "probabilities", "mean") if name in once]
    with pq.ParquetFile(file) as content:  # which may give fewer rows at a time
        first = next(content.iter_batches(batch_size=len(once["score"]), columns=names))
    for name in names:
        column = first.column(name)
        values = column.flatten() if hasattr(column, "flatten") else column  # of a column of lists
        before = values.to_numpy(zero_copy_only=False).reshape(len(first), -1)
        now, then = (each[name][: len(first)].reshape(len(first), -1) for each in (once, again))
        both = np.isfinite(now) & np.isfinite(then)
        drawn = float(np.abs(now[both] - then[both]).max(initial=0.0))
        room = _ROUNDING[rounded]
        close = np.isclose(now, before, rtol=room, atol=room + 3 * drawn, equal_nan=True)
        same = close.all(1)
        if same.mean() < _MOST:
            was, is_now = (np.round(rows[~same][0], 3).tolist() for rows in (before, now))
            raise ValueError(
                f"{file} holds answers of another run: one of its first rows has the {name} {was}, "
                f"and now it gets {is_now}. Another preprocess=, or other code of the network, may "
                "be the reason. Call it as before to go on, or name another folder"
            )
