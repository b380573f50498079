"""``rgpr calibrate``: learn from held-out data what only such data can tell."""

from __future__ import annotations

import argparse
import dataclasses
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
    every_warning_shown,
    file_in_a_folder,
    model_file,
    read_data,
)

if TYPE_CHECKING:
    from .._files.inputs.data import Data
    from ..model import RGPR

__all__ = ["check_classes"]


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the model, by rgpr fit")
    add_network(parser, required=True)
    parser.add_argument(
        "--val",
        type=Path,
        required=True,
        metavar="DATA",
        help="data that were held out from training, with or without targets",
    )
    parser.add_argument(
        "--max-nll-increase",
        type=float,
        default=0.005,
        help="how much worse the mean negative log-likelihood may become (default: 0.005)",
    )
    parser.add_argument(
        "--out",
        type=model_file,
        required=True,
        metavar="FILE",
        help="the calibrated model, as .safetensors; it may be the same file",
    )
    add_data(parser)
    add_common(parser)


def _run(options: argparse.Namespace) -> Answer:
    from .._files.networks.networks import model as load_model
    from .._files.outputs.answers import Levels, from_model

    file_in_a_folder(options.out)
    model = load_model(options.file, options.model, options.device)
    takes = from_model(model, Levels())
    data = read_data(options, options.val, takes.dtype, takes.shape)
    check_classes(model, data)
    with every_warning_shown():
        report = model.calibrate(
            data.batches(takes.columns),
            max_nll_increase=options.max_nll_increase,
            progress=not options.no_progress,
        )
    model.save(options.out)
    lines = [
        data.about,
        # Warnings stand on stderr, so that a pipe gets the answer alone.
        *str(dataclasses.replace(report, warnings=[])).splitlines(),
        *(f"left out: {line}" for line in data.skipped),
        f"wrote {options.out}",
    ]
    told = {"out": options.out, "data": data.about, "skipped": data.skipped}
    return Answer(lines, {**told, **dataclasses.asdict(report)})


def check_classes(model: RGPR, data: Data) -> None:
    """Refuse folders of classes that cannot be numbered as the network's outputs are."""
    import torch

    if data.classes is None or not model._likelihood.sets:
        return
    with torch.no_grad():
        outputs = model(data.first()[0][:1].to(model._device)).shape[1]
    if len(data.classes) != outputs:
        raise ValueError(
            f"{data.path} has {len(data.classes)} classes, {', '.join(data.classes[:5])}"
            f"{', ...' if len(data.classes) > 5 else ''}, and the network {outputs} outputs. Name "
            "all classes by --classes, in the order of the outputs"
        )


register_command(
    "calibrate",
    Command(
        "learn p-values, sets and the temperature from held-out data",
        _add_options,
        answering(_run),
        "Learn from held-out data what p-values, flags, sets and intervals promise, and the\n"
        "temperature. Inputs alone are enough for p-values and flags. Calibrating again starts\n"
        "anew." + CODE,
        "rgpr calibrate m.safetensors --model nets:digits --val val.npz --out m.safetensors",
    ),
)
