"""What a command is, and the table of those that there are."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["COMMANDS", "Command", "register_command"]


@dataclass(frozen=True)
class Command:
    """A subcommand of ``rgpr``.

    Attributes:
        help: One line for ``rgpr --help``.
        add_options: Adds the command's options to its parser.
        run: Does the work and returns the exit status.
    """

    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


# All commands by name; every file of this folder adds its own.
COMMANDS: dict[str, Command] = {}


def register_command(name: str, command: Command) -> None:
    """Add ``rgpr <name>``."""
    COMMANDS[name] = command
