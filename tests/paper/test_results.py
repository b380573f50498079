"""The runs in the repository: all there, shown as they are, and what the docs say of them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from rgpr_paper import all_experiments
from rgpr_paper.attacks.page import summary as against_attackers
from rgpr_paper.comparison import by_set
from rgpr_paper.detector_claims import verdict
from rgpr_paper.detector_page import summary as against_detectors
from rgpr_paper.experiments import (
    bases,
    detection,
    families,
    monitor,
    recipe,
    small_data,
    tabular,
    tuning,
    two_answers,
    zoo,
)
from rgpr_paper.report import block_markdown, made_by, write_report
from rgpr_paper.score_forms_page import table as forms_of_the_score
from rgpr_paper.section import Block, Table
from rgpr_paper.units import read_units

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
DOCS = ROOT / "docs"


def words(page: Path) -> str:
    """All of it but the pictures, whose bytes depend on who draws them."""
    return re.sub(r"base64,[^\"]*", "", page.read_text())


def test_the_report_is_that_of_the_numbers(tmp_path: Path) -> None:
    numbers = tmp_path / "results"
    shutil.copytree(RESULTS, numbers, ignore=shutil.ignore_patterns("*.md", "*.png", "*.svg"))
    (numbers / "report.html").unlink()
    markdown, page = write_report(numbers)
    assert markdown.read_text() == (RESULTS / "report.md").read_text()
    assert words(page) == words(RESULTS / "report.html")
    assert page.stat().st_size > 1_000_000  # with its pictures inside
    for name in all_experiments():
        shown = f"{name}/{name}.md"
        assert (numbers / shown).read_text() == (RESULTS / shown).read_text()


def test_every_claim_holds_or_is_discussed() -> None:
    report = (RESULTS / "report.md").read_text()
    number = r"(?:(\d+) of (\d+) hold|-)"
    counts = re.findall(rf"^\| .* \| run[^|]* \| {number} \| {number} \|$", report, re.M)
    assert len(counts) == len(all_experiments())
    holding, claims, ours, of_ours = (
        sum(int(count or 0) for count in column) for column in zip(*counts, strict=True)
    )
    failing = re.findall(r"\| does not hold \| (.*)\|", report)
    assert len(failing) == claims - holding + of_ours - ours
    assert all(discussion.strip() for discussion in failing)
    page = (ROOT / "docs" / "results.md").read_text()
    assert f"{holding} of {claims} hold, the other {claims - holding} are" in page
    assert f"{ours} of {of_ours} hold" in page


def blocks_of_the_docs() -> dict[tuple[str, str], list[Block]]:
    """Tables and sentences that stand between marks in README and docs, by page and mark."""
    compared = read_units(RESULTS / "openood")
    answers = two_answers.render(RESULTS / "two-answers").blocks
    small = small_data.render(RESULTS / "small-data").blocks
    layers = families.render(RESULTS / "families").blocks
    objectives = tuning.render(RESULTS / "tuning").blocks
    watched = monitor.render(RESULTS / "monitor").blocks
    measured = bases.render(RESULTS / "bases").blocks
    animals = zoo.render(RESULTS / "zoo").blocks
    forms = by_set(read_units(RESULTS / "score-forms"))
    rows = [b for b in tabular.render(RESULTS / "tabular").blocks if isinstance(b, Table)]
    longer = [b for b in recipe.render(RESULTS / "recipe").blocks if isinstance(b, Table)]
    return {
        ("docs/tuning.md", "tuning"): [b for b in objectives if isinstance(b, Table)][1:],
        ("README.md", "two answers"): [two_answers.summary(RESULTS / "two-answers")],
        ("docs/results.md", "two answers"): [two_answers.summary(RESULTS / "two-answers")],
        ("docs/results.md", "openood"): [against_detectors(compared)],
        ("README.md", "detectors"): [verdict(compared)],
        ("docs/results.md", "detectors"): [verdict(compared)],
        ("docs/results.md", "tabular"): [t for t in rows if t.head[0].endswith(": AUROC")],
        ("docs/results.md", "made by"): [made_by(RESULTS)],
        ("docs/results.md", "detection"): [detection.summary(RESULTS / "detection")],
        ("docs/results.md", "recipe"): [t for t in longer if t.head[0] == "CIFAR10: FPR95"],
        ("docs/results.md", "paper's claims"): [failing(ours=False)],
        ("docs/results.md", "our claims"): [failing(ours=True)],
        ("docs/residuals.md", "two answers"): [b for b in answers if isinstance(b, Table)],
        ("docs/residuals.md", "score forms"): [forms_of_the_score("cifar100", forms["cifar100"])],
        ("docs/residuals.md", "families"): [b for b in layers if isinstance(b, Table)],
        ("docs/residuals.md", "small data"): [b for b in small if isinstance(b, Table)],
        ("docs/monitoring.md", "monitor"): [b for b in watched if isinstance(b, Table)],
        ("docs/bases.md", "bases"): [b for b in measured if isinstance(b, Table)],
        ("docs/zoo.md", "zoo"): [b for b in animals if isinstance(b, Table)],
        ("docs/trust.md", "attacks"): against_attackers(RESULTS / "attacks"),
    }


def failing(*, ours: bool) -> Table:
    """The claims of the paper, or of this library, that do not hold, as the report has them."""
    rows, of_ours = [], False
    for line in (RESULTS / "report.md").read_text().splitlines():
        if line in ("**The paper's claims**", "**Claims of this library**"):
            of_ours = line.endswith("library**")
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and cells[2] == "does not hold" and of_ours is ours:
            rows.append([cells[0], cells[1], cells[3]])
    return Table(["claim", "what we found", "why"], rows)


def test_tables_in_the_docs_are_those_of_the_results() -> None:
    """To fill them anew: ``python tests/paper/test_results.py``."""
    for (page, mark), blocks in blocks_of_the_docs().items():
        text = (ROOT / page).read_text()
        shown = text.partition(f"<!-- {mark} -->\n")[2].partition(f"<!-- end of {mark} -->")[0]
        assert shown == as_markdown(blocks), f"{page}, {mark}"


def as_markdown(blocks: list[Block]) -> str:
    return "\n\n".join(part for block in blocks for part in block_markdown(block, "")) + "\n"


def test_pictures_in_the_docs_are_those_of_the_results() -> None:
    for name, picture in {
        "far-away": "far-away/far-away",
        "rotated": "rotated-mnist/rotated",
        "corrupted": "corrupted-cifar10/bars",
        "families": "families/families",
        "openood": "openood/openood",
        "tabular": "tabular/tabular",
        "monitor": "monitor/monitor",
        "attacks": "attacks/attacks",
    }.items():
        shown = (ROOT / "docs" / "images" / f"results-{name}.png").read_bytes()
        assert shown == (RESULTS / f"{picture}.png").read_bytes()


def rows_of(experiment: str) -> dict[str, str]:
    """What stands in the tables of an experiment, by ``head / row``, each by its first cell."""
    found: dict[str, str] = {}
    head = ""
    for line in (RESULTS / experiment / f"{experiment}.md").read_text().splitlines():
        if not line.startswith("|"):
            head = ""
        elif not head:
            head = line
        else:
            name = f"{first_cell(head)} / {first_cell(line)}"
            found[name] = f"{found.get(name, '')} {head} {line}"
    return found


def first_cell(row: str) -> str:
    return row.split("|")[1].strip()


PROSE = re.compile(r"<!-- numbers of: ([\w-]+): (.+?) -->\n(.*?)<!-- end of numbers -->", re.DOTALL)
PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted(DOCS.glob("*.md")))]


@pytest.mark.parametrize("page", PAGES)
def test_numbers_in_prose_are_those_of_the_results(page: str) -> None:
    """Text between marks repeats no number that the rows it names do not have.

    Numbers with decimals, and percentages, are looked for; one that is rounded in the text may have
    more digits in the results.
    """
    text = (ROOT / page).read_text()
    assert text.count("<!-- numbers of:") == len(PROSE.findall(text))
    for experiment, named, prose in PROSE.findall(text):
        rows = rows_of(experiment)
        known: list[float] = []
        for name in named.split("; "):
            shown = " ".join(cells for row, cells in rows.items() if row.startswith(name))
            assert shown, f"{page}: {experiment} has no row {name}"
            known += map(float, re.findall(r"\d+\.\d+|\d+", shown))
        for number in re.findall(r"\d+\.\d+|\d+(?= (?:%|points))", prose):
            digits = len(number.partition(".")[2])
            found = any(f"{value:.{digits}f}" == number for value in known)
            assert found, f"{page}: {number} is not a number of {experiment}, {named}"


# Experiments whose units were made before units said whether the tree was clean.
UNKNOWN = ("families", "zoo")


def test_every_result_says_which_commit_made_it() -> None:
    for experiment in all_experiments():
        for unit in read_units(RESULTS / experiment):
            assert re.fullmatch("[0-9a-f]{12}", unit.about["commit"] or ""), unit.name
            assert unit.about["versions"]["torch"], unit.name
            unknown = experiment in UNKNOWN and "clean" not in unit.about
            assert unknown or unit.about["clean"] is True, unit.name


def test_nothing_heavy_and_no_paths() -> None:
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert all(path.stat().st_size < 1_000_000 for path in files if path.suffix != ".html")
    for path in files:
        if path.suffix in (".json", ".md"):
            assert not re.search(r"/(home|root|tmp|work|data)/", path.read_text()), path


if __name__ == "__main__":
    for (page, mark), blocks in blocks_of_the_docs().items():
        before, start, rest = (ROOT / page).read_text().partition(f"<!-- {mark} -->\n")
        _, end, after = rest.partition(f"<!-- end of {mark} -->")
        (ROOT / page).write_text(before + start + as_markdown(blocks) + end + after)
