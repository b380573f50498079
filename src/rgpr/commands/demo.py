"""``rgpr demo``: two small networks before and after, as a table, pictures and a report."""

from __future__ import annotations

import argparse
from pathlib import Path

from .base import Command, register_command


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), help="folder for the files (default: demo)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of everything random (default: 0)"
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the training, coarse maps")


def _run(options: argparse.Namespace) -> int:
    from .._demo import run

    run(options.out, seed=options.seed, quick=options.quick)
    return 0


register_command(
    "demo",
    Command(
        "train two small networks, wrap them, print a table and draw pictures",
        _add_options,
        _run,
        example="rgpr demo --quick --out demo",
    ),
)
