"""How far a reader has to walk: calls, files and changes of file behind one call of the library.

``python -m benchmarks.walk`` traces real calls on a CPU and counts the functions of this library
that run, in how many files they are, and how often the next one is in another file than the one
before. Library code of torch is not counted, and neither are comprehensions and lambdas, which a
reader sees where they stand.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import rgpr

from .networks import laplace, mlp

LIBRARY = str(Path(rgpr.__file__).parent)


@dataclass
class Walk:
    """The functions that ran, in order, by file."""

    files: list[str] = field(default_factory=list)

    def __enter__(self) -> Walk:
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(LIBRARY) and code.co_name[0] != "<":
            self.files.append(code.co_filename)

    @property
    def changes(self) -> int:
        return sum(a != b for a, b in zip(self.files, self.files[1:], strict=False))

    def __str__(self) -> str:
        return f"{len(self.files):6} calls {len(set(self.files)):4} files {self.changes:6} changes"


def walked(run: Callable[[], Any]) -> Walk:
    """The walk of a second call: the first may import and prepare things."""
    run()
    with Walk() as walk:
        run()
    return walk


def walks() -> dict[str, Walk]:
    """Each of the calls that users make most."""
    torch.manual_seed(0)
    network = mlp().eval()
    x, y = torch.randn(256, 784), torch.arange(256) % 10
    batches = list(zip(x.split(64), y.split(64), strict=True))
    plain = rgpr.RGPR(network).fit(batches, progress=False)
    bayesian = rgpr.RGPR(laplace(network, x)).fit(batches, progress=False)
    paper = rgpr.RGPR(network, residual="paper").fit(batches, progress=False)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "model(x), network": walked(lambda: plain(x)),
            "model(x), Laplace": walked(lambda: bayesian(x)),
            "model.score(x)": walked(lambda: plain.score(x)),
            "fit, four batches": walked(lambda: plain.fit(batches, progress=False)),
            "calibrate": walked(lambda: plain.calibrate(batches, progress=False)),
            "tune": walked(lambda: paper.tune(batches, progress=False)),
        }


if __name__ == "__main__":
    for name, walk in walks().items():
        print(f"{name:20}{walk}")
