"""The example of a web service answers on loopback, and its monitor goes on after a restart."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rgpr

SERVICE = Path(__file__).parents[1] / "examples" / "service.py"
NETS = """
from torch import nn

def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
"""


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[str]:
    """The address of a service that runs until the block ends."""
    process = subprocess.Popen(
        [sys.executable, SERVICE, "model.onnx", "--port", "0", *options],
        cwd=folder,
        env={"PYTHONPATH": f"{folder}:{Path(rgpr.__file__).parents[1]}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on "), line + process.stdout.read()
        yield line.removeprefix("listening on ").strip()
    finally:
        process.kill()
        process.wait()


def post(address: str, value: Any) -> tuple[int, Any]:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    try:
        with urllib.request.urlopen(f"{address}/predict", body, timeout=120) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def get(address: str, path: str) -> str:
    with urllib.request.urlopen(address + path, timeout=120) as answer:
        return str(answer.read().decode())


def test_a_service_with_a_monitor(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra export")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model = rgpr.RGPR(network).fit([torch.randn(300, 4)], progress=False)
    model.calibrate([torch.randn(300, 4)], progress=False)
    model.save(tmp_path / "m.safetensors")
    rgpr.export.onnx(model, tmp_path / "model.onnx", torch.randn(2, 4))
    (tmp_path / "nets.py").write_text(NETS)
    x = torch.randn(50, 4)
    x[7, 2] = torch.nan  # such a row is flagged, although it has no p-value
    with serving(tmp_path) as address:  # without the monitor, and without rgpr
        code, answer = post(address, {"x": x.tolist()})
        assert code == 200
        for name, expected in (("probabilities", model(x)), ("p_value", model.p_value(x))):
            found = torch.tensor(answer[name], dtype=expected.dtype)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0, equal_nan=True)
        assert answer["flag"] == model.flag(x).tolist()
        assert answer["flag"][7]
        assert "alarm" not in answer
        wrong = {
            b"no json": "expected",
            b'{"y": 1}': "expected",
            b'{"x": [[1, 2]]}': "shape (1, 2); expected (rows, 4)",
            b'{"x": []}': "shape (0,)",
        }
        for body, words in wrong.items():
            code, answer = post(address, body)
            assert code == 400
            assert words in answer["error"]
        assert json.loads(get(address, "/health")) == {"status": "up"}
        assert "rgpr_requests_total 1" in get(address, "/metrics")
    watch = ("--model", "nets:net", "--fitted", "m.safetensors", "--state", "w.safetensors")
    with serving(tmp_path, *watch) as address:
        assert post(address, {"x": x.tolist()})[1]["alarm"] is False
    with serving(tmp_path, *watch) as address:  # a restart forgets nothing
        assert post(address, {"x": (30 * torch.randn(60, 4)).tolist()})[1]["alarm"] is True
        assert "rgpr_" in get(address, "/metrics")
    assert rgpr.Monitor.load(tmp_path / "w.safetensors", model).count == 110
