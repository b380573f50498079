"""Collect the Python blocks of README and docs as tests."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    # Every process has a core of its own; to be set before torch looks.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()], patterns=["README.md", "docs/*.md"]
).pytest()
