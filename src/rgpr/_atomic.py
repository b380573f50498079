"""Files that are written wholly or not at all, whatever happens to the process or the machine."""

from __future__ import annotations

import os
import platform
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from uuid import uuid4

__all__ = ["put_in_place", "replacing"]

# Names of temporary folders: the machine, the process that writes, and a number of its own.
_HOST = sha256(platform.node().encode()).hexdigest()[:8]
_TEMPORARY = re.compile(r"\.(?P<host>[0-9a-f]{8})-(?P<process>\d+)-[0-9a-f]{8}\.(?P<name>.+)")


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path to write to that takes the place of ``path`` once all is written, or is gone.

    The file is on the disk before it gets its name, so that a machine that fails leaves the old
    file or the new one. It has the permissions of the file that it replaces, or those of any new
    file of this user. A link stays one: the file that it points to is replaced. What processes of
    this machine that were killed had begun to write in place of ``path`` is removed. The path lies
    in a folder of its own, since some writers, such as that of safetensors, put temporary files of
    their own beside what they write, which nobody could tell from other files after a kill.

    Raises:
        FileNotFoundError: The folder does not exist.
    """
    asked, path = Path(path), Path(os.path.realpath(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent} to save {asked.name} in; make it first")
    _remove_abandoned(path)
    folder = path.with_name(f".{_HOST}-{os.getpid()}-{uuid4().hex[:8]}.{path.name}")
    temporary = folder / path.name
    try:
        folder.mkdir()
        temporary.touch()
        new = stat.S_IMODE(temporary.stat().st_mode)
        with suppress(FileNotFoundError):  # nobody is to read what could not be read before
            temporary.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_IWUSR)
        yield temporary
        put_in_place(temporary, path, new)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put_in_place(written: Path, path: Path, mode: int | None = None) -> None:
    """Give a whole file, once it is on the disk, the name and the permissions of another.

    Args:
        written: The file, in the folder of ``path`` or in one beside it.
        path: The name, which is no link.
        mode: The permissions where there is no file of that name; those that it has by default.
    """
    with suppress(FileNotFoundError):
        mode = stat.S_IMODE(path.stat().st_mode)
    _flush(written, os.O_RDWR)
    if mode is not None:
        written.chmod(mode)  # a writer may have made it anew
    os.replace(written, path)
    with suppress(OSError):  # not every system can
        _flush(path.parent, os.O_RDONLY)


def _flush(path: Path, how: int) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, how)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(path: Path) -> None:
    """Remove what is left of writes to ``path`` whose processes, on this machine, are gone."""
    for found in os.scandir(path.parent):
        made = _TEMPORARY.fullmatch(found.name)
        if made is None or (made["host"], made["name"]) != (_HOST, path.name):
            continue
        if _runs(int(made["process"])):
            continue
        if found.is_dir(follow_symlinks=False):
            shutil.rmtree(found.path, ignore_errors=True)
        else:  # of an earlier version
            Path(found.path).unlink(missing_ok=True)


def _runs(process: int) -> bool:
    if os.name == "posix":  # elsewhere the question itself would end the process
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # it runs, for somebody else
    return True
