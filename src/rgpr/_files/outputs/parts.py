"""Answers in parts beside the file that they will become, so that a killed run goes on.

Beside ``p.parquet`` there is a folder ``p.parquet.parts`` while a run lasts. It holds a file for
each finished chunk of rows and ``parts.json``: the settings, and how many chunks are finished. Each
of these files is written wholly or not at all, a chunk before it is counted. So whenever a run is
killed, what is counted is there, and the next run goes on behind it. As chunks begin at the same
rows and batches have the same rows in every run, the joined file is the same as well.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ..._atomic import put_in_place, replacing
from ..._resuming import alone, check_same
from ..inputs.images import image_files

__all__ = ["Parts", "fingerprint"]

Arrays = Mapping[str, np.ndarray[Any, Any]]
_STATE = "parts.json"


class Parts:
    """The finished chunks of one output file.

    Args:
        out: The file. A link stays one: the file that it points to is replaced.
        settings: All that the answers depend on, for JSON.
        restart: Throw away what another run left.

    Attributes:
        done: How many chunks are finished.
        skipped: What was left out so far, with reasons.

    Raises:
        FileNotFoundError: There is no folder for the file.
        ValueError: The parts that are there belong to other settings.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any], *, restart: bool = False) -> None:
        self._form = out.suffix
        if out.is_symlink():
            out = Path(os.path.realpath(out))
        if not out.parent.is_dir():
            raise FileNotFoundError(f"no folder {out.parent} to write {out.name} in; make it first")
        if out.is_dir():
            raise ValueError(f"{out} is a folder; name a file")
        self.out, self.folder = out, out.with_name(f"{out.name}.parts")
        self._settings = json.loads(json.dumps(settings))
        self._restart = restart
        self.done, self.skipped = 0, list[str]()

    @contextmanager
    def held(self) -> Iterator[Parts]:
        """Open the folder for this process alone, and take up what is finished."""
        self.folder.mkdir(exist_ok=True)
        with alone(self.folder / "lock", self.folder, "--out"):
            state = self.folder / _STATE
            if self._restart:
                state.unlink(missing_ok=True)
            if state.is_file():
                begun = json.loads(state.read_text())
                check_same(self.folder, begun["settings"], self._settings)
                self.done, self.skipped = begun["done"], list(begun["skipped"])
            self._note()
            try:
                yield self
            except Exception:
                if not any(True for _ in self):  # nothing to go on with
                    self._remove()
                raise

    def _note(self) -> None:
        state = {"settings": self._settings, "done": self.done, "skipped": self.skipped}
        with replacing(self.folder / _STATE) as temporary:
            temporary.write_text(json.dumps(state))

    def add(self, arrays: Arrays, skipped: list[str]) -> None:
        """Write one more chunk."""
        with replacing(self._path(self.done)) as temporary:
            np.savez(temporary, **arrays)  # type: ignore[arg-type]
        self.done += 1
        self.skipped += skipped
        self._note()

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08}.npz"

    def __len__(self) -> int:
        return self.done

    def __iter__(self) -> Iterator[Arrays]:
        """Every chunk that has rows, one in memory at a time."""
        for number in range(self.done):
            with np.load(self._path(number), allow_pickle=False) as file:
                if file.files:
                    yield {name: file[name] for name in file.files}

    @contextmanager
    def finishing(self) -> Iterator[Path]:
        """A path for the joined file, which takes its place once it is written; parts go then."""
        joined = self.folder / f"joined{self._form}"
        yield joined
        put_in_place(joined, self.out)
        self._remove()

    def _remove(self) -> None:
        # First of all what counts the chunks: without it, a folder that is left is no beginning.
        (self.folder / _STATE).unlink(missing_ok=True)
        shutil.rmtree(self.folder)


def fingerprint(path: Path) -> str:
    """What changes when a file, or any image that is read of a folder, is written to.

    These are sizes and times; an image that is not there, as behind a broken link, has neither.
    """
    digest = hashlib.sha256()
    for file in image_files(path) if path.is_dir() else [path]:
        try:
            about = file.stat()
            when = f"{about.st_size}\0{about.st_mtime_ns}"
        except OSError:
            when = "not there"
        digest.update(f"{file.relative_to(path).as_posix()}\0{when}\n".encode())
    return digest.hexdigest()[:16]
