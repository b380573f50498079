from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import rgpr
from networks import LeNet, Reused, laplace_over_blobs, mlp
from rgpr.storage import FORMAT, read, write


def saved(tmp_path: Path, network: nn.Module | None = None) -> tuple[Path, rgpr.RGPR]:
    model = rgpr.RGPR(network or mlp()).fit([torch.randn(40, 4)])
    model.sigma2 = torch.rand(len(model.layers))
    path = tmp_path / "m.safetensors"
    model.save(path)
    return path, model


def test_round_trip(tmp_path: Path) -> None:
    path, model = saved(tmp_path, Reused())
    loaded = rgpr.load(path, Reused())
    x = 3 * torch.randn(9, 4)
    assert torch.equal(loaded(x), model(x))
    assert torch.equal(loaded.variance(x), model.variance(x))
    assert torch.equal(loaded.sigma2, model.sigma2)
    assert loaded.layers == model.layers == ["input", "relu#0", "relu#1"]
    assert os.listdir(tmp_path) == ["m.safetensors"]


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_round_trip_of_last_layer_laplace(tmp_path: Path, structure: str, likelihood: str) -> None:
    la, x, _ = laplace_over_blobs(likelihood, structure)
    model = rgpr.RGPR(la).fit([x])
    model.save(tmp_path / "m.safetensors")
    loaded = rgpr.load(tmp_path / "m.safetensors", mlp())
    assert loaded.likelihood == likelihood
    for expected, ours in zip(
        model(x) if likelihood == "regression" else [model(x)],
        loaded(x) if likelihood == "regression" else [loaded(x)],
        strict=True,
    ):
        assert torch.equal(ours, expected)


def test_buffers_layout_dtype_and_options_come_back(tmp_path: Path) -> None:
    network = LeNet().to(memory_format=torch.channels_last)
    x = torch.randn(40, 1, 8, 8)
    network(x)  # moves BatchNorm's statistics
    model = rgpr.RGPR(network, nan="raise").fit([x])
    model.save(tmp_path / "m")
    loaded = rgpr.load(tmp_path / "m", LeNet())
    torch.testing.assert_close(loaded(x), model(x))
    assert loaded.nan == "raise"
    wide = rgpr.RGPR(mlp().double()).fit([torch.randn(40, 4).double()])
    wide.save(tmp_path / "wide")
    loaded = rgpr.load(tmp_path / "wide", mlp().double())
    x = torch.randn(5, 4).double()
    assert torch.equal(loaded(x), wide(x))


def test_tied_weights(tmp_path: Path) -> None:
    def tied() -> nn.Sequential:
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        return nn.Sequential(first, nn.ReLU(), second)

    path, model = saved(tmp_path, tied())
    x = torch.randn(5, 4)
    assert torch.equal(rgpr.load(path, tied())(x), model(x))


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.safetensors"):
        rgpr.load(tmp_path / "missing.safetensors", mlp())


def test_no_such_folder(tmp_path: Path) -> None:
    model = saved(tmp_path)[1]
    with pytest.raises(FileNotFoundError, match=r"no folder .*missing to save m\.safetensors"):
        model.save(tmp_path / "missing" / "m.safetensors")


def test_truncated_file(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    whole = path.read_bytes()
    for length in (0, 4, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="not a complete safetensors file"):
            rgpr.load(path, mlp())


def test_wrong_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(mlp().state_dict(), path)
    with pytest.raises(ValueError, match=r"not one that RGPR\.save wrote"):
        rgpr.load(path, mlp())


def test_newer_format_and_unknown_posterior(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"x": torch.ones(1)}, path, metadata={"rgpr_format": str(FORMAT + 1), "rgpr": "{}"})
    with pytest.raises(ValueError, match=f"has format {FORMAT + 1}.*upgrade"):
        rgpr.load(path, mlp())
    network = mlp()
    weights = {f"network.{k}": v for k, v in network.state_dict().items()}
    write(path, weights, {"posterior": "oracle", "config": {}, "layers": []})
    with pytest.raises(ValueError, match=r"kind 'oracle'.*'last-layer-laplace', 'map'"):
        rgpr.load(path, network)


def test_incomplete_content(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    tensors, about = read(path)
    for missing in ("sigma2", "layer.0.mean", "layer.1.axes"):
        write(path, {k: v for k, v in tensors.items() if k != missing}, about)
        with pytest.raises(ValueError, match=r"is incomplete: it has no '(sigma2|mean|axes)'"):
            rgpr.load(path, mlp())
    write(path, tensors, {k: v for k, v in about.items() if k != "nan"})
    with pytest.raises(ValueError, match="is incomplete: it has no 'nan'"):
        rgpr.load(path, mlp())


def test_a_point_regressor_comes_back_as_one(tmp_path: Path) -> None:
    x = torch.randn(40, 4)
    model = rgpr.RGPR(mlp(), likelihood="regression").fit([x])
    model.save(tmp_path / "m")
    loaded = rgpr.load(tmp_path / "m", mlp())
    assert loaded.likelihood == "regression"
    assert torch.equal(loaded(x)[1], model(x)[1])


def test_wrong_network_is_refused_and_left_alone(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    for network, message in (
        (mlp(width=17), r"'0\.weight' is float32 \(16, 4\) in the file and float32 \(17, 4\) in"),
        (mlp().double(), r"is float32 \(16, 4\) in the file and float64"),
        (mlp(hidden=1), r"no '4\.weight' in the network"),
        (mlp(hidden=3), r"no '6\.weight' in the file"),
    ):
        before = {k: v.clone() for k, v in network.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            rgpr.load(path, network)
        assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())


def test_writing_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = saved(tmp_path)
    before = path.read_bytes()

    def fail(*args: object, **kwargs: object) -> None:
        Path(str(args[1])).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("rgpr.storage.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        model.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_extra_state_is_not_lost_silently(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"steps": 3}

        def set_extra_state(self, state: dict[str, int]) -> None:
            pass

    model = rgpr.RGPR(nn.Sequential(Extra(4, 4), nn.ReLU(), nn.Linear(4, 3)))
    model.fit([torch.randn(40, 4)])
    with pytest.raises(TypeError, match=r"'network\.0\._extra_state' is dict.*lost"):
        model.save(tmp_path / "m")


def test_the_metadata_is_plain_json(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    header_length = int.from_bytes(path.read_bytes()[:8], "little")
    metadata = json.loads(path.read_bytes()[8 : 8 + header_length])["__metadata__"]
    assert metadata["rgpr_format"] == str(FORMAT)
    assert json.loads(metadata["rgpr"])["layers"] == ["input", "1", "3"]
    # As readable as any file that this user makes.
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
