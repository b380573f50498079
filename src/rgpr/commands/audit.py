"""``rgpr audit``: from a trained network and its data to a report in one HTML file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .base import Command, register_command
from .calibrate import check_classes
from .fit import add_fitting, fitted
from .shared import (
    CODE,
    Answer,
    add_common,
    add_data,
    add_network,
    answering,
    every_warning_shown,
    file_in_a_folder,
    read_data,
    size,
)

if TYPE_CHECKING:
    from .._files.inputs.data import Data
    from ..model import RGPR


def _named(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not equals or not name or not path:
        raise argparse.ArgumentTypeError(f"'{text}': expected NAME=DATA, as in street=street.npz")
    return name, Path(path)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_network(parser, required=True)
    data = parser.add_argument_group("what is looked at")
    data.add_argument(
        "--fitted",
        type=Path,
        metavar="FILE",
        help="a model by rgpr fit or calibrate, in place of --weights, --train and --val",
    )
    data.add_argument("--train", type=Path, metavar="DATA", help="the training data")
    data.add_argument(
        "--val", type=Path, metavar="DATA", help="held-out data, for p-values and thresholds"
    )
    data.add_argument(
        "--test", type=Path, required=True, metavar="DATA", help="more held-out data, with targets"
    )
    data.add_argument(
        "--ood",
        type=_named,
        action="append",
        default=[],
        metavar="NAME=DATA",
        help="inputs that the network was not trained for; may be given several times",
    )
    parser.add_argument("--title", default="", help="the report's title (default: that of --model)")
    parser.add_argument(
        "--image",
        type=size,
        metavar="HxW",
        help="draw flat inputs as images of this size (default: only image folders and arrays with "
        "two or three axes for each input are drawn)",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the report, as .html"
    )
    add_fitting(parser)
    add_data(parser)
    add_common(parser)


def _run(options: argparse.Namespace) -> Answer:
    from ..audit import audit
    from ..audit.remarks import heard
    from ..audit.report import check_name

    check_name(options.out)
    file_in_a_folder(options.out)
    if (options.fitted is None) == (options.train is None):
        raise ValueError("give either --fitted FILE, or --train DATA to fit a model first")
    if options.fitted is not None and options.val is not None:
        raise ValueError("--fitted FILE was calibrated or not; rgpr calibrate does it with --val")
    show = not options.no_progress
    with every_warning_shown(), heard() as notes:
        model, about, classes = _model(options, show)
        sets = {}
        for name, path in [("test", options.test), *options.ood]:
            if name in sets:
                raise ValueError(f"--ood {name}=...: this name is taken; choose another")
            sets[name] = _batches(options, path, model)
        test = sets.pop("test")
        report = audit(
            model,
            test,
            sets,
            title=options.title or _title(options.model),
            classes=test.data.classes or classes,
            image=options.image or _image(options, test.data),
            notes=notes,
            progress=show,
        )
    report.save(options.out)
    found = report.evaluation
    skipped = [line for each in (test, *sets.values()) for line in each.data.skipped]
    lines = [
        *about,
        *str(found).splitlines(),
        *(f"left out: {line}" for line in skipped),
        f"wrote {options.out}",
    ]
    told = {
        "out": options.out,
        "answers": found.answers,
        "alarms": found.alarms,
        "flagged": found.flagged,
        "detection": found.detection,
        "like_held_out": found.like_held_out,
        "warnings": report.warnings,
        "skipped": skipped,
    }
    return Answer(lines, told)


def _title(model: str) -> str:
    """The last part of the network's name: of ``nets:digits`` it is ``digits``."""
    return Path(model).stem if model.endswith(".pt2") else model.rpartition(":")[2]


def _image(options: argparse.Namespace, data: Data) -> tuple[int, ...] | None:
    """The shape of images of a folder, which ``--preprocess`` may make flat."""
    if options.preprocess is None or not options.test.is_dir():
        return None
    first = next((piece.x for piece in data.source.pieces(1, 0) if len(piece.x)), None)
    return None if first is None else tuple(first.shape[1:])


def _model(
    options: argparse.Namespace, show: bool
) -> tuple[RGPR, list[str], tuple[str, ...] | None]:
    """The model, fitted and calibrated, what was done for it, and the names of its classes."""
    if options.fitted is not None:
        from .._files.networks.networks import model as load_model

        return load_model(options.fitted, options.model, options.device), [], None
    model, train = fitted(options)
    lines = [f"fitted on {train.about}"]
    if options.val is not None:
        val = _batches(options, options.val, model)
        model.calibrate(val, progress=show)
        lines += [f"calibrated on {val.data.about}"]
    return model, lines, train.classes


def _batches(options: argparse.Namespace, path: Path, model: RGPR) -> Any:
    from .._files.outputs.answers import Levels, from_model

    takes = from_model(model, Levels())
    data = read_data(options, path, takes.dtype, takes.shape)
    check_classes(model, data)
    return data.batches(takes.columns)


register_command(
    "audit",
    Command(
        "a report on a trained network, as one HTML file to look at and to pass on",
        _add_options,
        answering(_run),
        "Fit and calibrate a trained network, or take a model that was, and look at it from all\n"
        "sides: how good and how honest its answers are, how sure it is far away, whether it\n"
        "notices strange inputs, and which these are. The report is one HTML file that loads\n"
        "nothing from elsewhere." + CODE,
        "rgpr audit --model nets:net --weights w.pt --train t.npz --val v.npz --test s.npz "
        "--ood a=a.npz --out r.html\n"
        "rgpr audit --fitted m.safetensors --model nets:digits --test test.npz --out report.html",
    ),
)
