"""The page on trust shows the figures of the nightly run that is in the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trust import figures
from trust.figures import END, PAGE, RESULT, START, collected, table

COUNTING = """
def test_counting(amount, tally):
    tally("things tried", amount(2, 30))
"""


def test_the_page_shows_the_figures_of_the_run() -> None:
    """To make both anew: ``make nightly``."""
    shown = PAGE.read_text().partition(START)[2].partition(END)[0]
    assert shown == table(json.loads(RESULT.read_text()))


@pytest.mark.parametrize(
    ("variable", "profile", "count"), [("nightly", "nightly", 30), ("rgpr", "short", 2)]
)
def test_counts_say_with_which_profile_they_were_made(
    variable: str, profile: str, count: int, tmp_path: Path
) -> None:
    """In a run of its own over a test that counts, with what the tests of trust count with."""
    (tmp_path / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    (tmp_path / "test_counting.py").write_text(COUNTING)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    folder = tmp_path / "counts"
    own = {"RGPR_TALLY": str(folder), "HYPOTHESIS_PROFILE": variable}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        env={**os.environ, **own, "PYTEST_ADDOPTS": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (path,) = folder.glob("*.json")
    found = json.loads(path.read_text())
    assert (found["profile"], found["counts"]) == (profile, {"things tried": count})


def counts(folder: Path, name: str, **more: str) -> None:
    content = {"area": "kills", "test": name, "counts": {"saves killed": 5}, **more}
    (folder / f"{name}.json").write_text(json.dumps(content))


def test_counts_of_a_nightly_run_are_added_up(tmp_path: Path) -> None:
    counts(tmp_path, "one", profile="nightly")
    counts(tmp_path, "two", profile="nightly")
    assert collected(tmp_path) == {"kills": {"saves killed": 10}}


@pytest.mark.parametrize("more", [{"profile": "short"}, {}], ids=["short", "unknown"])
def test_counts_of_another_run_are_refused(
    more: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One such file among others is enough, and the page and the result stay as they are."""
    page, result, folder = tmp_path / "page.md", tmp_path / "result.json", tmp_path / "counts"
    page.write_text(START + END)
    monkeypatch.setattr(figures, "PAGE", page)
    monkeypatch.setattr(figures, "RESULT", result)
    folder.mkdir()
    counts(folder, "one", profile="nightly")
    counts(folder, "two", **more)
    with pytest.raises(SystemExit, match=r"two\.json has counts of the profile .*make nightly"):
        figures.main(folder)
    assert page.read_text() == START + END
    assert not result.exists()
