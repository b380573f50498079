"""One mutant, tried by the tests that run its lines.

A process that has imported torch and the like, but nothing of rgpr, is forked for every mutant. The
child imports rgpr anew with the changed file in the place of the right one, and runs pytest in the
same process until the first test fails. Which tests run a line is known from one run of all of them
under coverage. A fixture that several tests share runs once, so its lines count for every test that
asks for it.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import coverage
import pytest

if TYPE_CHECKING:
    from .changes import Mutant

__all__ = ["Baseline", "attempt", "baseline", "warm"]

# What tests import; slow to import, and the same for every mutant.
_HEAVY = (
    "torch",
    "torch._dynamo",
    "torch.func",
    "torch.utils.checkpoint",
    "hypothesis",
    "laplace",
    "gpytorch",
    "safetensors.torch",
    "sklearn.datasets",
    "sklearn.model_selection",
    "scipy.stats",
    "tqdm",
)
_OPTIONS = (
    "--override-ini=addopts=",
    "--import-mode=importlib",
    "--strict-markers",
    "--quiet",
    "--tb=line",
    "-pno:cacheprovider",
)
# Seconds of one core: a test that takes longer is left out, and so are the longest of a mutant's
# tests where all of them together take longer than this.
_LONGEST, _TOGETHER = 2.0, 8.0


@dataclass(frozen=True)
class Baseline:
    """What the tests do while nothing is changed.

    Attributes:
        seconds: How long each test takes on one core.
        tests: For each file and line the tests that run it; ``"*"`` for all of them.
        digest: Of the group's files and tests.
    """

    seconds: dict[str, float]
    tests: dict[str, dict[str, list[str]]]
    digest: str

    def of(self, mutant: Mutant) -> list[str]:
        """The tests for a mutant, the quickest first."""
        lines = self.tests.get(mutant.file, {})
        first, last = mutant.lines
        found = {test for line in range(first, last + 1) for test in lines.get(str(line), ())}
        if "*" in found:
            found = set(self.seconds)
        chosen, spent = [], 0.0
        for test in sorted(found, key=lambda test: (self.seconds[test], test)):
            spent += self.seconds[test]
            if self.seconds[test] > _LONGEST or spent > _TOGETHER:
                break
            chosen.append(test)
        return chosen


def warm() -> None:
    """Import what every child needs, with one thread each: threads do not survive a fork."""
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "HYPOTHESIS_PROFILE": "mutants",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    for name in _HEAVY:
        with suppress(ImportError):
            importlib.import_module(name)
    sys.dont_write_bytecode = False
    gc.collect()
    gc.freeze()


def baseline(root: Path, files: list[str], tests: list[str], folder: Path) -> Baseline:
    """Run all tests of a group once, unless that was done with the same files and tests.

    Args:
        root: The repository.
        files: The files that will be changed.
        tests: The tests' files, or folders of them.
        folder: Where the result is kept.
    """
    digest = hashlib.sha256()
    for path in [*files, *tests]:
        within = [root / path] if path.endswith(".py") else sorted((root / path).rglob("*.py"))
        for file in within:
            digest.update(file.read_bytes())
    kept = folder / f"{digest.hexdigest()[:24]}.json"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        log = kept.with_suffix(".log")
        code = _forked(lambda: _observe(root, files, tests, kept), log, 3600)
        if code != 0:
            kept.unlink(missing_ok=True)
            sys.exit(f"the tests fail while nothing is changed; see {log}")
    return Baseline(**json.loads(kept.read_text()), digest=kept.stem)


def attempt(root: Path, mutant: Mutant, tests: list[str], seconds: float, log: Path) -> str:
    """``"killed"``, ``"timed out"``, ``"survived"`` or ``"untested"``.

    Args:
        root: The repository.
        mutant: What to try.
        tests: The tests that run its lines.
        seconds: How long they take while nothing is changed.
        log: Where their output goes.
    """
    if not tests:
        return "untested"

    def child() -> int:
        sys.meta_path.insert(0, _Changed(root / mutant.file, mutant.source))
        return _pytest(_files(tests), _Chosen(tests), "--exitfirst")

    code = _forked(child, log, 60 + 20 * seconds)
    if code is None:
        return "timed out"
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        sys.exit(f"none of the tests of {mutant.name} were found; see {log}")
    return "survived" if code == 0 else "killed"


def _files(tests: Iterable[str]) -> list[str]:
    return sorted({test.partition("::")[0] for test in tests})


def _pytest(paths: list[str], plugin: Any, *options: str) -> int:
    return int(pytest.main([*_OPTIONS, *options, *paths], plugins=[plugin]))


def _forked(work: Callable[[], int], log: Path, limit: float) -> int | None:
    """Exit code of work that is done in a child, or ``None`` if it took too long."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setsid()
            out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            code = work()
        finally:
            sys.stdout.flush()
            os._exit(code)
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


class _Changed(SourceFileLoader):
    """Finds one module, and loads it from other text."""

    def __init__(self, path: Path, source: str) -> None:
        parts = path.with_suffix("").parts
        name = ".".join(parts[len(parts) - parts[::-1].index("src") :])
        super().__init__(name, str(path))
        self._source = source

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return spec_from_file_location(name, self.path, loader=self) if name == self.name else None

    def get_data(self, path: str) -> bytes:
        return self._source.encode()

    def path_stats(self, path: str) -> Any:
        raise OSError("bytecode of other text is not to be used")


class _Chosen:
    """Keeps some of the tests, in the order given."""

    def __init__(self, tests: list[str]) -> None:
        self._place = {test: place for place, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        kept = [item for item in items if item.nodeid in self._place]
        items[:] = sorted(kept, key=lambda item: self._place[item.nodeid])


class _Observer:
    """Tells coverage which test or which shared fixture runs, and takes the time."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self._measured, self._test = measured, ""
        self.seconds: dict[str, float] = {}
        self.fixtures: dict[str, list[str]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self._test, started = item.nodeid, time.process_time()
        self._measured.switch_context(item.nodeid)
        result = yield
        self._measured.switch_context("")
        self.seconds[item.nodeid] = time.process_time() - started
        for name in getattr(item, "fixturenames", ()):
            self.fixtures.setdefault(f"fixture {name}", []).append(item.nodeid)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Any:
        shared = fixturedef.scope != "function"
        if shared:
            self._measured.switch_context(f"fixture {fixturedef.argname}")
        result = yield
        if shared:
            self._measured.switch_context(self._test)
        return result


def _observe(root: Path, files: Iterable[str], tests: list[str], kept: Path) -> int:
    paths = {str(root / file): file for file in files}
    measured = coverage.Coverage(data_file=None, include=list(paths), config_file=False)
    observer = _Observer(measured)
    measured.start()
    code = _pytest(tests, observer, "-m", "not slow")
    measured.stop()
    lines: dict[str, dict[str, list[str]]] = {}
    for path, file in paths.items():
        found = measured.get_data().contexts_by_lineno(path)
        for line, contexts in found.items():
            named = {
                test for each in contexts if each for test in observer.fixtures.get(each, [each])
            }
            # A line that runs while files are imported is run by every test.
            lines.setdefault(file, {})[str(line)] = sorted(named) or ["*"]
    kept.write_text(json.dumps({"seconds": observer.seconds, "tests": lines}))
    return code
