"""Folders whose files register what they hold: importing the folder imports all of them.

These are ``likelihoods``, ``posteriors``, ``posteriors.links``, ``tuning.objectives``,
``_network.pickers``, ``baselines.detectors`` and ``commands``.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Container, Iterable
from importlib import import_module

__all__ = ["import_files"]


def import_files(package: str, path: Iterable[str], *, but: Container[str] = ()) -> None:
    """Import every module of a package, so that adding a file is all it takes to add a thing.

    Args:
        package: The package's ``__name__``.
        path: Its ``__path__``.
        but: Names of modules that are imported when they are first asked for, because they need
            an extra.
    """
    for module in pkgutil.iter_modules(path):
        if module.name not in but:
            import_module(f"{package}.{module.name}")
