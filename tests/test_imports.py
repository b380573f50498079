"""Imports go one way: read from the source, lazy and typing ones too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "rgpr"
# Each may import those after it, and never one before it. Those in one row know nothing of each
# other.
ORDER = [
    ("cli",),
    ("commands",),
    ("_demo",),
    ("__init__",),
    ("audit", "_files"),
    ("baselines",),
    ("integrations",),
    ("model",),
    ("states",),
    ("tuning", "guarantee", "saving"),
    ("answers",),
    ("extension",),
    ("posteriors",),
    ("residual",),
    ("noise",),
    ("likelihoods",),
    ("_network", "kernels", "metrics"),
    ("_axes",),
    ("_backend", "_discovery", "_atomic", "_images", "_progress", "_resuming", "_text"),
]
RANK = {name: rank for rank, row in enumerate(ORDER) for name in row}
MODULES = {
    path: ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SOURCE.rglob("*.py"))
}


def imports(path: Path, module: str) -> Iterator[str]:
    """Modules of the library that a file imports anywhere, relative to ``rgpr``."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    package = [part for part in package if part != "__init__"]
    known = set(MODULES.values())
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "rgpr":
                    yield alias.name.partition(".")[2] or "__init__"
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
            elif (node.module or "").split(".")[0] == "rgpr":
                base = (node.module or "").split(".")[1:]
            else:
                continue
            name = ".".join(filter(None, base))
            for alias in node.names:
                inside = f"{name}.{alias.name}" if name else alias.name
                yield inside if inside in known else name or "__init__"


ARROWS = {module: sorted(set(imports(path, module))) for path, module in MODULES.items()}


def test_every_module_has_its_place() -> None:
    top = {module.split(".")[0] for module in MODULES.values()}
    assert top == set(RANK)


def test_there_are_arrows_to_read() -> None:
    """The reader sees relative, absolute, lazy and typing imports."""
    assert sum(map(len, ARROWS.values())) > 300
    assert "model" in ARROWS["__init__"]
    assert "_network.running" in ARROWS["extension.one_pass"]
    assert "posteriors.svgp" in ARROWS["posteriors"]  # lazily


@pytest.mark.parametrize("module", ARROWS)
def test_imports_go_one_way(module: str) -> None:
    here = module.split(".")[0]
    for other in ARROWS[module]:
        there = other.split(".")[0]
        if there != here:
            assert RANK[here] < RANK[there], f"{module} imports {other}"


def test_no_cycle_anywhere() -> None:
    """Between single files; a package's own file stands for the names it gathers."""
    graph: dict[str, set[str]] = {}
    for module, others in ARROWS.items():
        # A file may import its own package's first file for names that it does not define.
        graph[module] = {other for other in others if other != module}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError, which names one
    assert len(order) >= len(MODULES)


def test_nothing_imports_the_papers_experiments() -> None:
    for path in MODULES:
        text = path.read_text()
        if path.parent.name != "commands":  # cli says how to get them
            assert "import rgpr_paper" not in text
            assert "from rgpr_paper" not in text


def test_no_long_file_without_a_reason() -> None:
    for root in (SOURCE, SOURCE.parent / "rgpr_paper"):
        for path in root.rglob("*.py"):
            text = path.read_text()
            if text.count("\n") > 400:
                docstring = ast.get_docstring(ast.parse(text)) or ""
                assert "This file is long because" in docstring, path


def test_functions_take_at_most_six_arguments() -> None:
    """More of them are one dataclass, which need not repeat what each of its fields is.

    A public call may have more options if they have names and defaults. Kernels and torch's
    operators take no dataclasses.
    """
    for path, module in MODULES.items():
        if module.startswith("_backend.cuda"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                positional = [*node.args.posonlyargs, *node.args.args]
                options = [d for d in node.args.kw_defaults if d is not None]
                required = len(node.args.kwonlyargs) - len(options)
                count = sum(a.arg not in ("self", "cls") for a in positional) + required
                private = node.name.startswith("_") and node.name != "__init__"
                if private or len(options) == 0:
                    count += len(options)
                assert count <= 6, f"{module}: {node.name}"
