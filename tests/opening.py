"""A real hook into what this process opens, for tests of what happens just then."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

# What is done before a file of this name is opened by Python. Python takes no audit hook back, so
# there is one for all tests, which does nothing while the dict is empty.
as_opened: dict[str, Callable[[], object]] = {}


def _opening(event: str, arguments: tuple[Any, ...]) -> None:
    if as_opened and event == "open" and (act := as_opened.get(str(arguments[0]))):
        act()


sys.addaudithook(_opening)
