"""``rgpr monitor``: have inputs stopped being like the validation data?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

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
)

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
    add_data(parser)
    add_common(parser)


def _run(options: argparse.Namespace) -> Answer:
    from .._atomic import replacing
    from .._axes import write
    from .._files.networks.networks import model as load_model
    from .._files.outputs.answers import Levels, from_model
    from ..audit import Monitor

    for path in (options.state, options.log, options.prometheus, options.plot):
        if path is not None:
            file_in_a_folder(path)
    model = load_model(options.file, options.model, options.device)
    takes = from_model(model, Levels())
    data = read_data(options, options.data, takes.dtype, takes.shape)
    data.check_columns(takes.columns)
    if options.state.exists():
        monitor = Monitor.load(options.state, model)
        if options.alpha not in (None, monitor.alpha):
            raise ValueError(
                f"--alpha {options.alpha}, but {options.state} was begun with {monitor.alpha}; "
                "leave it out, or begin another state"
            )
    else:
        monitor = Monitor(model, 0.01 if options.alpha is None else options.alpha)
    before, alarmed = monitor.count, monitor.alarm
    for batch in data:
        x = batch[0] if isinstance(batch, tuple) else batch
        monitor.update(x.to(model._device))
    # The state is written first and once: a run that is killed before counts as not made.
    monitor.save(options.state)
    line = monitor.to_json_line()
    if options.log is not None:
        with options.log.open("a", encoding="utf-8") as log:
            log.write(line.rstrip() + "\n")
    if options.prometheus is not None:
        with replacing(options.prometheus) as temporary:
            Path(temporary).write_text(monitor.prometheus(), encoding="utf-8")
    if options.plot is not None:
        write(monitor.plot()[0], options.plot)
    told = json.loads(line)
    lines = [
        data.about,
        f"read {monitor.count - before} inputs, {monitor.count} in all",
        repr(monitor),
        f"wrote {options.state}",
    ]
    new = monitor.alarm and not alarmed
    return Answer(
        lines, {**told, "state": options.state, "new": new}, ALARM if monitor.alarm else 0
    )


register_command(
    "monitor",
    Command(
        "raise an alarm when new inputs stop being like the validation data",
        _add_options,
        answering(_run),
        "Read new inputs in their order, and say whether they are still like the validation data.\n"
        "Run it for every new file with the same --state: the chance of ever raising a false\n"
        "alarm is at most alpha, however long this goes on. A run that is killed changes nothing.\n"
        f"The exit code is {ALARM} once there is an alarm." + CODE,
        "rgpr monitor m.safetensors monday.parquet --model nets:digits --state watch.safetensors\n"
        "rgpr monitor m.safetensors tuesday.parquet --model nets:digits --state watch.safetensors",
    ),
)
