"""Four pages of the documentation open as notebooks, which hold what the pages hold.

The pages are what is written and tested. ``python tests/test_notebooks.py`` makes the notebooks of
them, and draws the pictures of these pages by running their code.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("tutorial", "laplace", "regression", "tabular")
_PICTURE = re.compile(r"!\[[^]]*]\((images/[\w-]+\.png)\)")


def as_notebook(page: str) -> Any:
    """The notebook of a page: a cell for each code block; links start one folder further down."""
    import jupytext

    text = (DOCS / f"{page}.md").read_text()
    text = re.sub(r"\s*\[Open it as a notebook]\([^)]*\)\.", "", text)
    text = re.sub(r"<!-- skip.*?-->\n", "", text)
    text = re.sub(r"]\((?!https?:|#)", "](../", text)
    notebook = jupytext.reads(text, fmt="md")
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


@pytest.mark.parametrize("page", PAGES)
def test_a_notebook_holds_its_page(page: str) -> None:
    pytest.importorskip("jupytext", reason="needs the extra dev")
    import nbformat

    found = nbformat.read(DOCS / "notebooks" / f"{page}.ipynb", as_version=4)
    nbformat.validate(found)
    wanted = as_notebook(page)
    assert [(cell.cell_type, cell.source) for cell in found.cells] == [
        (cell.cell_type, cell.source) for cell in wanted.cells
    ], "the page has changed since: run python tests/test_notebooks.py"
    text = (DOCS / f"{page}.md").read_text()
    code = [cell.source for cell in found.cells if cell.cell_type == "code"]
    assert code == [block.strip() for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
    assert f"notebooks/{page}.ipynb" in text
    for cell in found.cells:
        for target in re.findall(r"]\((\.\./[^)#]+)", cell.source):
            assert (DOCS / "notebooks" / target).exists(), target


def _draw(page: str) -> None:
    """Run a page in an empty folder; a picture shows the last figure of the code above it."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    namespace: dict[str, Any] = {"__name__": "__main__"}
    text = (DOCS / f"{page}.md").read_text()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        for block in re.split(r"```python\n", text)[1:]:
            code, after = block.split("```", 1)
            exec(compile(code, page, "exec"), namespace)
            for name in _PICTURE.findall(after):
                plt.gcf().savefig(DOCS / name, dpi=120, bbox_inches="tight")
                plt.close("all")
        os.chdir(DOCS)


if __name__ == "__main__":
    import nbformat

    (DOCS / "notebooks").mkdir(exist_ok=True)
    for name in sys.argv[1:] or PAGES:
        nbformat.write(as_notebook(name), DOCS / "notebooks" / f"{name}.ipynb")
        _draw(name)
