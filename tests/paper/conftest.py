from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from rgpr.cli import main


@pytest.fixture(scope="module")
def run_small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Iterable[str]], Path]:
    """Runs the small versions of experiments with one seed; gives the folder."""

    def run(names: Iterable[str]) -> Path:
        folder = tmp_path_factory.mktemp("small")
        for name in names:
            options = ["--small", "--seeds", "0", "--out", str(folder)]
            assert main(["paper", "run", name, *options]) == 0
        return folder

    return run
