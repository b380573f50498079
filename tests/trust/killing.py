"""A process that has imported everything and runs commands in children, which it kills on request.

To import torch takes seconds and a command a fraction of one, so each command runs in a fork. For
every line of JSON on its input, ``{"run": [...], "folder": ..., "after": SECONDS, "user": ID}``, it
forks a child that runs the command in the folder, kills the child after so many seconds if it still
runs, and prints ``{"killed": ..., "status": ..., "seconds": ..., "said": ...}``.

``["save", FILE]`` saves a model; every other command is one of ``rgpr``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)  # before anything is computed: threads do not survive a fork

import jinja2  # noqa: E402, F401
import matplotlib  # noqa: E402
import PIL.Image  # noqa: E402, F401
import pyarrow.csv  # noqa: E402
import pyarrow.parquet  # noqa: E402, F401
from torch import nn  # noqa: E402
from tqdm import tqdm  # noqa: E402

import rgpr  # noqa: E402
import rgpr_paper  # noqa: E402
from rgpr import audit  # noqa: E402, F401
from rgpr._files.outputs import streaming  # noqa: E402, F401
from rgpr.cli import main  # noqa: E402

matplotlib.use("agg")
# tqdm's own lock is one for all forks, and a child that is killed while it holds it keeps it.
tqdm.set_lock(threading.RLock())
rgpr_paper.all_experiments()
"".encode("cp437")  # what zipfile asks for; a child of another user may not read Python's own files


def large_model() -> rgpr.RGPR:
    """A model of a few megabytes, so that its file takes a while to write."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    model = rgpr.RGPR(nn.Sequential(*network, nn.Linear(512, 10)))
    return model.fit(torch.randn(50, 64), progress=False)


def child(asked: dict[str, Any], said: int) -> None:
    """Run a command and end the process with its status."""
    signal.alarm(300)  # a command that waits for ever ends, and not well
    status, arguments = 99, asked["run"]
    try:
        os.chdir(asked["folder"])
        if asked["user"] is not None:
            os.setgroups([])
            os.setuid(asked["user"])
        for descriptor in (1, 2):
            os.dup2(said, descriptor)
        if arguments[0] == "save":
            MODEL.save(arguments[1])
            status = 0
        else:
            status = main(arguments)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def answered(asked: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as said:
        started = time.monotonic()
        process = os.fork()
        if process == 0:
            child(asked, said.fileno())
        if asked["after"] is not None:
            time.sleep(asked["after"])
            os.kill(process, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        said.seek(0)
        return {
            "killed": status == -signal.SIGKILL,
            "status": status,
            "seconds": time.monotonic() - started,
            "said": said.read().decode(errors="replace")[-2000:],
        }


if __name__ == "__main__":
    MODEL = large_model()
    MODEL.save(Path(tempfile.mkdtemp()) / "warm.safetensors")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answered(json.loads(line))), flush=True)
