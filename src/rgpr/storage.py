"""Files: safetensors with our format's version in the metadata. No pickle, no half-written file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

__all__ = ["FORMAT", "read", "write"]

FORMAT = 1


def write(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], about: Any) -> None:
    """Write tensors and a JSON-able description, atomically.

    Raises:
        TypeError: A tensor is no tensor, or ``about`` is not JSON.
        FileNotFoundError: The folder does not exist.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"'{name}' is {type(tensor).__name__}, not a tensor, and would be lost; "
                "keep such extra state outside the network"
            )
    # Tied weights share memory, which the format refuses; each name gets its own copy.
    copies = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    metadata = {"rgpr_format": str(FORMAT), "rgpr": json.dumps(about)}
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent} to save {path.name} in; make it first")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(copies, temporary, metadata=metadata)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], Any]:
    """Tensors and description of a file that :func:`write` made.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, not ours, or of a newer format.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if "rgpr_format" not in metadata:
                raise ValueError(
                    f"{path} is a safetensors file, but not one that RGPR.save wrote; "
                    "load weights with safetensors.torch.load_model and wrap the network again"
                )
            version = int(metadata["rgpr_format"])
            if version > FORMAT:
                raise ValueError(
                    f"{path} has format {version} and this rgpr reads up to {FORMAT}; upgrade rgpr"
                )
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(  # noqa: SIM118
                metadata["rgpr"]
            )
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a complete safetensors file ({error}); it was cut short, or is "
            "something else. Save or copy it again"
        ) from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
