"""Which files are read, which file of answers each goes into, and which of these are finished."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..._images import ENDINGS

__all__ = [
    "INPUTS",
    "check_apart",
    "check_known",
    "input_files",
    "is_finished",
    "is_parquet",
    "looks",
    "parts_of",
]

# Under this name a file of answers says how the files looked that it was made of.
INPUTS = b"rgpr_inputs"


def input_files(named: Sequence[str | os.PathLike[str]]) -> list[str]:
    """The files of inputs, all of one kind, in the order of their names.

    Args:
        named: Folders and files. Folders are read with all folders below them, also where these
            are links; names in them that begin with a dot or an underscore are left out, as every
            reader of folders of parquet does, and so are files of other kinds.

    Raises:
        FileNotFoundError: A file is not there, or there is none.
        ValueError: A named file is of another kind, is named twice, or there are both kinds.
    """
    found: list[str] = []
    for each in named:
        path = os.path.abspath(each)
        if os.path.isdir(path):
            found += filter(_is_known, _within(path))
            continue
        if not os.path.exists(path):
            raise FileNotFoundError(f"there is no {path}")
        if not _is_shown(os.path.basename(path)):
            raise ValueError(
                f"{path} begins with a dot or an underscore, and readers of folders would leave "
                "out a file of answers of that name; rename it"
            )
        if not _is_known(path):
            raise ValueError(
                f"{path} is neither a parquet file nor an image ({', '.join(ENDINGS)}); leave it "
                "out, or give it the ending of what it is"
            )
        found.append(path)
    if not found:
        what = named[0] if len(named) == 1 else named
        raise FileNotFoundError(f"there is no {what} with parquet files or images")
    files = sorted(found)
    twice = next((a for a, b in pairwise(files) if a == b), None)
    if twice is not None:
        raise ValueError(f"{twice} is named twice, so its rows would be in the answers twice")
    if len({is_parquet(name) for name in files}) > 1:
        what = " and ".join(map(str, named[:2]))
        raise ValueError(f"{what} holds both parquet files and images; pass one kind at a time")
    return files


def _within(folder: str, above: frozenset[str] = frozenset()) -> Iterator[str]:
    """The files in a folder and in those below it; a link that leads back up is not entered."""
    real = os.path.realpath(folder)
    if real in above:
        return
    for name in sorted(filter(_is_shown, os.listdir(folder))):
        path = os.path.join(folder, name)
        if os.path.isdir(path):
            yield from _within(path, above | {real})
        else:
            yield path


def _is_shown(name: str) -> bool:
    return name[0] not in "._"


def _is_known(file: str) -> bool:
    return is_parquet(file) or Path(file).suffix.lower() in ENDINGS


def is_parquet(file: str | os.PathLike[str]) -> bool:
    """Whether a file has the ending of parquet files."""
    return Path(file).suffix.lower() == ".parquet"


def check_apart(named: Iterable[Any], files: Iterable[str], parts: Iterable[Path]) -> None:
    """Refuse answers that would be inputs: of a later run, or by taking their place.

    Args:
        named: The folders and files that were named.
        files: The files of inputs.
        parts: The files of answers.
    """
    answers = list(parts)
    folder = answers[0].parent
    for root in (Path(each).resolve() for each in named if Path(each).is_dir()):
        if folder.is_relative_to(root):
            raise ValueError(
                f"{folder} is in the folder of inputs {root}, where a later run would take the "
                "answers for inputs; name a folder outside of it"
            )
    same = sorted({os.path.realpath(f) for f in files} & {os.path.realpath(a) for a in answers})
    if same:
        raise ValueError(
            f"{same[0]} is a file of inputs, and would be replaced by its answers; name another "
            "folder for them"
        )


def parts_of(files: list[str], folder: Path, images: int) -> dict[Path, list[str]]:
    """Which files go into which file of answers.

    Args:
        files: What :func:`input_files` gives.
        folder: The folder of answers.
        images: How many images have their answers in one file.
    """
    if is_parquet(files[0]):
        root = os.path.commonpath([os.path.dirname(name) for name in files])
        return {folder / os.path.relpath(name, root): [name] for name in files}
    starts = range(0, len(files), images)
    return {
        folder / f"images-{start:09d}.parquet": files[start : start + images] for start in starts
    }


def check_known(folder: Path, parts: Iterable[Path]) -> None:
    """Refuse a folder with parquet files that are not the answers of any of the inputs.

    Whoever reads the folder would take their rows for answers of these inputs.
    """
    found = _within(str(folder)) if folder.is_dir() else []
    there = {Path(file) for file in found if is_parquet(file)}
    others = sorted(there - set(parts))
    if others:
        raise ValueError(
            f"{folder} holds {others[0].name}{f' and {len(others) - 1} more' * (len(others) > 1)}, "
            "which none of these inputs has its answers in: they are somebody else's, or the "
            "inputs are gone or grouped otherwise. Move them away, or name another folder"
        )


def looks(files: Iterable[str]) -> bytes:
    """The names, sizes and times of change of files, shortened: others if one is written anew.

    Times are in whole seconds, because not every machine sees finer ones of a shared disk.
    """
    found = ((file, os.stat(file)) for file in files)
    lines = "\n".join(f"{file} {now.st_size} {int(now.st_mtime)}" for file, now in found)
    return sha256(lines.encode()).hexdigest().encode()


def is_finished(answers: Path, files: Iterable[str]) -> bool:
    """Whether a file of answers is there, whole, and made of these files as they are now."""
    import pyarrow.parquet as pq  # type: ignore[import-untyped]

    if not answers.exists():
        return False
    try:
        about = pq.read_schema(answers).metadata or {}
    except (OSError, ValueError):  # it was cut short, say by a disk that was full
        return False
    return bool(about.get(INPUTS) == looks(files))
