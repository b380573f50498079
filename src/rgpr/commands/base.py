"""What a command is, and the table of those that there are."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["COMMANDS", "Command", "form", "register_command"]


@dataclass(frozen=True)
class Command:
    """A subcommand of ``rgpr``.

    Attributes:
        help: One line for ``rgpr --help``.
        add_options: Adds the command's options to its parser.
        run: Does the work and returns the exit status.
        about: What ``rgpr <name> --help`` says first; ``help`` if there is nothing more to say.
        example: Command lines that the help ends with.
    """

    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    about: str = ""
    example: str = ""


# All commands by name; every file of this folder adds its own.
COMMANDS: dict[str, Command] = {}


def register_command(name: str, command: Command) -> None:
    """Add ``rgpr <name>``."""
    COMMANDS[name] = command


def form(example: str, about: str = "") -> dict[str, Any]:
    """Arguments of a parser whose help ends with an example."""
    lines = "\n".join(f"  {line}" for line in example.splitlines())
    return {
        "description": about or None,
        "epilog": f"example:\n{lines}" if lines else None,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
