"""What follows ``rgpr`` on the command line, one file each behind the contract of ``base``.

A new command is a file here that calls :func:`~rgpr.commands.base.register_command`; no list needs
to know of it. What a command needs beyond the core it imports when it runs.
"""

from .._discovery import import_files
from .base import COMMANDS, Command, form, register_command

__all__ = ["COMMANDS", "Command", "form", "register_command"]

import_files(__name__, __path__)
