"""Changes the core of rgpr in small ways and asks the tests: ``make mutants``.

``groups.toml`` beside this file says which files are changed and which tests are asked. Outcomes
are kept in ``build/mutants``: what was killed is not tried again while its file is the same, and
what lived not before its group's tests change. ``results/trust/mutants.json`` holds the counts and
every survivor with its explanation, which ``survivors.json`` beside this file has. A survivor
without one makes the command fail.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .changes import Mutant, mutants
from .figures import PAGE, RESULT, ROOT, fill
from .trial import Baseline, attempt, baseline, warm

BUILD = ROOT / "build" / "mutants"
GROUPS = Path(__file__).with_name("groups.toml")
EXPLAINED = Path(__file__).with_name("survivors.json")
_NOTICED = ("killed", "timed out")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trust.mutants", description=__doc__)
    parser.add_argument("groups", nargs="*", help="try these alone, and write no result")
    asked = parser.parse_args().groups
    os.chdir(ROOT)
    settings = tomllib.loads(GROUPS.read_text())
    least = settings.pop("sample")
    warm()
    found = {
        name: _group(name, group, least)
        for name, group in settings.items()
        if not asked or name in asked
    }
    unexplained = [each for group in found.values() for each in group.pop("unexplained")]
    if not asked:
        _write(found)
    if unexplained:
        sys.exit(
            "These changes pass every test. Add a test that fails, or say in "
            f"{EXPLAINED.relative_to(ROOT)} why none can:\n" + "\n".join(unexplained)
        )


def _write(found: dict[str, Any]) -> None:
    from rgpr_paper.units import made_with, write_json  # after the forks: it imports rgpr

    about: dict[str, Any] = {**made_with(), "cores": os.cpu_count()}
    about["versions"]["mutmut"] = version("mutmut")
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    write_json(RESULT, {"about": about, "groups": found})
    fill(PAGE, json.loads(RESULT.read_text()))


def _group(name: str, group: dict[str, Any], least: int) -> dict[str, Any]:
    """Try a group's mutants: the counts, the survivors, and the names of those not explained."""
    files = [f"src/rgpr/{file}" for file in group["files"]]
    tests = [f"tests/{path}" for path in group["tests"]]
    every = [mutant for file in files for mutant in mutants(ROOT, file)]
    drawn = sorted(every, key=_lot)[:least]
    known = baseline(ROOT, files, tests, BUILD)
    explained = json.loads(EXPLAINED.read_text())
    counts = {"killed": 0, "timed out": 0, "survived": 0}
    survivors, unexplained = [], []
    for number, mutant in enumerate(sorted(drawn, key=lambda each: each.lines)):
        outcome = _outcome(name, mutant, known)
        counts[outcome if outcome in counts else "survived"] += 1
        if outcome in _NOTICED:
            continue
        why = explained.get(mutant.file, {}).get(f"{mutant.function}: {mutant.change}")
        survivors.append(
            {
                "file": mutant.file,
                "line": mutant.lines[0],
                "function": mutant.function,
                "change": mutant.change,
                "why": why,
            }
        )
        if why is None:
            unexplained.append(mutant.name)
            print(f"{name} {number + 1}/{len(drawn)} {outcome}: {mutant.name}", flush=True)
    print(f"{name}: {counts} of {len(drawn)} tried, {len(every)} made", flush=True)
    return {
        "files": group["files"],
        "made": len(every),
        "tried": len(drawn),
        **counts,
        "survivors": survivors,
        "unexplained": unexplained,
    }


def _lot(mutant: Mutant) -> str:
    """By which a sample is drawn: even, and the same for a mutant whatever others there are."""
    return hashlib.sha256(mutant.name.encode()).hexdigest()


def _outcome(group: str, mutant: Mutant, known: Baseline) -> str:
    key = hashlib.sha256(f"{mutant.file}\n{mutant.source}".encode()).hexdigest()[:24]
    kept = BUILD / group / key
    found, _, by = kept.read_text().partition(" by ") if kept.exists() else ("", "", "")
    if found in _NOTICED or (found and by == known.digest):
        return found
    tests = known.of(mutant)
    seconds = sum(known.seconds[test] for test in tests)
    outcome = attempt(ROOT, mutant, tests, seconds, BUILD / f"{group}.log")
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(f"{outcome} by {known.digest}")
    return outcome


if __name__ == "__main__":
    main()
