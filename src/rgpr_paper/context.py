"""The options of a run, which every experiment is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from rgpr._network.checks import one_of

__all__ = ["Context"]


@dataclass(frozen=True)
class Context:
    """How to run an experiment: the options of ``rgpr paper run``.

    Attributes:
        out: Folder for the files of all experiments.
        data: Folder that holds the data sets, see :mod:`rgpr_paper.data`.
        device: Where to train and predict.
        seeds: One network is trained for each of them.
        recipe: Which training plan the image networks have, ``"fast"`` or ``"paper"``. The stored
            results call it by this word.
        small: Whether to run the small version, on digits or made data, which shows that
            everything works.
        sets: In-distribution image sets; ``None`` stands for the experiment's own.
        download: Let torchvision download what is missing.
        imports: Modules that the user named, which register experiments or detectors; they are
            part of the command that repeats the run.
    """

    out: Path
    data: Path | None = None
    device: str = "cpu"
    seeds: tuple[int, ...] = (0, 1, 2)
    recipe: str = "fast"
    small: bool = False
    sets: tuple[str, ...] | None = None
    download: bool = False
    imports: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        one_of("recipe", self.recipe, ("fast", "paper"))
        if not self.seeds:
            raise ValueError("no seeds; give at least one")
        if self.data is not None and not self.data.is_dir() and not self.download:
            raise ValueError(
                f"there is no folder {self.data}; name the one with the data sets, or add "
                "--download to fill it"
            )
        try:
            kind = torch.device(self.device).type
        except RuntimeError:
            raise ValueError(f"device {self.device!r}: use cpu, cuda or cuda:1") from None
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device {self.device!r}: torch finds no GPU here; use --device cpu")

    def image_sets(self, *default: str) -> tuple[str, ...]:
        """The in-distribution sets to run: those asked for, the digits if small, or the default."""
        return self.sets or (("digits",) if self.small else default)

    def command(self, experiment: str) -> str:
        """The command that runs the same again, with ``ROOT`` for the folder of data."""
        parts = ["rgpr paper run", experiment, *(f"--import {Path(m).name}" for m in self.imports)]
        parts += ["--small" if self.small else ""]
        parts += ["--data ROOT" if self.data else "", f"--device {self.device}"]
        parts += [f"--seeds {' '.join(map(str, self.seeds))}", f"--recipe {self.recipe}"]
        parts += [f"--sets {' '.join(self.sets)}" if self.sets else "", f"--out {self.out.name}"]
        return " ".join(part for part in parts if part)
