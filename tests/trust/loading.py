"""Loads files in a process that has little memory, and prints how each of them ended.

``python loading.py MEBIBYTES`` reads lines of JSON, ``{"how": ..., "path": ...}``, and prints for
each a line ``{"error": NAME or null, "said": ...}``. A file that takes more memory than that beside
what the process has when it starts ends in a ``MemoryError``.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.csv
import pyarrow.parquet
import torch
from PIL import Image  # noqa: F401
from torch import nn

import rgpr
from rgpr._files.inputs.data import read
from rgpr._files.networks.networks import load_weights

# The same number on every machine, because each thread takes addresses of its own.
torch.set_num_threads(1)
pyarrow.set_cpu_count(2)
pyarrow.set_io_thread_count(2)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def data(path: Path, on_error: str = "stop") -> None:
    for _ in read(path, on_error=on_error):
        pass


HOW: dict[str, Callable[[Path], object]] = {
    "model": lambda path: rgpr.load(path, network()),
    "weights": lambda path: load_weights(network(), path),
    "data": data,
}

if __name__ == "__main__":
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + (int(sys.argv[1]) << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for line in sys.stdin:
        asked = json.loads(line)
        answer = {"error": None, "said": ""}
        try:
            HOW[asked["how"]](Path(asked["path"]))
        except Exception as error:
            answer = {"error": type(error).__name__, "said": str(error)}
        print(json.dumps(answer), flush=True)
