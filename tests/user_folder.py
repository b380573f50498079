"""A folder as a user has it: a module with the network, its weights, and data in every form."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

NETS = '''
"""What a user writes."""
import os
import torch
from torch import nn

def digits():
    return nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)
    )

def images():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 32), nn.ReLU(),
        nn.Linear(32, 10),
    )

class Hungry(nn.Sequential):
    def forward(self, x):
        if len(x) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\\nMore.")
        return super().forward(x)

def hungry():
    return Hungry(*digits())

flattened = 0

def flat(x):
    global flattened
    flattened += 1
    if flattened == int(os.environ.get("RGPR_TEST_WAIT", 0)):
        open("gate").close()  # a pipe with a name: waits until somebody opens it to write
    return x.flatten(1)

calls = 0

def stopping(x):
    global calls
    calls += 1
    if calls == int(os.environ.get("RGPR_TEST_STOP", 0)):
        raise {"yes": KeyboardInterrupt}.get(os.environ.get("RGPR_TEST_INTERRUPT"), ValueError)
    return x

def one(x):
    return x[:1]

def broken():
    raise ZeroDivisionError("a factory of mine")

def number():
    return 3

constant = 3
'''


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder. Tests write to their own, and read from this one."""
    import pyarrow as pa
    import pyarrow.csv as pc
    import pyarrow.parquet as pq
    from PIL import Image
    from safetensors.torch import save_file
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("place")
    (folder / "command_nets.py").write_text(NETS)
    data = load_digits()
    pixels = (15 * data.data).astype(np.uint8)
    x, y = pixels.astype(np.float32) / np.float32(255), data.target
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)
    )
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        out = network(torch.tensor(x[:900]))
        nn.functional.cross_entropy(out, torch.tensor(y[:900])).backward()
        optimizer.step()
    save_file(network.state_dict(), folder / "weights.safetensors")
    np.savez(folder / "train.npz", x=x[:900], y=y[:900])
    np.savez(folder / "val.npz", images=x[900:1400], labels=y[900:1400])
    rows = np.argsort(y[1400:], kind="stable") + 1400  # as image folders are sorted: by class
    np.savez(folder / "new.npz", X=x[rows], target=y[rows])
    table = pa.table({**{f"p{i:02}": x[rows, i] for i in range(64)}, "label": y[rows]})
    pq.write_table(table, folder / "new.parquet", row_group_size=50)
    pc.write_csv(table, folder / "new.csv")
    for number, row in enumerate(rows):
        path = folder / "new" / str(y[row]) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[row].reshape(8, 8)).save(path)
    return folder


@pytest.fixture
def here(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of the test's own, as the current one, with copies of the data and the network."""
    for entry in place.iterdir():
        if entry.is_dir():
            os.symlink(entry, tmp_path / entry.name)
        else:
            shutil.copy(entry, tmp_path)
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    sys.modules.pop("command_nets", None)
    yield tmp_path
    sys.path[:] = before
    sys.modules.pop("command_nets", None)


@pytest.fixture(scope="session")
def fitted(place: Path) -> Path:
    """The folder with a calibrated model, ``m.safetensors``."""
    import rgpr
    from rgpr._files.inputs.data import read
    from rgpr._files.networks.networks import load_weights

    network = nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)
    )
    load_weights(network, place / "weights.safetensors")
    model = rgpr.RGPR(network).fit(read(place / "train.npz").batches(), progress=False)
    model.calibrate(read(place / "val.npz").batches(), progress=False)
    model.save(place / "m.safetensors")
    return place
