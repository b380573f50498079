"""Programs of ``torch.export`` in ``.pt2`` files, opened so that none of their contents is code.

``torch.export.load`` unpickles parts of a file, calls whatever function of torch a graph names, and
evaluates the expressions of its sizes. So a file is looked at before: it may hold tensors and
graphs of torch's operators, nothing else, and its tensors are read with ``weights_only``. That
closes the ways that we know of; a file from somebody whom you do not trust is still better left
alone.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch

__all__ = ["ABOUT", "about", "open_program"]

# The file inside that says what the outputs are.
ABOUT = "rgpr.json"
_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
# Objects that are unpickled, and libraries that are loaded.
_REFUSED = ("custom_obj", "opaque_obj", "aotinductor", "executorch")
_NO_NAMESPACE = ("import_module", "load_library", "loaded_libraries")
_OPERATOR = re.compile(r"torch\.ops\.([a-z]\w*)\.\w+(\.\w+)?|(_operator|math)\.\w+|torch\.sym_\w+")
# Sizes, as sympy writes them: Symbol('s77', positive=True), Max(1, s0), 2*s0. No attribute is asked
# for, and nothing is called but what begins with a capital, as the classes of sympy do.
_EXPRESSION = re.compile(r"[\w\s()+\-*/,.<>=!&|~%']*")
_NO_SIZE = re.compile(
    r"__|\.\s*[A-Za-z_]|\)\s*\(|\b(?!(?:ceiling|floor)\b)[a-z_]\w*\s*\(|'\s*'|'\s*\("
)


def about(path: Path) -> dict[str, Any] | None:
    """What ``rgpr export`` wrote beside the program; ``None`` for a program of another origin."""
    with _archive(path) as archive:
        found = [name for name in archive.namelist() if name.endswith(f"/extra/{ABOUT}")]
        if not found:
            return None
        described: dict[str, Any] = json.loads(archive.read(found[0]))
        return described


def open_program(path: Path) -> torch.export.ExportedProgram:
    """The program in a file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is damaged, or holds more than tensors and a graph of torch's operators.
    """
    with _archive(path) as archive:
        for name in archive.namelist():
            if any(part in name for part in _REFUSED):
                raise ValueError(
                    f"{path} holds '{name}', an object that is code; export the network again "
                    "without it, as plain operations of torch"
                )
            if name.endswith(".json") and "/extra/" not in name:
                for text in _suspicious(json.loads(archive.read(name))):
                    raise ValueError(
                        f"{path} holds '{text}' where an operator of torch is expected; it is not "
                        "opened, since it may run code that you did not name"
                    )
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = "1"
    try:
        return torch.export.load(path)
    except Exception as error:  # whatever a file that is not what it should be leads to
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{path} cannot be read as a program of torch.export ({reason}); export it again with "
            f"this version of torch, {torch.__version__}"
        ) from error
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


@contextmanager
def _archive(path: Path) -> Iterator[ZipFile]:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        with ZipFile(path) as archive:
            yield archive
    except (BadZipFile, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} is no complete .pt2 file ({error}); it was cut short, or is something else"
        ) from error


def _suspicious(value: Any, key: str = "") -> Iterator[str]:
    """Texts of a graph that torch would call or evaluate, and that are no operator or size."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _suspicious(part, name)
    elif isinstance(value, list):
        for part in value:
            yield from _suspicious(part, key)
    elif isinstance(value, str) and key == "target" and value.startswith(("torch", "_op", "math")):
        found = _OPERATOR.fullmatch(value)
        if found is None or found[1] in _NO_NAMESPACE:
            yield value
    elif isinstance(value, str) and (
        (key == "target" and value.startswith("#"))
        or (key == "expr_str" and (not _EXPRESSION.fullmatch(value) or _NO_SIZE.search(value)))
    ):
        yield value
