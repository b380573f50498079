"""Archives of arrays (``.npz``), whose declared sizes are looked at before any memory is taken.

An array's header says how large the array is, and numpy takes the memory before it reads the
numbers. The directory of an archive says how large a member becomes when it is unpacked. Neither
need be true, and a few bytes may stand for any number of zeros. So an array is read only if header
and directory agree, and if the archive itself is not too small for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile, ZipInfo, is_zipfile
from zlib import error as ZlibError

import numpy as np

__all__ = ["arrays_of", "opened_archive"]

# An array of more bytes than these must not be more than so many times what it is packed into.
# Packed, real data mostly become less than ten times smaller, masks and drawings a hundred times.
_LARGE = 1 << 30
_RATIO = 200
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


@contextmanager
def opened_archive(path: Path) -> Iterator[Mapping[str, np.ndarray[Any, Any]]]:
    """The arrays of an archive by name, read when they are asked for; nothing is unpickled.

    Raises:
        ValueError: The file is no archive, is damaged, or declares sizes beyond the limits. The
            error names the file.
    """
    try:
        with path.open("rb") as raw:
            if raw.read(6) == np.lib.format.MAGIC_PREFIX:
                raise ValueError("it holds one array without a name")
        if not is_zipfile(path):
            raise ValueError(f"{path} is no .npz file, or its end is missing; write it again")
        with ZipFile(path) as archive:
            for member in archive.infolist():
                _check(path, archive, member)
        with np.load(path, allow_pickle=False) as file:
            yield file
    except (BadZipFile, ZlibError, EOFError, NotImplementedError) as error:
        why = str(error) or "it ends too early"
        raise ValueError(f"{path} is damaged ({why}); write or copy it again") from error
    except (ValueError, RuntimeError, OSError) as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        if "pickle" in str(error):  # numpy's advice is to open it all the same
            raise ValueError(
                f"{path} is no .npz file, or holds Python objects, which are not opened; write it "
                "with numpy.savez(path, x=..., y=...)"
            ) from None
        raise ValueError(f"{path}: {error}") from error


def arrays_of(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """All arrays of an archive; see :func:`opened_archive`."""
    with opened_archive(path) as file:
        return {name: file[name] for name in file}


def _check(path: Path, archive: ZipFile, member: ZipInfo) -> None:
    name, size, most = member.filename, member.file_size, max(_LARGE, _RATIO * member.compress_size)
    if member.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
        raise ValueError(f"{path}: '{name}' is packed as numpy never does; write it by numpy.savez")
    if size > most:
        raise ValueError(
            f"{path}: '{name}' declares {size} bytes, and at most {most} are unpacked of a member "
            f"that takes {member.compress_size} in the file; write it unpacked, by numpy.savez"
        )
    if not name.endswith(".npy"):
        return
    try:
        with archive.open(member) as file:
            declared = _declared(file)
    except Exception as error:  # numpy reads a header as Python, which fails in many ways
        raise ValueError(f"{path} is damaged: '{name}' has no header ({error})") from error
    if declared is not None and declared != size:
        raise ValueError(
            f"{path}: '{name}' declares {declared} bytes, and {size} are there; write it again"
        )


def _declared(file: Any) -> int | None:
    """How many bytes a member has by its header; ``None`` of one that numpy refuses by itself."""
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"version {version}, which arrays of numbers do not have")
    shape, _, dtype = _HEADERS[version](file)
    return None if dtype.hasobject else int(file.tell() + math.prod(shape) * dtype.itemsize)
