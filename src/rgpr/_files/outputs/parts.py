"""Answers in parts beside the file that they will become, so that a killed run goes on.

Beside ``p.parquet`` there is a folder ``p.parquet.parts`` while a run lasts. It holds a file for
each finished chunk of rows and ``parts.json``: the settings, how many chunks are finished, and the
checksum of each. Each of these files is written wholly or not at all, a chunk before it is counted.
So whenever a run is killed, what is counted is there, and the next run goes on behind it. As chunks
begin at the same rows and batches have the same rows in every run, the joined file is the same as
well. A chunk whose bytes have changed is refused.
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
from ..._resuming import alone, check_same, digest
from ...saving.parts import complete
from ..archives import arrays_of
from ..inputs.images import image_files

__all__ = ["Parts", "fingerprint"]

Arrays = Mapping[str, np.ndarray[Any, Any]]
_STATE = "parts.json"
_AGAIN = "pass --restart to begin this run again"


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
        self._checksums: list[str] = []

    @contextmanager
    def held(self) -> Iterator[Parts]:
        """Open the folder for this process alone, and take up what is finished."""
        self.folder.mkdir(exist_ok=True)
        with alone(self.folder / "lock", self.folder, "--out"):
            state = self.folder / _STATE
            if self._restart:
                state.unlink(missing_ok=True)
            if state.is_file():
                self._take_up(state)
            self._note()
            try:
                yield self
            except Exception:
                if not any(True for _ in self):  # nothing to go on with
                    self._remove()
                raise

    def _take_up(self, state: Path) -> None:
        """Read how far an earlier run had come."""
        with complete(state, _AGAIN):
            begun = json.loads(state.read_text(encoding="utf-8"))
            check_same(self.folder, begun["settings"], self._settings)
            done, skipped, checksums = begun["done"], begun["skipped"], begun["checksums"]
            for words in (skipped, checksums):
                if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
                    raise ValueError("it lists something that is no text")
            if type(done) is not int or done != len(checksums):
                raise ValueError(f"it counts {done!r} chunks, and has {len(checksums)} checksums")
        self.done, self.skipped, self._checksums = done, skipped, checksums

    def _note(self) -> None:
        state = {
            "settings": self._settings,
            "done": self.done,
            "skipped": self.skipped,
            "checksums": self._checksums,
        }
        with replacing(self.folder / _STATE) as temporary:
            temporary.write_text(json.dumps(state))

    def add(self, arrays: Arrays, skipped: list[str]) -> None:
        """Write one more chunk."""
        with replacing(self._path(self.done)) as temporary:
            np.savez(temporary, **arrays)  # type: ignore[arg-type]
            checksum = digest(temporary)
        self.done += 1
        self._checksums = [*self._checksums, checksum]
        self.skipped += skipped
        self._note()

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08}.npz"

    def __len__(self) -> int:
        return self.done

    def __iter__(self) -> Iterator[Arrays]:
        """Every chunk that has rows, one in memory at a time."""
        first: dict[str, Any] = {}
        for number in range(self.done):
            path = self._path(number)
            with complete(path, _AGAIN):
                if not path.is_file() or digest(path) != self._checksums[number]:
                    raise ValueError("it is not the chunk that was written")
                found = arrays_of(path)
                if not found:  # nothing in these rows could be read
                    continue
                form = {name: (array.dtype.kind, array.shape[1:]) for name, array in found.items()}
                first = first or form
                rows = {array.shape[:1] for array in found.values()}
                if "score" not in found or len(rows) > 1 or form != first:
                    raise ValueError("its arrays are not the answers for some rows")
            yield found

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
    found = hashlib.sha256()
    for file in image_files(path) if path.is_dir() else [path]:
        try:
            about = file.stat()
            when = f"{about.st_size}\0{about.st_mtime_ns}"
        except OSError:
            when = "not there"
        found.update(f"{file.relative_to(path).as_posix()}\0{when}\n".encode())
    return found.hexdigest()[:16]
