"""``rgpr predict`` and ``rgpr score``: answers for data of any size, into one file."""

from __future__ import annotations

import argparse
from pathlib import Path

from .base import Command, register_command
from .shared import (
    CODE,
    Answer,
    add_common,
    add_data,
    add_network,
    answering,
    count,
    read_data,
    settings_of,
)

_FORMS = (".parquet", ".csv", ".npz")
_AGAIN = """
Rows are read, answered and written in chunks. A run that was interrupted or killed goes on where it
was when the same command is started again, and gives the same file. Until then FILE.parts beside
the output holds what is finished."""


def _out(text: str) -> Path:
    if not text.endswith(_FORMS):
        raise argparse.ArgumentTypeError(
            f"'{text}': expected a name that ends in .parquet, .csv or .npz"
        )
    return Path(text)


def _add_score_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="the model: .safetensors by rgpr fit or calibrate, or .pt2 by rgpr export",
    )
    parser.add_argument("data", type=Path, metavar="DATA", help="what to answer for")
    add_network(parser, required=False)
    parser.add_argument(
        "--out",
        type=_out,
        required=True,
        metavar="FILE",
        help="the answers: .parquet, .csv or .npz, a row for each input",
    )
    parser.add_argument(
        "--chunk",
        type=count,
        default=8192,
        metavar="ROWS",
        help="rows that are written at once, and lost at most by a kill (default: 8192)",
    )
    parser.add_argument(
        "--restart", action="store_true", help="throw away what an earlier run left unfinished"
    )
    add_data(parser)
    add_common(parser)


def _add_predict_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--alpha",
        type=float,
        help="flag at most this share of inputs like the held-out data (default: 0.05)",
    )
    parser.add_argument(
        "--coverage",
        type=float,
        help="the probability that sets and intervals hold the target (default: 0.9)",
    )
    _add_score_options(parser)


def _run(options: argparse.Namespace) -> Answer:
    from .._files.inputs.data import Data
    from .._files.outputs.answers import Levels, opened
    from .._files.outputs.parts import Parts
    from .._files.outputs.streaming import Stream

    scores = options.command == "score"
    levels = Levels(scores=True) if scores else Levels(options.alpha, options.coverage)
    takes = opened(options.file, options.model, options.device, levels)
    data: Data = read_data(options, options.data, takes.dtype, takes.shape)
    data.check_columns(takes.columns)
    if len(data) == 0:
        raise ValueError(f"{data.name} has no rows")
    parts = Parts(options.out, settings_of(options, "restart", "out"), restart=options.restart)
    stream = Stream(
        data,
        takes.of,
        options.chunk,
        progress=not options.no_progress,
        description=f"rgpr {options.command}",
    )
    done = stream.into(parts)
    joined = done.joined
    lines = [data.about]
    if done.taken_up:
        lines.append(f"went on behind {done.taken_up} rows of an earlier run")
    lines.append(f"answered {joined.rows} rows: {', '.join(joined.names)}")
    if not takes.calibrated:
        lines.append(
            "not calibrated, so there are no p-values, flags and sets: rgpr calibrate FILE "
            "--model M --val DATA --out FILE"
        )
    if joined.flagged is not None:
        lines.append(f"flagged as too strange: {joined.flagged} of {joined.rows}")
    lines += [f"left out: {line}" for line in done.skipped]
    report = {
        "out": options.out,
        "data": data.about,
        "rows": joined.rows,
        "taken_up": done.taken_up,
        "answers": joined.names,
        "flagged": joined.flagged,
        "calibrated": takes.calibrated,
        "skipped": done.skipped,
    }
    return Answer([*lines, f"wrote {options.out}"], report)


register_command(
    "predict",
    Command(
        "every answer for data of any size: probabilities, scores, p-values, flags, sets",
        _add_predict_options,
        answering(_run),
        "Write every answer that the model has for each row of the data." + _AGAIN + CODE,
        "rgpr predict m.safetensors --model nets:digits new.csv --out answers.parquet\n"
        "rgpr predict m.pt2 new.npz --out answers.csv --alpha 0.01",
    ),
)
register_command(
    "score",
    Command(
        "how strange each row is: scores and p-values alone",
        _add_score_options,
        answering(_run),
        "Write how strange each row of the data is: its score and, of a calibrated model, its\n"
        "p-value." + _AGAIN + CODE,
        "rgpr score m.safetensors --model nets:digits new.csv --out scores.csv\n"
        "rgpr score m.pt2 photos --size 224x224 --out scores.parquet",
    ),
)
