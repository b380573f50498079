"""What the experiments left behind, as Markdown and as one page of HTML that needs nothing else.

Nothing is computed here: every number comes from the units' files. An experiment that was not run,
or whose data were missing, is shown as a gap with the command that fills it.
"""

from __future__ import annotations

import base64
import html
import re
from dataclasses import dataclass
from pathlib import Path

from rgpr._progress import bar

from .experiment import Experiment, all_experiments
from .section import Block, Claim, Figure, Section, Table, Text
from .units import gaps, read_units, write_text

__all__ = ["block_markdown", "made_by", "write_report", "write_section"]

_TITLE = "The paper's experiments, run again"
_INTRODUCTION = (
    "Every figure and table of the paper, made anew by `rgpr paper run`. Numbers in parentheses "
    "are those that the paper printed; after ± stands the standard deviation between seeds or "
    "trials. What the paper claims, and what this library does, are checks at the end of a section."
)


@dataclass(frozen=True)
class _Shown:
    """A section with its place in the report."""

    experiment: Experiment
    section: Section
    gaps: list[str]
    state: str

    @property
    def name(self) -> str:
        return self.experiment.name

    @property
    def title(self) -> str:
        return self.experiment.title

    @property
    def paper(self) -> str:
        return self.experiment.paper

    def write(self, out: Path) -> Path:
        """Write the experiment's own page and return its path."""
        path = out / self.name / f"{self.name}.md"
        write_text(path, _section_markdown(self, level=1, folder=""))
        return path


def write_section(experiment: Experiment, out: Path) -> Path:
    """Draw an experiment's figures and write ``OUT/NAME/NAME.md``; returns its path."""
    return _shown(experiment, out).write(out)


def write_report(out: Path) -> tuple[Path, Path]:
    """Write ``report.md`` and ``report.html`` into the folder, and each experiment's own page.

    Returns:
        Their paths.

    Raises:
        FileNotFoundError: There is no such folder.
    """
    if not out.is_dir():
        raise FileNotFoundError(
            f"no folder {out}: run an experiment first, such as `rgpr paper run all --out {out}`"
        )
    sections = []
    experiments = all_experiments().values()
    for experiment in bar(experiments, "report", True):
        shown = _shown(experiment, out)
        if shown.section.blocks:
            shown.write(out)
        sections.append(shown)
    markdown, page = out / "report.md", out / "report.html"
    write_text(markdown, _markdown(sections))
    write_text(page, _html(sections, out))
    return markdown, page


def made_by(out: Path) -> Table:
    """When the units of each experiment were made, from which commits, and of a clean tree or not.

    Units of earlier versions do not say whether the tree was clean.
    """
    trees = {True: "clean", False: "with changes", None: "not recorded"}
    rows = []
    for name in all_experiments():
        abouts = [unit.about for unit in read_units(out / name)]
        if abouts:
            dates = sorted({about["date"] for about in abouts})
            commits = sorted({about["commit"] or "unknown" for about in abouts})
            tree = sorted({trees[about.get("clean")] for about in abouts})
            rows.append([name, *map(", ".join, (dates, commits, tree))])
    return Table(["experiment", "made on", "commit", "tree"], rows)


def _shown(experiment: Experiment, out: Path) -> _Shown:
    folder = out / experiment.name
    missing = gaps(folder)
    units = read_units(folder)
    if not units:
        if missing:
            return _Shown(experiment, Section(), missing, "gap")
        command = f"rgpr paper run {experiment.name} --out {out.name or out}"
        return _Shown(experiment, Section(), [f"not run: `{command}`"], "not run")
    state = "run, small" if any(unit.settings["small"] for unit in units) else "run"
    state += ", with gaps" if missing else ""
    return _Shown(experiment, experiment.render(folder), missing, state)


# -- Markdown ------------------------------------------------------------------------------------


def _markdown(sections: list[_Shown]) -> str:
    parts = [f"# {_TITLE}", _INTRODUCTION, *block_markdown(_summary(sections), "")]
    parts += [_section_markdown(shown, level=2, folder=f"{shown.name}/") for shown in sections]
    return "\n\n".join(parts) + "\n"


def _section_markdown(shown: _Shown, level: int, folder: str) -> str:
    parts = [f"{'#' * level} {shown.title}", f"In the paper: {shown.paper}."]
    parts += [f"**Gap.** {gap}" for gap in shown.gaps]
    for block in shown.section.blocks:
        parts += block_markdown(block, folder)
    for table in _claims(shown.section.claims):
        parts += block_markdown(table, folder)
    return "\n\n".join(parts) + ("\n" if level == 1 else "")


def block_markdown(block: Block, folder: str) -> list[str]:
    """Paragraphs of Markdown that show a block, with pictures in ``folder``."""
    if isinstance(block, Text):
        return [f"    {block.text}" if block.code else block.text]
    if isinstance(block, Figure):
        return [f"![{block.caption}]({folder}{block.name}.png)", f"*{block.caption}*"]
    caption = [f"**{block.caption}**"] if block.caption else []
    rows = [_row(block.head), "|---" * len(block.head) + "|", *map(_row, block.rows)]
    return [*caption, "\n".join(rows)]


def _row(cells: object) -> str:
    assert isinstance(cells, list | tuple)
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _claims(claims: list[Claim]) -> list[Table]:
    """The paper's claims, and those of this library."""
    tables = []
    for ours, caption in ((False, "The paper's claims"), (True, "Claims of this library")):
        rows = [
            [c.statement, c.measured, "holds" if c.holds else "does not hold", c.discussion]
            for c in claims
            if c.ours == ours
        ]
        if rows:
            tables.append(Table(["claim", "measured", "verdict", "discussion"], rows, caption))
    return tables


def _held(claims: list[Claim], ours: bool) -> str:
    chosen = [c for c in claims if c.ours == ours]
    return f"{sum(c.holds for c in chosen)} of {len(chosen)} hold" if chosen else "-"


def _summary(sections: list[_Shown]) -> Table:
    rows = []
    for shown in sections:
        held = [_held(shown.section.claims, ours) for ours in (False, True)]
        rows.append([shown.title, shown.paper, shown.state, *held])
    return Table(["experiment", "in the paper", "state", "its claims", "ours"], rows)


# -- HTML ----------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --soft: #57606a; --line: #d0d7de;
  --back: #ffffff; --head: #f6f8fa; --yes: #1a7f37; --no: #bc4c00; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --soft: #9aa4af; --line: #30363d;
  --back: #0d1117; --head: #161b22; --yes: #3fb950; --no: #f0883e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1.25rem 5rem; background: var(--back);
  color: var(--text); font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; } h2 { margin-top: 3.5rem; padding-top: .5rem;
  border-top: 1px solid var(--line); font-size: 1.35rem; }
a { color: inherit; } p { max-width: 46rem; } .paper, figcaption, caption { color: var(--soft); }
.wide { overflow-x: auto; margin: 1.25rem 0; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding-bottom: .4rem; font-weight: 600; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; } th { background: var(--head); }
figure { margin: 1.5rem 0; } figure img { max-width: 100%; background: #fff; padding: .5rem;
  border-radius: 6px; border: 1px solid var(--line); } figcaption { font-size: .86rem; }
pre { background: var(--head); padding: .6rem .8rem; overflow-x: auto; font-size: .82rem;
  border-radius: 6px; } code { font-size: .88em; }
.gap { border-left: 4px solid var(--no); padding: .1rem 0 .1rem .8rem; }
.yes { color: var(--yes); font-weight: 600; } .no { color: var(--no); font-weight: 600; }
"""


def _html(sections: list[_Shown], out: Path) -> str:
    summary = _table_html(_summary(sections), [shown.name for shown in sections])
    body = [f"<h1>{_TITLE}</h1>", f"<p>{_inline(_INTRODUCTION)}</p>", summary]
    for shown in sections:
        body += [f'<h2 id="{shown.name}">{_inline(shown.title)}</h2>']
        body += [f'<p class="paper">In the paper: {_inline(shown.paper)}.</p>']
        body += [f'<p class="gap"><b>Gap.</b> {_inline(gap)}</p>' for gap in shown.gaps]
        body += [_block_html(block, out / shown.name) for block in shown.section.blocks]
        body += [_table_html(table) for table in _claims(shown.section.claims)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_TITLE}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _block_html(block: Block, folder: Path) -> str:
    if isinstance(block, Text):
        return (
            f"<pre>{html.escape(block.text)}</pre>"
            if block.code
            else f"<p>{_inline(block.text)}</p>"
        )
    if isinstance(block, Figure):
        picture = (folder / f"{block.name}.png").read_bytes()
        # Its width is in the header; at 200 dots per inch it would be twice as large as the text.
        width = round(0.6 * int.from_bytes(picture[16:20], "big"))
        return (
            f'<figure><img alt="{html.escape(block.caption)}" width="{width}" '
            f'src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
            f"<figcaption>{_inline(block.caption)}</figcaption></figure>"
        )
    return _table_html(block)


def _table_html(table: Table, links: list[str] | None = None) -> str:
    caption = f"<caption>{_inline(table.caption)}</caption>" if table.caption else ""
    head = "".join(f"<th>{_inline(cell)}</th>" for cell in table.head)
    lines = []
    for number, row in enumerate(table.rows):
        cells = [_cell(cell) for cell in row]
        if links:
            cells[0] = f'<a href="#{links[number]}">{cells[0]}</a>'
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return (
        f'<div class="wide"><table>{caption}<thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody></table></div>"
    )


def _cell(text: str) -> str:
    verdicts = {"holds": "yes", "does not hold": "no", "gap": "no"}
    if text in verdicts:
        return f'<span class="{verdicts[text]}">{text}</span>'
    return re.sub(r"(\(paper: [^)]*\))", r'<span class="paper">\1</span>', _inline(text))


def _inline(text: str) -> str:
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text, quote=False))
