"""Detectors that are measured beside this library's score, all over the same trained network.

A detector is a :class:`Rival` that a file of this folder registers. Every file of the folder is
imported here, so no list needs to know of a new one.
"""

from __future__ import annotations

from rgpr._discovery import import_files

from .base import RIVALS, Bench, Fitted, Rival, register_rival

__all__ = ["RIVALS", "Bench", "Fitted", "Rival", "register_rival"]

import_files(__name__, __path__)
