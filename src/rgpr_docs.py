"""Formulas of the documentation as MathML: browsers draw it without a script or a network.

An extension of Python-Markdown, named in ``mkdocs.yml``. ``pymdownx.arithmatex`` finds ``$...$``
and ``$$...$$``; this one puts the MathML of latex2mathml in their place. Docstrings are written
for Sphinx, so before that it rewrites their ``.. math::`` and ``:math:`` as dollars, and other
roles and examples as code. Like ``rgpr_paper``, it is installed with the repository alone.
"""

from __future__ import annotations

import html
import re
from typing import Any
from xml.etree import ElementTree

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor
from markdown.treeprocessors import Treeprocessor

__all__ = ["Formulas", "makeExtension", "mathml"]

_NAMESPACE = ' xmlns="http://www.w3.org/1998/Math/MathML"'
_DIRECTIVE = re.compile(r"^( *)\.\. math:: *(.*)$")
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|exc|data):`~?([^`]+)`")
_INLINE = re.compile(r":math:`([^`]+)`")


def mathml(latex: str, *, block: bool = False) -> ElementTree.Element:
    """Returns the ``<math>`` element of a formula.

    Raises:
        ValueError: A command was not understood; latex2mathml would print its name.
    """
    text = convert(latex, display="block" if block else "inline")
    element = ElementTree.fromstring(text.replace(_NAMESPACE, ""))
    if any("\\" in part for part in element.itertext()):
        raise ValueError(f"latex2mathml does not understand a command of this formula: {latex}")
    _space(element)
    return element


def _space(element: ElementTree.Element) -> None:
    """Spaces as TeX sets them: none beside bars, a thin one after a function's name."""
    children = list(element)
    for position, child in reversed(list(enumerate(children))):
        _space(child)
        if child.tag == "mo" and child.text in ("|", "\u2016"):
            child.set("lspace", "0")
            child.set("rspace", "0")
        following = children[position + 1].tag if position + 1 < len(children) else "mspace"
        named = child.tag == "mi" and len(child.text or "") > 1
        # Children of other elements than rows have places, such as base and subscript.
        if named and element.tag == "mrow" and following not in ("mo", "mrow", "mspace"):
            element.insert(position + 1, ElementTree.Element("mspace", {"width": "0.1667em"}))


class _FromSphinx(Preprocessor):
    """Mathematics and roles of docstrings, as Markdown has them."""

    def run(self, lines: list[str]) -> list[str]:
        out: list[str] = []
        rest = list(lines)
        while rest:
            line = rest.pop(0)
            directive = _DIRECTIVE.match(line)
            if directive is None:
                out.append(_ROLE.sub(r"`\1`", line))
                continue
            indent, formula = directive[1], [directive[2]]
            while rest and (not rest[0].strip() or rest[0].startswith(f"{indent} ")):
                formula.append(rest.pop(0).strip())
            body = " ".join(part for part in formula if part)
            out += ["", f"{indent}$${body}$$", ""]
        # A formula may run over the end of a line.
        return _INLINE.sub(r"$\1$", "\n".join(out)).split("\n")


class _Examples(Preprocessor):
    """Doctests of docstrings as fenced code: Markdown takes ``>>>`` for nested quotations."""

    def run(self, lines: list[str]) -> list[str]:
        out: list[str] = []
        fenced = inside = False
        for line in lines:
            fenced ^= line.lstrip().startswith("```")
            starts = not fenced and line.startswith(">>> ")
            if inside and not line.strip():
                out.append("```")
                inside = False
            elif starts and not inside:
                out += ["", "```pycon"]
                inside = True
            # Options of doctest say nothing to a reader.
            out.append(line.split("  # doctest:")[0].rstrip() if inside else line)
        return [*out, "```"] if inside else out


class _ToMathML(Treeprocessor):
    """What arithmatex found, as MathML."""

    def run(self, root: ElementTree.Element) -> None:
        for element in root.iter():
            if element.get("class") != "arithmatex" or not element.text:
                continue
            block = element.text.startswith("\\[")
            # arithmatex escapes the text of blocks alone.
            latex = element.text[2:-2]
            formula = mathml(html.unescape(latex) if block else latex, block=block)
            element.text = None
            element.append(formula)


class Formulas(Extension):
    """Registers the steps around ``pymdownx.arithmatex``, which must be listed too."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 - named by Python-Markdown
        # Above 25, where fenced code is put away.
        md.preprocessors.register(_Examples(md), "rgpr-examples", 28)
        # Below 25, after fenced code was put away: code stays as it is.
        md.preprocessors.register(_FromSphinx(md), "rgpr-from-sphinx", 15)
        # Below 20, where inline patterns are found.
        md.treeprocessors.register(_ToMathML(md), "rgpr-mathml", 15)


def makeExtension(**options: Any) -> Formulas:  # noqa: N802 - named by Python-Markdown
    """Python-Markdown calls this with the options in ``mkdocs.yml``."""
    return Formulas(**options)
