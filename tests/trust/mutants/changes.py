"""Small changes of a source file, each of which a test should notice.

The changes are mutmut's: another operator, a number plus one, a keyword's opposite, an argument
less, one branch of a conditional expression always. Two kinds are our own, since mutmut has none
of the sort: a statement that is left out (a call, a raise, the context of a ``with``), and an
``if`` that asks the opposite.

Left out is what no test should hold: docstrings, annotations, decorators, imports, assertions,
which are there for the type checker, methods that only raise ``NotImplementedError``, and whatever
is text for people. Text is every string with a blank in it, every f-string, whatever stands in a
``raise`` or in ``warnings.warn``, and the methods ``__str__``, ``__repr__`` and ``plot``. Left out,
too, are changes that crash wherever the line is reached and so would flatter the count: a value or
an argument that becomes ``None``. Only functions are changed: a constant at the top of a file is a
choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import (
    mutation_operators,
    operator_arg_removal,
    operator_assignment,
    operator_lambda,
    operator_string,
)

__all__ = ["Mutant", "mutants"]

_NOT_LOOKED_INTO = (
    cst.Annotation,
    cst.Assert,
    cst.Decorator,
    cst.FormattedString,
    cst.Import,
    cst.ImportFrom,
)
_NEVER_CHANGED_CALLS = ("len", "isinstance", "super", "cast")
# What these give is looked at by people.
_SHOWN = ("__repr__", "__str__", "plot")
_CRASHING = (operator_assignment, operator_lambda)


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        file: The file, from the root of the repository.
        function: The function that is changed, with its class.
        change: The lines that differ, before and after; with a number where the same change of
            the same lines can be made in several places.
        lines: First and last line of the statement, by which tests are found.
        source: The whole file after the change.
    """

    file: str
    function: str
    change: str
    lines: tuple[int, int]
    source: str

    @property
    def name(self) -> str:
        return f"{self.file}: {self.function}: {self.change}"


def mutants(root: Path, file: str) -> list[Mutant]:
    """All changes of a file, in the order of its lines."""
    code = (root / file).read_text()
    wrapper = MetadataWrapper(cst.parse_module(code))
    module = wrapper.module
    finder = _Finder()
    wrapper.visit(finder)
    found: list[Mutant] = []
    seen: set[str] = set()
    named: dict[tuple[str, str], int] = {}
    for place, function, old, new, lines in finder.found:
        # Only the changed part is written anew, since writing takes the time.
        before = module.code_for_node(module.body[place])
        after = module.code_for_node(module.body[place].visit(_Replacement(old, new)))
        source = code.replace(before, after, 1)
        if source in seen or source == code:
            continue
        seen.add(source)
        compile(source, file, "exec")
        change = _difference(before, after)
        number = named[function, change] = named.get((function, change), 0) + 1
        change += f" ({number})" if number > 1 else ""
        found.append(Mutant(file, function, change, lines, source))
    return found


def _difference(before: str, after: str) -> str:
    """The lines between the first and the last that differ, before and after."""
    old, new = before.splitlines(), after.splitlines()
    while old and new and old[0] == new[0]:
        del old[0], new[0]
    while old and new and old[-1] == new[-1]:
        del old[-1], new[-1]
    less, more = (" ".join(line.strip() for line in lines) for lines in (old, new))
    return f"{less} -> {more}"


class _Replacement(cst.CSTTransformer):
    """Puts one node in the place of another."""

    def __init__(self, old: cst.CSTNode, new: cst.CSTNode) -> None:
        self.old, self.new = old, new

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:
        return self.new if original_node is self.old else updated_node


class _Finder(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        self.found: list[tuple[int, str, cst.CSTNode, cst.CSTNode, tuple[int, int]]] = []
        self._place = -1
        self._scopes: list[str] = []
        self._functions = 0
        self._statements: list[tuple[int, int]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        self._place += isinstance(node, cst.BaseStatement) and not self._statements
        if _is_skipped(node):
            return False
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            self._scopes.append(node.name.value)
            self._functions += isinstance(node, cst.FunctionDef)
        if isinstance(node, cst.BaseStatement):
            self._statements.append(self._span(node))
        if self._functions:
            for new in _changes(node):
                name = ".".join(self._scopes)
                self.found.append((self._place, name, node, new, self._statements[-1]))
        return not _is_left_alone(node)

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if _is_skipped(original_node):
            return
        if isinstance(original_node, cst.FunctionDef | cst.ClassDef):
            self._scopes.pop()
            self._functions -= isinstance(original_node, cst.FunctionDef)
        if isinstance(original_node, cst.BaseStatement):
            self._statements.pop()

    def _span(self, node: cst.CSTNode) -> tuple[int, int]:
        """The lines of a statement; of a compound one those of its head."""
        place = self.get_metadata(PositionProvider, node)
        body = getattr(node, "body", None)
        if isinstance(body, cst.IndentedBlock):
            inner = self.get_metadata(PositionProvider, body.body[0])
            return place.start.line, max(place.start.line, inner.start.line - 1)
        return place.start.line, place.end.line


def _changes(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield from _left_out(node)
    if _is_left_alone(node):
        return
    for kind, operator in mutation_operators:
        if operator in _CRASHING or not isinstance(node, kind):
            continue
        for new in operator(node):
            if operator is operator_arg_removal and len(new.args) == len(node.args):
                continue
            # Other capitals are to a program what other letters are.
            if operator is operator_string and (" " in node.value or "XX" not in new.value):
                continue
            yield new


def _left_out(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    if isinstance(node, cst.SimpleStatementLine) and len(node.body) == 1:
        [inner] = node.body
        called = isinstance(inner, cst.Expr) and isinstance(inner.value, cst.Call)
        raises = isinstance(inner, cst.Raise) and not _is_abstract(inner)
        if (called and not _warns(inner.value)) or raises:
            yield node.with_changes(body=[cst.Pass()])
    if isinstance(node, cst.With):
        yield cst.If(test=cst.Name("True"), body=node.body, leading_lines=node.leading_lines)
    if isinstance(node, cst.If) and not isinstance(
        node.test, cst.Comparison | cst.BooleanOperation | cst.UnaryOperation
    ):
        asked = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        yield node.with_changes(test=cst.UnaryOperation(cst.Not(), asked))


def _is_text(node: cst.CSTNode) -> bool:
    """Whether a node is there for people: a raise, a warning."""
    return isinstance(node, cst.Raise) or (isinstance(node, cst.Call) and _warns(node))


def _is_left_alone(node: cst.CSTNode) -> bool:
    return _is_text(node) or (
        isinstance(node, cst.Call)
        and isinstance(node.func, cst.Name)
        and node.func.value in _NEVER_CHANGED_CALLS
    )


def _is_abstract(statement: cst.Raise) -> bool:
    """Whether a raise only marks a method that subclasses have to write."""
    return isinstance(statement.exc, cst.Name) and statement.exc.value == "NotImplementedError"


def _warns(call: cst.Call) -> bool:
    return isinstance(call.func, cst.Attribute) and call.func.attr.value == "warn"


def _is_skipped(node: cst.CSTNode) -> bool:
    shown = isinstance(node, cst.FunctionDef) and node.name.value in _SHOWN
    docstring = isinstance(node, cst.Expr) and isinstance(
        node.value, cst.SimpleString | cst.ConcatenatedString
    )
    return shown or docstring or isinstance(node, _NOT_LOOKED_INTO)
