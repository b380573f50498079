"""Files: safetensors with our format's version and a checksum in the metadata.

There is no pickle and no half-written file. A file of which a single bit has changed is refused,
unless its format is 1 or 2, which have no checksum. The checksum is the SHA-256 of the whole file,
with zeros where the checksum itself stands.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .._atomic import replacing

__all__ = ["FORMAT", "check_same_network", "kinds", "read", "whole", "write"]

FORMAT = 3
# The first format with a checksum.
_SEALED = 3
_CHECKSUM = "rgpr_sha256"
_NO_CHECKSUM = 64 * "0"
_BLOCK = 2**20
# How often a file is read that somebody writes meanwhile.
_TRIES = 10
# Bytes of a description; those of models with thousands of layers and columns have a tenth of this.
_LONGEST = 1 << 24


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], about: Any) -> None:
    """Write tensors and a JSON-able description, atomically.

    Raises:
        TypeError: A tensor is no tensor or quantised, or ``about`` is not JSON.
        ValueError: The description is longer than any that is read.
        FileNotFoundError: The folder does not exist.
        OSError: The file cannot be written, such as on a full disk.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.is_quantized:
            quantised = "_packed_params" in name or isinstance(tensor, Tensor)
            what = "part of a quantised network" if quantised else "extra state of the network"
            raise TypeError(
                f"'{name}' is {type(tensor).__name__}, {what}, and would be lost in a "
                "file of tensors. Save with torch.save(model.state_dict(), path), and load with "
                "RGPR(network).load_state_dict(torch.load(path)), where the network was "
                f"{'quantised in the same way' if quantised else 'made in the same way'}"
            )
    # Tied weights share memory, which the format refuses; each name gets its own copy.
    copies = {name: whole(t).cpu().contiguous().clone() for name, t in tensors.items()}
    described = json.dumps(about)
    _check_length(path, described)
    metadata = {"rgpr_format": str(FORMAT), "rgpr": described, _CHECKSUM: _NO_CHECKSUM}
    with replacing(path) as temporary:
        try:
            save_file(copies, temporary, metadata=metadata)
        except SafetensorError as error:
            raise OSError(
                f"{path} could not be written ({error}); what was there is left"
            ) from error
        _seal(temporary)


def _seal(path: Path) -> None:
    """Sort the metadata in a file's header, and put the checksum in.

    Safetensors writes the metadata in a random order; sorted, equal models give equal files. The
    header is the same JSON in another order, so it keeps its length and the tensors behind it stay
    where they are.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(ordered) > length:  # pragma: no cover
            raise RuntimeError(f"the header of {path} grew from {length} to {len(ordered)} bytes")
        file.seek(8)
        file.write(ordered.ljust(length))
    start, checksum = _place_and_checksum(path, _NO_CHECKSUM)
    with path.open("r+b") as file:
        file.seek(start)
        file.write(checksum.encode())


def _place_and_checksum(path: Path, written: str) -> tuple[int, str]:
    """Where in a file the checksum stands that is ``written`` in it, and what it should be."""
    with path.open("rb") as file:
        start = file.read(8)
        header = file.read(int.from_bytes(start, "little"))
        mark = f'"{_CHECKSUM}":"{written}"'.encode()
        if header.count(mark) != 1:
            raise ValueError(
                f"{path} is damaged: its checksum cannot be found; save or copy it again"
            )
        found = sha256(
            start + header.replace(mark, mark.replace(written.encode(), _NO_CHECKSUM.encode()))
        )
        while block := file.read(_BLOCK):
            found.update(block)
    return 8 + header.index(mark) + mark.index(written.encode()), found.hexdigest()


def whole(tensor: Tensor) -> Tensor:
    """The tensor, gathered from all processes if it is sharded over them; all must call it."""
    gather = getattr(tensor.detach(), "full_tensor", None)
    return tensor.detach() if gather is None else gather()


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], Any, int]:
    """Tensors, description and format of a file that :func:`write` made.

    The path is opened twice, for the checksum and for header and tensors, because safetensors takes
    paths alone. Another process may replace the file in between, so what was read counts only if
    the path still leads to the same file afterwards. Otherwise it is read again.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, not ours, of a newer format, or written all the time.
    """
    path = Path(path)
    for _ in range(_TRIES):
        before = _identity(path)
        try:
            found = _read_once(path)
        except ValueError:
            if _identity(path) == before:
                raise
        else:
            if _identity(path) == before:
                return found
    raise ValueError(
        f"{path} was written each of the {_TRIES} times that it was read; load it once whoever "
        "writes it is done"
    )


def _identity(path: Path) -> tuple[int, ...]:
    """What changes if a path leads to another file, or if somebody writes into the file."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _read_once(path: Path) -> tuple[dict[str, Tensor], Any, int]:
    """What :func:`read` returns, of a file that nobody replaces meanwhile."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if "rgpr_format" not in metadata:
                raise ValueError(
                    f"{path} is a safetensors file, but not one that RGPR.save wrote; "
                    "load weights with safetensors.torch.load_model and wrap the network again"
                )
            version = metadata["rgpr_format"]
            if version not in map(str, range(1, FORMAT + 1)):
                raise ValueError(
                    f"{path} has format {version} and this rgpr reads up to {FORMAT}; upgrade rgpr"
                )
            _check_seal(path, metadata, int(version))
            _check_length(path, metadata["rgpr"])
            # Copies, because the file is mapped into memory: if it were written over or cut short
            # later, what was loaded would change or be gone.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return tensors, json.loads(metadata["rgpr"]), int(version)
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a complete safetensors file ({error}); it was cut short, or is "
            "something else. Save or copy it again"
        ) from error
    except (KeyError, RecursionError, ValueError) as error:
        if str(path) in str(error):
            raise
        raise ValueError(
            f"{path} is damaged: its description is no JSON ({type(error).__name__}: {error}); "
            "save or copy it again"
        ) from error


def _check_length(path: Any, described: str) -> None:
    """Refuse a description that would take much memory, before it is read as JSON."""
    if len(described) > _LONGEST:
        raise ValueError(
            f"{path} has a description of {len(described)} characters, and at most {_LONGEST} are "
            "read"
        )


def _check_seal(path: Path, metadata: Mapping[str, str], version: int) -> None:
    """Refuse a file whose checksum is not that of its bytes; files of old formats have none."""
    written = metadata.get(_CHECKSUM)
    if written is None and version < _SEALED:
        return
    if written is None or _place_and_checksum(path, written)[1] != written:
        raise ValueError(
            f"{path} is damaged: its bytes do not have the checksum that was saved with them; save "
            "or copy it again"
        )


def kinds(tensors: Mapping[str, Any], dtypes: bool = True) -> dict[str, str]:
    """The dtype and the shape of each tensor, in words."""

    def kind(t: Tensor) -> str:
        dtype = f"{str(t.dtype).removeprefix('torch.')} " if dtypes else ""
        return f"{dtype}{tuple(t.shape)}"

    return {name: kind(t) for name, t in tensors.items() if isinstance(t, Tensor)}


def check_same_network(
    weights: dict[str, Tensor], network: nn.Module, path: Any, *, dtypes: bool = True
) -> None:
    """Refuse weights that do not fit the network one to one, naming the first that differ.

    Args:
        weights: By their names.
        network: What they are for.
        path: Where they come from.
        dtypes: Whether a weight of another dtype is another one.
    """
    sharded = [name for name, p in network.named_parameters() if hasattr(p, "full_tensor")]
    if sharded:
        raise ValueError(
            f"'{sharded[0]}' is sharded over processes (fully_shard), and cannot take the weights "
            f"of {path}; load into the plain network, and shard it afterwards"
        )

    here, saved = kinds(network.state_dict(), dtypes), kinds(weights, dtypes)
    problems = [f"no '{k}' in the network" for k in saved if k not in here]
    problems += [f"no '{k}' was saved" for k in here if k not in saved]
    problems += [
        f"'{k}' was {saved[k]} and is {here[k]} in the network"
        for k in saved
        if k in here and saved[k] != here[k]
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(
            f"{path} was saved with another network: {'; '.join(problems[:3])}{more}. "
            "Pass a network of the architecture and dtype that was saved"
        )
