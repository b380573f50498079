"""Tests of trust count what they try, and `make nightly` lets them try more.

A test asks ``amount(short, nightly)`` how often to try, and says by ``tally("files mutated", 300)``
what it tried. Where the variable ``RGPR_TALLY`` names a folder, the counts of every test that
passed are written there, with the profile that they were made with, "nightly" or "short";
``figures.py`` beside this file adds up those of a nightly run.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Programs that tests or `make fuzz` start; they are not to be searched for doctests.
collect_ignore = ["fuzz.py", "killing.py", "loading.py"]
_PASSED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.when == "call":
        item.stash[_PASSED] = report.passed
    return report


@pytest.fixture
def profile() -> str:
    """How much is tried: "nightly" in `make nightly`, and otherwise "short"."""
    return "nightly" if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else "short"


@pytest.fixture
def amount(profile: str) -> Callable[[int, int], int]:
    """The first number in `make test`, the second in `make nightly`."""
    return lambda short, most: most if profile == "nightly" else short


@pytest.fixture
def tally(request: pytest.FixtureRequest, profile: str) -> Iterator[Callable[..., None]]:
    """Counts what a test tried: ``tally("saves killed")`` adds one, ``tally(name, 5)`` five."""
    counts: Counter[str] = Counter()

    def add(what: str, count: int = 1) -> None:
        counts[what] += count

    yield add
    folder = os.environ.get("RGPR_TALLY")
    if folder and request.node.stash.get(_PASSED, False):
        area = Path(request.node.path).stem.removeprefix("test_").replace("_", " ")
        name = re.sub(r"[^A-Za-z0-9]+", "-", request.node.nodeid)[-150:]
        Path(folder).mkdir(parents=True, exist_ok=True)
        about = {"area": area, "test": request.node.name, "profile": profile}
        content = {**about, "counts": counts}
        (Path(folder) / f"{name}.json").write_text(json.dumps(content))
