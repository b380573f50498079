"""Formulas of the documentation, drawn by browsers without a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def converted(text: str) -> str:
    from markdown import Markdown

    extensions: list[Any] = ["pymdownx.arithmatex", "rgpr_docs", "pymdownx.superfences", "tables"]
    settings = {"pymdownx.arithmatex": {"generic": True}}
    return Markdown(extensions=extensions, extension_configs=settings).convert(text)


def test_a_formula_is_mathml() -> None:
    pytest.importorskip("latex2mathml", reason="needs the extra docs")
    html = converted("So $x_1 < \\tfrac{1}{2}$, and\n\n$$|x|^3$$\n")
    assert html.count("<math ") == 2
    assert "<msub><mi>x</mi><mn>1</mn></msub><mo>&lt;</mo>" in html
    assert "<mfrac><mrow><mn>1</mn></mrow><mrow><mn>2</mn></mrow></mfrac>" in html
    assert 'display="block"' in html
    assert "$" not in html


def test_what_docstrings_write_for_sphinx() -> None:
    pytest.importorskip("latex2mathml", reason="needs the extra docs")
    html = converted(
        "Of :class:`rgpr.RGPR`, :math:`a +\nb`.\n\n.. math:: c =\n          d\n\nNext.\n\n"
        ">>> 1 + 1  # doctest: +SKIP\n2\n"
    )
    assert "<code>rgpr.RGPR</code>" in html
    assert html.count("<math ") == 2
    assert "<p>Next.</p>" in html
    assert "math:" not in html
    assert "doctest" not in html
    assert "blockquote" not in html


def test_an_unknown_command_is_refused() -> None:
    pytest.importorskip("latex2mathml", reason="needs the extra docs")
    with pytest.raises(ValueError, match=r"does not understand .*\\nonsense"):
        converted("$\\nonsense x$")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_formula_is_understood(page: Path) -> None:
    pytest.importorskip("latex2mathml", reason="needs the extra docs")
    html = converted(page.read_text())
    assert 'class="arithmatex">\\' not in html


def test_the_site_loads_nothing_from_elsewhere() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    assert "http" not in text
    assert "font: false" in text  # Google's otherwise
