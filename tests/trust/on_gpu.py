"""What ran on a GPU: ``python -m trust.on_gpu REPORT`` after the tests; `make test-gpu` calls it.

Reads the report that pytest's ``--junitxml`` wrote, adds up each file's tests, writes
``results/trust/gpu.json`` and fills the table of ``docs/trust.md``.
"""

from __future__ import annotations

import sys
from ast import literal_eval
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.pages import fill

from rgpr_paper.report import block_markdown
from rgpr_paper.section import Table
from rgpr_paper.units import made_with, write_json

__all__ = ["PAGE", "PART", "RESULT", "counted", "table"]

RESULT = Path(__file__).parents[2] / "results" / "trust" / "gpu.json"
PAGE, PART = "trust.md", "gpu"


def counted(report: Path) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """How many tests of each file passed and were skipped, and how often for which reason.

    Raises:
        ValueError: A test failed, or none ran.
    """
    files: dict[str, dict[str, int]] = {}
    reasons: dict[str, int] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        # A file that is skipped as a whole has its name in the place of a test's.
        module = case.get("classname") or case.get("name", "")
        name = f"{module.replace('.', '/')}.py"
        ended = {child.tag: child for child in case}
        if "failure" in ended or "error" in ended:
            raise ValueError(f"{name}::{case.get('name')} failed, so there is nothing to record")
        skipped = ended.get("skipped")
        counts = files.setdefault(name, {"passed": 0, "skipped": 0})
        counts["passed" if skipped is None else "skipped"] += 1
        if skipped is not None:
            message = skipped.get("message", "")
            if message == "collection skipped":
                *_, message = literal_eval(skipped.text or "")  # path, line and reason
            reason = message.removeprefix("Skipped: ")
            reasons[reason] = reasons.get(reason, 0) + 1
    if not any(counts["passed"] for counts in files.values()):
        raise ValueError(f"{report} has no test that passed")
    return dict(sorted(files.items())), dict(sorted(reasons.items()))


def table(result: dict[str, Any]) -> str:
    """The figures as the page shows them."""
    about, files = result["about"], result["files"]
    made = (
        f"`make test-gpu` of {about['date']}: {about['hardware']}, torch "
        f"{about['versions']['torch']}, Python {about['versions']['python']}, commit "
        f"{about['commit']}. No test failed."
    )
    rows = [[name, str(each["passed"]), str(each["skipped"])] for name, each in files.items()]
    total = [str(sum(each[what] for each in files.values())) for what in ("passed", "skipped")]
    shown = block_markdown(Table(["file", "passed", "skipped"], [*rows, ["all", *total]]), "")
    why = "; ".join(f"{reason} ({count})" for reason, count in result["skipped"].items())
    return "\n\n".join([made, *shown, f"Why tests were skipped, and how many: {why}."]) + "\n"


def main(report: Path) -> None:
    try:
        files, reasons = counted(report)
    except ValueError as error:
        sys.exit(str(error))
    result = {"about": made_with("cuda"), "files": files, "skipped": reasons}
    write_json(RESULT, result)
    fill(PAGE, PART, table(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
