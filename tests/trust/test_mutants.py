"""What `make mutants` changes, and what the page on trust shows of it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from trust.mutants.figures import END, PAGE, RESULT, ROOT, START, table

HERE = Path(__file__).parent / "mutants"


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return json.loads(RESULT.read_text())


def test_the_page_shows_the_counts_of_the_run(result: dict[str, Any]) -> None:
    """To make both anew: ``make mutants``."""
    shown = PAGE.read_text().partition(START)[2].partition(END)[0]
    assert shown == table(result)


def test_nine_of_ten_mutants_are_noticed_in_every_group(result: dict[str, Any]) -> None:
    for name, group in result["groups"].items():
        assert group["killed"] + group["timed out"] + group["survived"] == group["tried"], name
        assert group["tried"] >= min(150, group["made"]), name
        assert group["killed"] + group["timed out"] >= 0.9 * group["tried"], name


def test_every_survivor_is_explained_and_nothing_else(result: dict[str, Any]) -> None:
    explained = json.loads((HERE / "survivors.json").read_text())
    found: dict[str, dict[str, str]] = {}
    for group in result["groups"].values():
        assert len(group["survivors"]) == group["survived"]
        for each in group["survivors"]:
            name = f"{each['function']}: {each['change']}"
            found.setdefault(each["file"], {})[name] = each["why"]
    assert found == explained


def test_the_groups_name_files_that_exist() -> None:
    groups = tomllib.loads((HERE / "groups.toml").read_text())
    assert groups.pop("sample") >= 150
    for group in groups.values():
        assert all((ROOT / "src" / "rgpr" / file).is_file() for file in group["files"])
        assert all((ROOT / "tests" / path).exists() for path in group["tests"])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("return a < b", {"return a <= b"}),
        ("return a + 1", {"return a - 1", "return a + 2"}),
        ("check(a)", {"pass"}),
        ("raise ValueError('a is %d' % a)", {"pass"}),
        ("warnings.warn('a is large')", set()),
        ("assert a > b", set()),
        ("return {'a key': a, 'key': b}", {"return {'a key': a, 'XXkeyXX': b}"}),
    ],
)
def test_what_is_changed_and_what_is_left_alone(
    before: str, after: set[str], tmp_path: Path
) -> None:
    from trust.mutants.changes import mutants

    head = '"""A docstring with 1 + 1."""\n\nLIMIT = 3\n\n\ndef f(a: int, b: int):\n    '
    (tmp_path / "file.py").write_text(f"{head}{before}\n")
    found = mutants(tmp_path, "file.py")
    assert {each.source for each in found} == {f"{head}{line}\n" for line in after}
    assert all(each.function == "f" and each.lines == (7, 7) for each in found)
    assert len({each.name for each in found}) == len(found)
