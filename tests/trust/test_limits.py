"""Files that declare huge sizes are refused before memory is taken for them.

They are loaded in a process that may take 600 MiB more than it has at its start, so that one that
believes what a file declares would fail with another error.
"""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trust.mutations import resealed

if sys.platform != "linux":
    pytest.skip("needs a limit on memory as Linux has it", allow_module_level=True)
for package in ("PIL", "pyarrow"):
    pytest.importorskip(package)

WHOLE = Path(__file__).parents[1] / "formats" / "3-onset.safetensors"
MEBIBYTES = 600


# -- what declares too much ------------------------------------------------------------------------


def model(change: Callable[[dict[str, Any]], None]) -> bytes:
    """A model's file with another header, and the checksum of what it is now."""
    content = WHOLE.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    return resealed(len(text).to_bytes(8, "little") + text + content[8 + length :])


def huge_tensor(header: dict[str, Any]) -> None:
    header["temperature"]["shape"] = [2**40]


def huge_place(header: dict[str, Any]) -> None:
    name = max((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])
    start = header[name]["data_offsets"][0]
    header[name] = {"dtype": "F64", "shape": [2**40], "data_offsets": [start, start + 2**43]}


def described(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        about = json.loads(header["__metadata__"]["rgpr"])
        header["__metadata__"]["rgpr"] = json.dumps({**about, **changes})

    return change


def many_members() -> bytes:
    return model(described(posterior="ensemble", config={"members": 10**9}))


def npy(shape: str) -> bytes:
    """An array of few bytes whose header says that it has another shape."""
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".encode()
    text = text.ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(80)


def npz(member: bytes, packed: int = zipfile.ZIP_STORED) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", packed) as archive:
        archive.writestr("x.npy", member)
    return made.getvalue()


def bomb() -> bytes:
    """A directory that declares 3 GiB of zeros, packed into a few bytes."""
    size = 3 << 30
    content = bytearray(npz(npy(f"({(size - 128) // 8},)"), zipfile.ZIP_DEFLATED))
    place = content.index(b"PK\x01\x02")
    struct.pack_into("<I", content, 22, size)
    struct.pack_into("<I", content, place + 24, size)
    return bytes(content)


def png(width: int, height: int) -> bytes:
    """A picture of a few bytes that declares so many pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [
        chunk(b"IHDR", header),
        chunk(b"IDAT", zlib.compress(bytes(1000))),
        chunk(b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def weights() -> bytes:
    header = b'{"x":{"dtype":"F64","shape":[1099511627776],"data_offsets":[0,8796093022208]}}'
    return len(header).to_bytes(8, "little") + header + bytes(64)


# For each case: how it is loaded, the file's name, what makes it, and what the error says.
CASES: dict[str, tuple[str, str, Callable[[], bytes], str]] = {
    "a tensor": ("model", "m.safetensors", lambda: model(huge_tensor), "m.safetensors"),
    "a tensor beyond the end": ("model", "m.safetensors", lambda: model(huge_place), "m.safetenso"),
    "a header": (
        "model",
        "m.safetensors",
        lambda: (2**40).to_bytes(8, "little") + b"{}",
        "too large",
    ),
    "a description": (
        "model",
        "m.safetensors",
        lambda: model(described(more=[0] * 10**7)),
        "has a description of 30000",
    ),
    "members of an ensemble": ("model", "m.safetensors", many_members, "names 1000000000 members"),
    "weights": ("weights", "w.safetensors", weights, "w.safetensors"),
    "an array": ("data", "d.npz", lambda: npz(npy("(10**12,)")), "d.npz"),
    "an array of many axes": (
        "data",
        "d.npz",
        lambda: npz(npy("(1000000, 1000000)")),
        "declares 8000000000128 bytes, and 208 are there",
    ),
    "an array of another version": (
        "data",
        "d.npz",
        lambda: npz(npy("(10**9,)").replace(b"NUMPY\x01", b"NUMPY\x03", 1)),
        "arrays of numbers do not have",
    ),
    "an array without a name": (
        "data",
        "d.npz",
        lambda: npy("(1000000, 1000000)"),
        "without a nam",
    ),
    "an archive": ("data", "d.npz", bomb, "declares 3221225472 bytes, and at most 1073741824 are"),
    "a row of one cell": (
        "data",
        "d.csv",
        lambda: b"a,b\n1," + b"1" * (200 << 20),
        "d.csv cannot b",
    ),
    "a row of many cells": ("data", "d.csv", lambda: b"a" + b",1" * (50 << 20), "d.csv"),
    "an image": ("data", "photos/a.png", lambda: png(60000, 60000), "exceeds limit of 178956970"),
    "an image at the limit": (
        "data",
        "photos/a.png",
        lambda: png(11000, 11000),
        "121000000 pixels exceed Pillow's limit of 89478485",
    ),
}


@pytest.fixture(scope="module")
def limited() -> Any:
    """Loads a file in the process with little memory."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-W",
            "ignore",
            str(Path(__file__).with_name("loading.py")),
            str(MEBIBYTES),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Each thread's own arena takes 64 MiB of addresses, so the limit would depend on how many
        # threads happen to be at work.
        env={**os.environ, "MALLOC_ARENA_MAX": "2"},
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def load(how: str, path: Path) -> dict[str, Any]:
        process.stdin.write(json.dumps({"how": how, "path": str(path)}) + "\n")
        process.stdin.flush()
        found: dict[str, Any] = json.loads(process.stdout.readline())
        return found

    yield load
    process.communicate()


@pytest.mark.parametrize("case", CASES)
def test_declared_sizes(
    case: str, limited: Any, tmp_path: Path, tally: Callable[..., None]
) -> None:
    how, name, make, words = CASES[case]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(make())
    found = limited(how, path if path.suffix != ".png" else path.parent)
    assert found["error"] == "ValueError", found
    assert name in found["said"]
    assert words in found["said"]
    tally("files that declare huge sizes refused")


def test_what_is_large_and_honest_is_read(
    limited: Any, tmp_path: Path, tally: Callable[..., None]
) -> None:
    """Limits refuse no file of ordinary data: zeros packed well, and long cells."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    np.savez_compressed(tmp_path / "zeros.npz", x=np.zeros((1 << 16, 256), np.uint8))
    words = pa.array(["x" * (64 << 20), "short"])
    table = pa.table({"a": [1.0, 2.0], "words": words})
    pq.write_table(table, tmp_path / "long.parquet")
    wide = pa.table({f"c{n}": np.zeros(20_000, np.float32) for n in range(1500)})
    pq.write_table(wide, tmp_path / "wide.parquet")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(png(16, 16))
    for name in ("zeros.npz", "long.parquet", "wide.parquet", "photos"):
        found = limited("data", tmp_path / name)
        assert found["error"] is None, (name, found)
        tally("large files of ordinary data read in little memory")
