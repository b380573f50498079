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
    bases = commands.add_parser(
        "bases", help="every base posterior on digits, without and with the residual, as a table"
    )
    bases.add_argument(
        "--into", type=Path, help="a Markdown file whose marked part the table replaces"
    )
    bases.add_argument("--quick", action="store_true", help="a tenth of the training")
    paper = commands.add_parser("paper", help="the paper's experiments, by name")
    paper_commands = paper.add_subparsers(dest="paper_command", metavar="COMMAND", required=True)
    paper_commands.add_parser("list", help="the experiments that there are")
    run_paper = paper_commands.add_parser("run", help="run one experiment")
    run_paper.add_argument("name", help="see `rgpr paper list`")
    run_paper.add_argument(
        "--out", type=Path, default=Path("paper"), help="folder for the files (default: paper)"
    )
    run_paper.add_argument("--seed", type=int, default=0, help="seed of everything random")
    run_paper.add_argument("--small", action="store_true", help="a tenth of the training")
    detection = run_paper.add_argument_group("detection")
    detection.add_argument("--data", type=Path, help="folder that holds the images, as NAME.npz")
    detection.add_argument("--set", dest="name_of_set", metavar="SET", help="mnist or cifar10, ...")
    detection.add_argument(
        "--seeds", type=int, nargs="+", help="one network each (default: --seed)"
    )
    detection.add_argument("--device", help="where to train and predict (default: cpu)")
    options = parser.parse_args(arguments)
    if options.version:
        from . import __version__

        print(__version__)
        return 0
    try:
        if options.command == "demo":
            from .demo import run

            run(options.out, seed=options.seed, quick=options.quick)
            return 0
        if options.command == "bases":
            from .bases import table

            _show(table(quick=options.quick), options.into)
            return 0
        if options.command == "paper":
            return _paper(options)
    except ModuleNotFoundError as error:
        print(f"this needs more than the core ({error}); install 'rgpr[all]'", file=sys.stderr)
        return 1
    parser.print_help()
    return 2


def _paper(options: argparse.Namespace) -> int:
    from .paper import EXPERIMENTS, run_experiment

    if options.paper_command == "list":
        for name, description in EXPERIMENTS.items():
            print(f"{name:12}{description}")
        return 0
    if options.name not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS)
        print(f"no experiment '{options.name}'; there are: {known}", file=sys.stderr)
        return 2
    own = {name: getattr(options, name) for name in ("data", "name_of_set", "seeds", "device")}
    own = {name: value for name, value in own.items() if value is not None}
    try:
        run_experiment(options.name, options.out, seed=options.seed, small=options.small, **own)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _show(table: str, into: Path | None) -> None:
    """Print the table, or put it between the marks of a file."""
    if into is None:
        print(table)
        return
    before, mark, rest = into.read_text().partition("<!-- table -->\n")
    _, end, after = rest.partition("<!-- end of table -->")
    if not mark or not end:
        raise SystemExit(f"{into} has no lines <!-- table --> and <!-- end of table --> to fill")
    from .storage import replacing

    with replacing(into) as temporary:
        temporary.write_text(f"{before}{mark}{table}\n{end}{after}")
