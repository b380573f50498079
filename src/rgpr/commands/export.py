"""``rgpr export``: the model as one graph, which needs no code to run."""

from __future__ import annotations

import argparse
from pathlib import Path

from .base import Command, register_command
from .shared import CODE, Answer, add_common, add_network, answering, file_in_a_folder


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the model, by rgpr fit")
    add_network(parser, required=True)
    parser.add_argument(
        "--form",
        choices=("onnx", "pt2"),
        help="onnx for onnxruntime, pt2 for torch (default: as --out ends)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the graph")
    add_common(parser)


def _run(options: argparse.Namespace) -> Answer:
    from .._files.networks.graphs import write_onnx, write_program
    from .._files.networks.networks import model as load_model

    file_in_a_folder(options.out)
    form = options.form or options.out.suffix.removeprefix(".")
    if form not in ("onnx", "pt2") or options.out.suffix != f".{form}":
        raise ValueError(f"--out {options.out}: expected a name that ends in .onnx or .pt2")
    model = load_model(options.file, options.model, options.device)
    write = write_onnx if form == "onnx" else write_program
    outputs = write(model, options.out)
    lines = [f"outputs: {', '.join(outputs)}", f"wrote {options.out}"]
    return Answer(lines, {"out": options.out, "form": form, "outputs": outputs})


register_command(
    "export",
    Command(
        "the model as one graph, .onnx or .pt2, which needs no code to run",
        _add_options,
        answering(_run),
        "Write network, residual and answers as one graph: .onnx for onnxruntime and others, .pt2\n"
        "for torch, which rgpr predict and rgpr score take without --model. Sets and intervals\n"
        "are not in it." + CODE,
        "rgpr export m.safetensors --model nets:digits --form pt2 --out m.pt2\n"
        "rgpr export m.safetensors --model nets:digits --form onnx --out m.onnx",
    ),
)
