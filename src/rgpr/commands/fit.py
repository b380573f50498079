"""``rgpr fit``: wrap a trained network and fit its residual to the training data."""

from __future__ import annotations

import argparse
import warnings
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
    model_file,
    read_data,
    words,
)

if TYPE_CHECKING:
    from .._files.inputs.data import Data
    from ..model import RGPR

__all__ = ["add_fitting", "fitted"]


def add_fitting(parser: argparse.ArgumentParser) -> None:
    """How the residual of a trained network is fitted."""
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="FILE",
        help=".safetensors, or .pt of tensors alone; without it the factory's own",
    )
    parser.add_argument(
        "--layers",
        type=words,
        metavar="A,B",
        help="names or globs of modules, with commas (default: auto)",
    )
    parser.add_argument(
        "--likelihood",
        choices=("classification", "multilabel", "regression"),
        help="what the outputs are (default: classification)",
    )
    parser.add_argument(
        "--residual",
        choices=("onset", "paper"),
        default="onset",
        help="how distance becomes variance (default: onset)",
    )
    parser.add_argument(
        "--input", metavar="LAYER", help="where inputs are ids: the module that reads them"
    )


def fitted(options: argparse.Namespace) -> tuple[RGPR, Data]:
    """The model that the options describe, fitted, and its training data."""
    from .._files.networks.networks import dtype_of, network, placed
    from ..model import RGPR

    if options.weights is None and not options.model.endswith(".pt2"):
        warnings.warn(
            f"no --weights: the weights are those that {options.model} makes; if these are random, "
            "so are the answers",
            stacklevel=2,
        )
    base = placed(network(options.model, options.weights), options.device)
    data = read_data(options, options.train, dtype_of(base))
    model = RGPR(
        base,
        "auto" if options.layers is None else list(options.layers),
        options.likelihood,
        residual=options.residual,
        input=options.input,
    )
    model.fit(data.batches(), progress=not options.no_progress)
    return model, data


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_network(parser, required=True)
    parser.add_argument(
        "--train", type=Path, required=True, metavar="DATA", help="the training data"
    )
    add_fitting(parser)
    parser.add_argument(
        "--out", type=model_file, required=True, metavar="FILE", help="the model, as .safetensors"
    )
    add_data(parser)
    add_common(parser)


def _run(options: argparse.Namespace) -> Answer:
    file_in_a_folder(options.out)
    model, data = fitted(options)
    model.save(options.out)
    count = int(model._fit_count) if model._fit_count is not None else len(data)
    report = {
        "out": options.out,
        "data": data.about,
        "rows": count,
        "likelihood": model.likelihood,
        "layers": model.layers,
        "columns": data.columns,
        "classes": data.classes,
        "skipped": data.skipped,
    }
    lines = [
        data.about,
        f"fitted for {model.likelihood} on {count} inputs",
        f"layers: {', '.join(model.layers)}",
        *(f"left out: {line}" for line in data.skipped),
        f"wrote {options.out}",
    ]
    return Answer(lines, report)


register_command(
    "fit",
    Command(
        "fit a trained network's residual to its training data, and write the model",
        _add_options,
        answering(_run),
        "Fit the residual of a trained network in one pass over its training data. The network is\n"
        "not changed. The model is written when all is done, or not at all." + CODE,
        "rgpr fit --model nets:digits --weights weights.safetensors --train train.npz "
        "--out m.safetensors\n"
        "rgpr fit --model net.pt2 --train train.csv --target label --out m.safetensors",
    ),
)
