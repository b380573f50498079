"""The command ``rgpr``; :mod:`rgpr.commands` holds what follows it, one file each.

Plain argparse, since the core needs no command-line library.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence

from .commands import COMMANDS

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="rgpr", description="Honest confidence far from the training data."
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add_options(commands.add_parser(name, help=command.help))
    options = parser.parse_args(arguments)
    if options.version:
        from . import __version__

        print(__version__)
        return 0
    if options.command is None:
        parser.print_help()
        return 2
    # Said by parts of torch about other parts of torch.
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)
    try:
        return COMMANDS[options.command].run(options)
    except KeyboardInterrupt:
        print("\ninterrupted; what is finished is kept, run the same again", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        if error.name == "rgpr_paper":
            print(
                "the experiments are not part of the installed library: clone its repository and "
                "run `make setup` there, or pip install --editable '.[all]'",
                file=sys.stderr,
            )
            return 1
        print(f"this needs more than the core ({error}); install 'rgpr[all]'", file=sys.stderr)
        return 1
