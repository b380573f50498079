"""Collect the Python blocks of README and docs, and skip tests whose extra is not installed."""

from __future__ import annotations

import os
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Every process has a core of its own; to be set before torch looks.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if find_spec("sybil") is not None:  # of the extra dev; without it the documents are not tested
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

    def _elsewhere(namespace: dict[str, Any]) -> None:
        """Pages write files as their readers would, into a folder that goes away."""
        namespace["_places"] = os.getcwd(), TemporaryDirectory()
        os.chdir(namespace["_places"][1].name)

    def _back(namespace: dict[str, Any]) -> None:
        before, folder = namespace["_places"]
        os.chdir(before)
        folder.cleanup()

    pytest_collect_file = Sybil(
        parsers=[PythonCodeBlockParser(), SkipParser()],
        patterns=["README.md", "docs/*.md"],
        setup=_elsewhere,
        teardown=_back,
    ).pytest()

# What brings each module that the core does without.
NEEDED = {
    "PIL": "the extra cli",
    "gpytorch": "the extra gp",
    "jinja2": "the extra audit",
    "laplace": "the extra laplace",
    "latex2mathml": "the extra docs",
    "libcst": "the extra mutants",
    "lightning": "the extra dev",
    "linear_operator": "the extra gp",
    "markdown": "the extra docs",
    "matplotlib": "the extra plots",
    "mutmut": "the extra mutants",
    "onnx": "the extra export",
    "onnxruntime": "the extra export",
    "onnxscript": "the extra export",
    "pyarrow": "the extra cli",
    "pytorch_ood": "the extra ood",
    "ray": "the extra ray",
    "rgpr_paper": "the paper's experiments, which `make setup` installs",
    "scipy": "scipy, which the extra demo brings",
    "shtab": "the extra cli",
    "sklearn": "the extra sklearn",
    "timm": "the extra zoo",
    "torchmetrics": "torchmetrics, which the extra laplace brings",
    "torchvision": "the extra train",
    "transformers": "the extra zoo",
}


def _missing(error: BaseException | None) -> str | None:
    """Reason to skip: the error, or one it came from, is that a module of an extra is missing.

    A module that is missing inside an installed package is an error as any other.
    """
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name in NEEDED:
            return f"Skipped: needs {NEEDED[error.name]}"
        error = error.__cause__ or getattr(error, "exc_info", (None, None))[1]
    return None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    """Skip a file that imports a missing extra."""
    report = yield
    excinfo = report.call.excinfo
    reason = _missing(excinfo.value) if report.failed and excinfo is not None else None
    if reason is not None:
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, reason)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """Skip a test that imports a missing extra itself, or by a fixture."""
    report = yield
    reason = _missing(call.excinfo.value) if report.failed and call.excinfo is not None else None
    if reason is not None:
        path, line, _ = item.reportinfo()
        report.outcome, report.longrepr = "skipped", (str(path), line or 0, reason)
    return report
