"""The command ``rgpr``; :mod:`rgpr.commands` holds what follows it, one file each.

Plain argparse, since the core needs no command-line library.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from .commands import COMMANDS, form

__all__ = ["main"]

# Extras that hold each package that a command may need. An error names the one that is called like
# the command, or else the first.
EXTRAS = {
    "PIL": ("cli", "demo"),
    "jinja2": ("cli", "demo"),
    "laplace": ("laplace", "demo"),
    "matplotlib": ("cli", "demo"),
    "onnx": ("export",),
    "onnxruntime": ("export",),
    "onnxscript": ("export",),
    "pyarrow": ("cli",),
    "shtab": ("cli",),
    "sklearn": ("sklearn", "demo"),
}

_ABOUT = """Honest confidence far from the training data.

Fit once on the training data of a network that is already trained, calibrate on data that were
held out, then predict. Code is run only where you name it: by --model, --preprocess and --import.
"""
_EPILOG = """exit codes:
  0    done
  1    cannot be done; the reason is on stderr
  2    wrong usage
  3    rgpr monitor: there is an alarm
  130  interrupted; what is finished is kept, and the same command goes on

example:
  rgpr fit --model nets:digits --weights weights.safetensors --train train.npz --out m.safetensors
  rgpr calibrate m.safetensors --model nets:digits --val val.npz --out m.safetensors
  rgpr predict m.safetensors --model nets:digits new.csv --out answers.parquet
  rgpr COMMAND --help
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rgpr",
        description=_ABOUT,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    parser.add_argument(
        "--print-completion",
        choices=("bash", "zsh", "tcsh"),
        help="print a script that completes commands and options in this shell, and leave; "
        "source it, as in: source <(rgpr --print-completion bash)",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, command in COMMANDS.items():
        about = command.about or f"{command.help[0].upper()}{command.help[1:]}."
        own = commands.add_parser(name, help=command.help, **form(command.example, about))
        command.add_options(own)
    return parser


def _print_completion(parser: argparse.ArgumentParser, shell: str) -> int:
    """Print a script for a shell; options that take a path complete files."""
    shtab: Any = import_module("shtab")  # an extra

    def mark(part: argparse.ArgumentParser) -> None:
        for action in part._actions:
            if isinstance(action, argparse._SubParsersAction):
                for each in action.choices.values():
                    mark(each)
            elif action.type is Path or "file" in str(action.metavar).lower():
                action.complete = shtab.FILE  # type: ignore[attr-defined]

    mark(parser)
    print(shtab.complete(parser, shell))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.version:
        from . import __version__

        print(__version__)
        return 0
    if options.print_completion is not None:
        return _guarded("", lambda: _print_completion(parser, options.print_completion))
    if options.command is None:
        parser.print_help()
        return 2
    # Said by parts of torch about other parts of torch.
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", FutureWarning)
    return _guarded(options.command, lambda: COMMANDS[options.command].run(options))


def _guarded(command: str, run: Callable[[], int]) -> int:
    """The exit status of a run, also of one that is interrupted or lacks an extra."""
    try:
        return run()
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
        print(
            f"this needs more than the core ({error}); {_remedy(error, command)}", file=sys.stderr
        )
        return 1


def _remedy(error: ModuleNotFoundError, command: str) -> str:
    """How to install the package that a command lacks."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return f"install it: pip install {package}" if package else "install what is missing"
    extras = EXTRAS[package]
    extra = command if command in extras else extras[0]
    return f"in the folder of rgpr's source, run: pip install '.[{extra}]'"
