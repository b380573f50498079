"""Unpacked files, compared with the archives that they came from.

torchvision compares the md5 of the archives of MNIST, Fashion-MNIST, KMNIST and EMNIST while it
downloads them, and reads what it unpacked from them later without a second look. It leaves the
archives beside the unpacked files, so both can be compared at every read. Where an archive is gone
nothing can be compared, because nobody published hashes of the unpacked files.
"""

from __future__ import annotations

import gzip
import hashlib
import zipfile
from functools import cache
from pathlib import Path
from typing import IO

__all__ = ["check_unpacked"]


def check_unpacked(unpacked: Path, archive: Path, md5: str, member: str | None = None) -> None:
    """Refuse a file that is not what a published archive holds; without the archive do nothing.

    Args:
        unpacked: The file.
        archive: A ``.gz`` file, or a ``.zip`` of such files.
        md5: What was published for the archive, in hexadecimal.
        member: The ``.gz`` file's name in a ``.zip``.

    Raises:
        ValueError: The archive has another md5, or the file has other bytes than the archive.
    """
    if not archive.is_file():
        return
    about = archive.stat()
    found = _digest(archive, "md5", about.st_mtime_ns, about.st_size)
    if found != md5:
        raise ValueError(
            f"{archive} has the md5 {found}, and {md5} was published; remove it and what was "
            "unpacked from it, and run again with --download"
        )
    about = unpacked.stat()
    whole = _digest(unpacked, "sha256", about.st_mtime_ns, about.st_size)
    if whole != _inside(archive, member, md5):
        raise ValueError(
            f"{unpacked} is not what {archive} holds; remove it and run again with --download"
        )


@cache
def _digest(path: Path, kind: str, *when: int) -> str:
    """The hash of a file, computed again when its time or its size has changed."""
    with path.open("rb") as file:
        return _hashed(file, kind)


@cache
def _inside(archive: Path, member: str | None, md5: str) -> str:
    """The SHA-256 of what is packed in an archive that has the published md5."""
    if member is None:
        with gzip.open(archive) as packed:
            return _hashed(packed, "sha256")
    with zipfile.ZipFile(archive) as several, several.open(member) as one, gzip.open(one) as packed:
        return _hashed(packed, "sha256")


def _hashed(file: IO[bytes] | gzip.GzipFile, kind: str) -> str:
    found = hashlib.new(kind, usedforsecurity=False)
    while block := file.read(1 << 20):
        found.update(block)
    return found.hexdigest()
