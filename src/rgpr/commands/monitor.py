"""``rgpr monitor``: have inputs stopped being like the validation data?"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from .base import Command, register_command
from .shared import (
    CODE,
    Answer,
    add_common,
    add_data,
    add_network,
    answering,
    file_in_a_folder,
    read_data,
    settings_of,
)

if TYPE_CHECKING:
    from .._files.inputs.data import Data
    from ..audit import Monitor
    from ..audit.monitor.unfinished import Unfinished

ALARM = 3


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a model by rgpr calibrate")
    parser.add_argument("data", type=Path, metavar="DATA", help="new inputs, in their order")
    add_network(parser, required=True)
    parser.add_argument(
        "--state",
        type=Path,
        required=True,
        metavar="FILE",
        help="what the monitor remembers, as .safetensors; made by the first run",
    )
    parser.add_argument(
        "--alpha",
        type=float,
        default=None,
        help="the chance of ever raising a false alarm (default: 0.01); fixed by the first run",
    )
    parser.add_argument(
        "--log", type=Path, metavar="FILE", help="add a JSON line for this run to a file"
    )
    parser.add_argument(
        "--prometheus", type=Path, metavar="FILE", help="write the text that Prometheus reads"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture, as .png or .svg")
    parser.add_argument(
        "--save-every",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="how often to keep what is read, and what a kill loses at most (default: 30)",
    )
    parser.add_argument(
        "--restart", action="store_true", help="throw away what an earlier run left unfinished"
    )
    add_data(parser)
    add_common(parser)


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}': expected a number of seconds, such as 30")
    return found


def _run(options: argparse.Namespace) -> Answer:
    from .._axes import check_form
    from .._resuming import alone

    for path in (options.state, options.prometheus, options.plot):
        if path is not None:
            file_in_a_folder(path)
    if options.log is not None:
        file_in_a_folder(options.log, added_to=True)
    if options.plot is not None:
        check_form(options.plot)
    if options.state.is_symlink():  # two links to one state are one state
        options.state = Path(os.path.realpath(options.state))
    lock = options.state.with_name(f"{options.state.name}.lock")
    with alone(lock, options.state, "--state"):
        return _run_alone(options)


def _run_alone(options: argparse.Namespace) -> Answer:
    from .._atomic import replacing
    from .._files.networks.networks import model as load_model
    from .._files.outputs.answers import Levels, from_model
    from ..audit import Monitor
    from ..audit.monitor.unfinished import Unfinished

    model = load_model(options.file, options.model, options.device)
    takes = from_model(model, Levels())
    data = read_data(options, options.data, takes.dtype, takes.shape)
    data.check_columns(takes.columns)
    silent = ("on_error", "log", "prometheus", "plot", "save_every", "state", "restart")
    settings = settings_of(options, *silent)
    unfinished = Unfinished(options.state, settings, options.save_every, restart=options.restart)
    monitor = unfinished.begun(model)
    if monitor is None:
        monitor = Monitor(model, 0.01 if options.alpha is None else options.alpha)
    elif options.alpha not in (None, monitor.alpha):
        raise ValueError(
            f"--alpha {options.alpha}, but {options.state} was begun with {monitor.alpha}; "
            "leave it out, or begin another state"
        )
    taken_up = unfinished.rows
    if not unfinished.finished:
        _read(monitor, data, unfinished)
        if monitor.count == unfinished.before:
            options.state.with_name(f"{options.state.name}.part").unlink(missing_ok=True)
            raise data.without_rows()
        unfinished.finish(monitor)
    # What follows is made from the state, and made again if this run is started again.
    line = monitor.to_json_line()
    if options.log is not None and not (unfinished.finished and _has(options.log, line)):
        with options.log.open("a", encoding="utf-8") as log:
            log.write(f"{line}\n")
    if options.prometheus is not None:
        with replacing(options.prometheus) as temporary:
            temporary.write_text(monitor.prometheus(), encoding="utf-8")
    if options.plot is not None:
        monitor.plot(options.plot)
    told = json.loads(line)
    new = monitor.when is not None and monitor.when > unfinished.before
    return Answer(
        [data.about, *_said(options.state, unfinished, taken_up, monitor, data.skipped)],
        {
            **told,
            "state": options.state,
            "new": new,
            "taken_up": taken_up,
            "skipped": data.skipped,
        },
        ALARM if monitor.alarm else 0,
    )


def _said(
    state: Path, run: Unfinished, taken_up: int, monitor: Monitor, skipped: list[str]
) -> list[str]:
    """What a run did, in words."""
    if run.finished:
        before = "the same command finished this run before, so nothing was read"
        return [f"{before}; {monitor.count} inputs in all", repr(monitor)]
    return [
        *([f"went on behind {taken_up} rows of an earlier run"] if taken_up else []),
        f"read {monitor.count - run.before} inputs, {monitor.count} in all",
        repr(monitor),
        *(f"left out: {line}" for line in skipped),
        f"wrote {state}",
    ]


def _has(log: Path, line: str) -> bool:
    """Whether a log has a line."""
    if not log.is_file():
        return False
    with log.open(encoding="utf-8") as lines:
        return any(each.rstrip("\n") == line for each in lines)


def _read(monitor: Monitor, data: Data, unfinished: Unfinished) -> None:
    """Read the rows that are not read yet; what is read is kept if anything stops it."""
    device, whole = monitor.model._device, True
    try:
        for piece in data.pieces(unfinished.rows):
            new = False
            if len(piece.x):
                scores = monitor._scores(piece.x.to(device))
                whole = False
                new = monitor.update_scores(*scores).new
            unfinished.read(monitor, len(piece.x) + len(piece.skipped), now=new)
            whole = True
    except BaseException:
        if whole and unfinished.rows:  # stopped between two batches, and not inside an update
            unfinished.write(monitor)
        raise


register_command(
    "monitor",
    Command(
        "raise an alarm when new inputs stop being like the validation data",
        _add_options,
        answering(_run),
        "Read new inputs in their order, and say whether they are still like the validation data.\n"
        "Run it for every new file with the same --state: the chance of ever raising a false\n"
        "alarm is at most alpha, however long this goes on. A run that was interrupted or killed\n"
        "goes on where it was when the same command is started again, and gives the same. Until\n"
        "then FILE.part beside the state holds what was read, and the state is as it was before.\n"
        "If the state holds all of the run already, only the log, the text and the picture are\n"
        "written again, and no row counts twice.\n"
        f"The exit code is {ALARM} once there is an alarm." + CODE,
        "rgpr monitor m.safetensors monday.parquet --model nets:digits --state watch.safetensors\n"
        "rgpr monitor m.safetensors tuesday.parquet --model nets:digits --state watch.safetensors",
    ),
)
