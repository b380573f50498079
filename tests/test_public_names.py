"""What a user may import: ``__all__`` of ``rgpr`` and of the modules in it, and the API page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import rgpr

PAGE = Path(__file__).parents[1] / "docs" / "api.md"


@pytest.fixture
def every_extra() -> None:
    """Modules over other libraries can be imported."""
    pytest.importorskip("gpytorch", reason="needs the extra gp")
    pytest.importorskip("pytorch_ood", reason="needs the extra ood")
    pytest.importorskip("sklearn", reason="needs the extra sklearn")


def attribute(module: str, name: str) -> object:
    """The attribute of a module, or its submodule of that name."""
    found = getattr(import_module(module), name, None)
    return import_module(f"{module}.{name}") if found is None else found


def public(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Public names below a module, with what they name; modules themselves are not names."""
    for name in module.__all__:
        value = attribute(module.__name__, name)
        if isinstance(value, ModuleType):
            yield from public(value)
        else:
            yield f"{module.__name__}.{name}", value


def listed() -> Iterator[tuple[str, object]]:
    """Names of the API page: ``::: object``, or ``::: module`` and its list of members."""
    for entry in re.split(r"^::: ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        path = entry.split()[0]
        owner, _, name = path.rpartition(".")
        value = attribute(owner, name)
        if not isinstance(value, ModuleType):
            yield path, value
            continue
        members = re.search(r"members:((?:\s*- \w+)+|\s*\[[^]]*\])", entry)
        assert members, f"{path} is a module: say which of its names are public"
        for member in re.findall(r"\w+", members[1]):
            yield f"{path}.{member}", attribute(path, member)


@pytest.mark.usefixtures("every_extra")
def test_the_api_page_lists_every_public_name() -> None:
    """One thing may have two public paths; the page shows it once."""
    shown = {id(value) for _, value in listed()}
    missing = [path for path, value in public(rgpr) if id(value) not in shown]
    assert missing == []


@pytest.mark.usefixtures("every_extra")
def test_the_api_page_lists_nothing_else() -> None:
    paths = {path for path, _ in public(rgpr)}
    extra = [path for path, _ in listed() if path not in paths]
    assert extra == []


@pytest.mark.usefixtures("every_extra")
def test_the_api_page_lists_nothing_twice() -> None:
    values = [id(value) for _, value in listed()]
    assert len(values) == len(set(values))


def test_completion_offers_public_names_alone() -> None:
    assert sorted(dir(rgpr)) == sorted([*rgpr.__all__, "__version__"])
    assert not {"model", "extension", "cli", "annotations"} & set(dir(rgpr))
    assert [name for name in dir(rgpr) if not hasattr(rgpr, name)] == []


def test_every_public_module_says_what_is_public() -> None:
    modules = [name for name in rgpr.__all__ if isinstance(getattr(rgpr, name), ModuleType)]
    assert {"kernels", "metrics", "noise", "posteriors"} <= set(modules)
    for name in modules:
        assert getattr(rgpr, name).__all__
