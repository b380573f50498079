"""The page on trust shows what ran on a GPU, as the repository has it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.pages import shown

from trust.on_gpu import PAGE, PART, RESULT, counted, table

TESTS = """
import pytest

def test_that_passes(): pass

@pytest.mark.parametrize("number", [1, 2])
def test_that_is_skipped(number): pytest.skip("needs two GPUs")
"""


def reported(folder: Path, text: str) -> Path:
    """The report of pytest over a file of tests."""
    (folder / "test_some.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    subprocess.run([*command, "--junitxml=report.xml", "."], cwd=folder, capture_output=True)
    return folder / "report.xml"


def test_the_page_shows_what_ran() -> None:
    """To make both anew: ``make test-gpu``."""
    assert shown(PAGE, PART) == table(json.loads(RESULT.read_text()))


def test_tests_are_counted(tmp_path: Path) -> None:
    files, reasons = counted(reported(tmp_path, TESTS))
    assert files == {"test_some.py": {"passed": 1, "skipped": 2}}
    assert reasons == {"needs two GPUs": 2}


def test_a_file_that_is_skipped_as_a_whole_has_its_name_and_reason(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("import pytest\npytest.importorskip('no_such_module')")
    files, reasons = counted(reported(tmp_path, TESTS))
    assert files["test_other.py"] == {"passed": 0, "skipped": 1}
    assert any(reason.endswith("No module named 'no_such_module'") for reason in reasons)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("def test_that_fails(): assert False", "test_that_fails failed"),
        ("@pytest.fixture\ndef broken(): 1 / 0\ndef test_on_it(broken): pass", "test_on_it failed"),
    ],
)
def test_a_run_with_failures_is_not_recorded(tmp_path: Path, more: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        counted(reported(tmp_path, TESTS + more))


def test_a_run_without_tests_is_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no test that passed"):
        counted(reported(tmp_path, "import pytest\ndef test_one(): pytest.skip('no GPU')"))
