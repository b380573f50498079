"""Coverage-guided fuzzing of everything that reads a file of ours: ``make fuzz``.

atheris keeps the changes that reach new branches of ``rgpr`` and changes these further, which finds
what a generator that knows nothing of the code does not. Every input is a file whose first byte
says what it is read as. A file of ours gets the right checksum first, or all changes would end
there. Any error but a ``ValueError`` that names the file is a finding, as are a hang and a process
that takes 4 GiB. A finding ends the run, and its input is kept in ``build/fuzz``.

``python tests/trust/fuzz.py FOLDER -max_total_time=120`` runs two minutes; other options are those
of libFuzzer.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path
from random import Random

import atheris
import numpy as np
import torch

with atheris.instrument_imports(include=["rgpr"]):
    import rgpr
    from rgpr._files.archives import arrays_of
    from rgpr._files.outputs.parts import Parts
    from rgpr.audit.monitor.unfinished import Unfinished

sys.path.insert(0, str(Path(__file__).parents[1]))
from torch import nn

from trust.mutations import (
    mutated_json,
    mutated_npz,
    mutated_safetensors,
    resealed,
)

FORMATS = sorted((Path(__file__).parents[1] / "formats").glob("*.safetensors"))
MODEL, STATE, ARRAYS, COUNT = range(4)
torch.set_num_threads(1)
warnings.simplefilter("ignore")


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def calibrated() -> rgpr.RGPR:
    torch.manual_seed(0)
    model = rgpr.RGPR(small()).fit(torch.randn(40, 4), progress=False)
    model.calibrate(torch.randn(20, 4), torch.arange(20) % 3, progress=False)
    return model


class Fuzz:
    """What is read, and the files to begin with."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model, self.network = folder, calibrated(), small()
        self.state = folder / "s.safetensors"

    def seeds(self) -> list[bytes]:
        """A file of every kind, behind the byte that says which."""
        found = [bytes([MODEL]) + path.read_bytes() for path in FORMATS]
        self.model.save(self.state)
        found.append(bytes([MODEL]) + self.state.read_bytes())
        monitor = rgpr.Monitor(self.model, bins=16)
        monitor.update(torch.randn(40, 4))
        monitor.save(self.state)
        found.append(bytes([STATE]) + self.state.read_bytes())
        self.state.unlink()
        parts = Parts(self.folder / "p.csv", {"chunk": 20})
        with parts.held():
            parts.add({"score": np.arange(9.0), "flag": np.zeros(9, bool)}, ["a line"])
        found.append(bytes([ARRAYS]) + (parts.folder / "00000000.npz").read_bytes())
        found.append(bytes([COUNT]) + (parts.folder / "parts.json").read_bytes())
        return found

    def one(self, data: bytes) -> None:
        """Read one file."""
        if not data:
            return
        kind, content = data[0] % 4, data[1:]
        try:
            if kind == MODEL:
                path = self.folder / "m.safetensors"
                path.write_bytes(resealed(content))
                rgpr.load(path, self.network)
            elif kind == STATE:
                path = self.state
                path.write_bytes(resealed(content))
                Unfinished(path, {}, 0.0).begun(self.model)
            elif kind == ARRAYS:
                path = self.folder / "a.npz"
                path.write_bytes(content)
                arrays_of(path)
            else:
                parts = Parts(self.folder / "p.csv", {"chunk": 20})
                path = parts.folder
                (path / "parts.json").write_bytes(content)
                parts._take_up(path / "parts.json")
                list(parts)
        except ValueError as error:
            if str(path) not in str(error):
                raise


SEEDS: list[bytes] = []


def changed(data: bytes, most: int, seed: int) -> bytes:
    """The next input: changed by what its bytes mean, or as libFuzzer changes any."""
    random = Random(seed)
    kind, content = (data[0] % 4, data[1:]) if len(data) > 1 else (MODEL, b"")
    others = [each[1:] for each in SEEDS if each[0] == kind]
    try:
        if random.random() < 0.5:
            if kind in (MODEL, STATE):
                made = mutated_safetensors(content, others, random)[0]
            else:
                change = mutated_npz if kind == ARRAYS else mutated_json
                made = change(content, others, random)
            return (bytes([kind]) + made)[:most]
    except Exception:  # the input is no longer of a form that can be changed so
        pass
    return bytes(atheris.Mutate(data, most))


def main(arguments: list[str]) -> None:
    corpus = Path(arguments[0])
    corpus.mkdir(parents=True, exist_ok=True)
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        fuzz = Fuzz(Path(folder))
        SEEDS.extend(fuzz.seeds())
        for number, seed in enumerate(SEEDS):
            (corpus / f"seed-{number}").write_bytes(seed)
        limits = ["-timeout=60", "-rss_limit_mb=4096", "-max_len=20000", "-print_final_stats=1"]
        kept = f"-artifact_prefix={corpus.parent}/finding-"
        options = [sys.argv[0], str(corpus), *limits, kept, *arguments[1:]]
        atheris.Setup(options, fuzz.one, custom_mutator=changed)
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
