"""Architectures that the library is tried on: one entry each, one file for each family.

An entry says how to build a network small and which data to train it on. To add one, add it to a
file of ``families``, or add a file there; no list needs to know of it.
"""

from .entry import Entry, all_entries, register
from .samples import Samples

__all__ = ["Entry", "Samples", "all_entries", "register"]
