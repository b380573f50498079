"""The command ``rgpr``. Plain argparse: the core needs no command-line library."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="rgpr", description="Honest confidence far from the training data."
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    demo = commands.add_parser(
        "demo", help="train two small networks, wrap them, print a table and draw pictures"
    )
    demo.add_argument(
        "--out", type=Path, default=Path("demo"), help="folder for the files (default: demo)"
    )
    demo.add_argument("--seed", type=int, default=0, help="seed of everything random (default: 0)")
    demo.add_argument("--quick", action="store_true", help="a tenth of the training, coarse maps")
    options = parser.parse_args(arguments)
    if options.version:
        from . import __version__

        print(__version__)
        return 0
    if options.command == "demo":
        try:
            from .demo import run
        except ModuleNotFoundError as error:
            print(
                f"the demo needs more than the core ({error}); install 'rgpr[demo]'",
                file=sys.stderr,
            )
            return 1
        run(options.out, seed=options.seed, quick=options.quick)
        return 0
    parser.print_help()
    return 2
