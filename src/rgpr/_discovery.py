"""Folders whose files register what they hold: importing the folder imports all of them."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from importlib import import_module

__all__ = ["import_files"]


def import_files(package: str, path: Iterable[str]) -> None:
    """Import every module of a package, so that adding a file is all it takes to add a thing.

    Args:
        package: The package's ``__name__``.
        path: Its ``__path__``.
    """
    for module in pkgutil.iter_modules(path):
        import_module(f"{package}.{module.name}")
