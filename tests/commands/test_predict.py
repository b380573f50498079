"""``rgpr fit``, ``calibrate``, ``predict``, ``score``: from files to files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rgpr
from rgpr.cli import main

MODEL = ["--model", "command_nets:digits"]


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What a command that succeeds says, in JSON."""
    capsys.readouterr()
    status = main([*arguments, "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    report: dict[str, Any] = json.loads(out)
    assert report["command"] == arguments[0]
    return report


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that fails says, on stderr and in one piece."""
    capsys.readouterr()
    assert main(list(arguments)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert err.startswith(f"rgpr {arguments[0]}: ")
    return err


def arrays(path: str) -> dict[str, Any]:
    with np.load(path) as file:
        return dict(file)


def same_model(one: str, other: str) -> bool:
    """Whether two files hold the same; safetensors writes its header's entries in any order."""
    from rgpr.saving.container import read

    (tensors, about, _), (others, other_about, _) = read(one), read(other)
    same = all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
    return about == other_about and set(tensors) == set(others) and same


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)
    )


def test_from_a_network_to_answers(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands give what the calls of the library give."""
    fit = ["fit", *MODEL, "--weights", "weights.safetensors", "--train", "train.npz"]
    report = told(capsys, *fit, "--out", "m.safetensors")
    assert report["rows"] == 900
    assert report["layers"] == ["input", "1", "3"]
    assert main([*fit, "--out", "again.safetensors"]) == 0
    assert same_model("again.safetensors", "m.safetensors")
    calibrate = ["calibrate", "m.safetensors", *MODEL, "--val", "val.npz", "--out", "c.safetensors"]
    report = told(capsys, *calibrate)
    assert (report["examples"], report["labelled"]) == (500, True)
    assert report["accuracy"] > 0.9
    predict = ["predict", "c.safetensors", *MODEL, "new.npz", "--alpha", "0.1"]
    report = told(capsys, *predict, "--coverage", "0.8", "--out", "p.npz")
    model = rgpr.load("c.safetensors", network())
    x = torch.from_numpy(arrays("new.npz")["X"])
    expected = model.predict(list(x.split(256)), alpha=0.1, coverage=0.8, progress=False)
    found = arrays("p.npz")
    for name, array in expected._arrays():
        np.testing.assert_array_equal(found.pop(name), array)
    assert found == {}
    assert report["rows"] == len(x)
    assert report["flagged"] == int(expected.flag.sum())  # type: ignore[union-attr]
    told(capsys, "score", "c.safetensors", *MODEL, "new.npz", "--out", "s.npz")
    scores = arrays("s.npz")
    assert list(scores) == ["score", "p_value"]
    np.testing.assert_array_equal(scores["score"], expected.score)
    np.testing.assert_array_equal(scores["p_value"], expected.p_value)


@pytest.mark.parametrize("ending", ["parquet", "csv", "npz"])
def test_every_form_of_data_gives_the_same_file(
    ending: str, fitted: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for form, more in (
        ("new.npz", []),
        ("new.csv", []),
        ("new.parquet", []),
        ("new", ["--preprocess", "command_nets:flat"]),
    ):
        out = f"{Path(form).suffix or 'folder'}.{ending}"
        told(capsys, "predict", "m.safetensors", *MODEL, form, "--out", out, *more)
        files.append(out)
    first = Path(files[0]).read_bytes()
    assert [Path(file).read_bytes() == first for file in files[1:3]] == [True, True]
    assert not list(here.glob("*.parts"))
    read = table(files[0]), table(files[3])
    assert list(read[1]) == ["path", *read[0]]  # images have names beside
    assert read[1]["path"][0] == "0/0000.png"
    for name, column in read[0].items():
        np.testing.assert_array_equal(column, read[1][name])


def table(path: str) -> dict[str, Any]:
    import pandas as pd

    if path.endswith(".npz"):
        return arrays(path)
    frame = pd.read_csv(path) if path.endswith(".csv") else pd.read_parquet(path)
    assert frame["flag"].dtype == bool
    return {name: frame[name].to_numpy() for name in frame.columns}


def test_a_table_says_what_the_frame_says(
    fitted: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Columns are those of ``Predictions.to_frame``."""
    import pandas as pd

    told(capsys, "predict", "m.safetensors", *MODEL, "new.npz", "--out", "p.parquet")
    model = rgpr.load("m.safetensors", network())
    x = torch.from_numpy(arrays("new.npz")["X"])
    expected = model.predict(list(x.split(256)), progress=False).to_frame()
    pd.testing.assert_frame_equal(pd.read_parquet("p.parquet"), expected)


def test_images_from_the_fit_on(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder and an array of images give the same model and the same answers."""
    x, y = (arrays("new.npz")[name] for name in ("X", "target"))
    np.savez("images.npz", x=x.reshape(-1, 1, 8, 8), y=y)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 32), nn.ReLU(),
        nn.Linear(32, 10),
    )  # fmt: skip
    torch.save({"state_dict": net.state_dict()}, "images.pt")
    for number, form in enumerate(("images.npz", "new")):
        model = f"{number}.safetensors"
        named = ["--model", "command_nets:images"]
        more = [*named, "--train", form, "--out", model]
        report = told(capsys, "fit", "--weights", "images.pt", *more)
        assert report["classes"] == (None if number == 0 else [str(c) for c in range(10)])
        told(capsys, "calibrate", model, *named, "--val", form, "--out", model)
        told(capsys, "predict", model, *named, form, "--out", f"{number}.npz")
    assert same_model("0.safetensors", "1.safetensors")
    first, second = arrays("0.npz"), arrays("1.npz")
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])


def test_columns_are_those_of_the_fit(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit = ["fit", *MODEL, "--weights", "weights.safetensors", "--train", "new.csv"]
    report = told(capsys, *fit, "--out", "m.safetensors")
    assert report["columns"] == [f"p{i:02}" for i in range(64)]
    predict = ["predict", "m.safetensors", *MODEL, "--out", "p.csv"]
    told(capsys, *predict, "new.parquet")
    text = Path("new.csv").read_text()
    Path("other.csv").write_text(text.replace('"p07"', '"seven"'))
    said = refused(capsys, *predict, "other.csv")
    assert "other.csv: the columns are not those that the model was fitted on" in said
    assert "it lacks 'p07' and it has 'seven' besides" in said
    assert said.endswith("Give the columns the names that they had in the data of the fit\n")
    Path("more.csv").write_text(text.replace('"label"', '"species"'))
    said = refused(capsys, *predict, "more.csv")
    assert "it has 'species' besides. Pass --target species if" in said
    assert "--columns NAMES with commas, which are p00, p01, p02, … and 61 more" in said
    said = refused(capsys, *predict, "more.csv", "--target", "speces")
    assert "no column 'speces', did you mean 'species'? There are p00, p01, p02, … and 62" in said
    said = refused(capsys, *fit[:-1], "more.csv", "--out", "other.safetensors")
    assert "no target. If one of these columns holds the targets, name it by --target NAME" in said
    assert max(map(len, said.splitlines())) < 400
    told(capsys, *predict, "more.csv", "--target", "species")


@pytest.mark.filterwarnings("ignore:no --weights")
def test_a_regression_with_two_targets(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = np.random.default_rng(0).normal(size=(300, 6))
    np.savetxt("t.csv", rows, delimiter=",", header="a,b,c,d,u,v", comments="")
    Path("command_nets_r.py").write_text(
        "from torch import nn\n"
        "def net():\n    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()"
    )
    model = ["--model", "command_nets_r:net", "--target", "u,v"]
    torch.manual_seed(0)
    fit = ["fit", *model, "--train", "t.csv", "--likelihood", "regression"]
    told(capsys, *fit, "--out", "r.safetensors")
    weights = ["calibrate", "r.safetensors", *model, "--val", "t.csv", "--out", "r.safetensors"]
    assert told(capsys, *weights)["labelled"]
    told(capsys, "predict", "r.safetensors", *model, "t.csv", "--out", "r.npz")
    found = arrays("r.npz")
    assert {"mean", "variance", "low", "high", "p_value"} <= set(found)
    assert found["mean"].shape == (300, 2)
    inside = ((found["low"] <= rows[:, 4:]) & (rows[:, 4:] <= found["high"])).all(1)
    assert inside.mean() >= 0.85


def test_without_a_calibration(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit = ["fit", *MODEL, "--weights", "weights.safetensors", "--train", "train.npz"]
    told(capsys, *fit, "--out", "m.safetensors")
    predict = ["predict", "m.safetensors", *MODEL, "new.npz", "--out", "p.npz"]
    report = told(capsys, *predict)
    assert report["flagged"] is None
    assert list(arrays("p.npz")) == ["score", "probabilities", "label", "confidence"]
    assert "was not calibrated" in refused(capsys, *predict, "--alpha", "0.1")
    assert "calibrated with targets" in refused(capsys, *predict, "--coverage", "0.9")


def test_a_program_needs_no_code(
    fitted: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = told(capsys, "export", "m.safetensors", *MODEL, "--form", "pt2", "--out", "m.pt2")
    assert report["outputs"] == ["probabilities", "score", "p_value"]
    told(capsys, "predict", "m.safetensors", *MODEL, "new.csv", "--out", "model.npz")
    monkeypatch.setattr("rgpr._files.networks.networks.named", None)
    told(capsys, "predict", "m.pt2", "new.csv", "--out", "program.npz")
    told(capsys, "score", "m.pt2", "new.csv", "--out", "scores.npz")
    model, program, scores = (arrays(f"{name}.npz") for name in ("model", "program", "scores"))
    model.pop("set")
    assert list(program) == list(model)
    for name, array in program.items():
        tolerance = 2.1 / 501 if name == "p_value" else 1e-4
        np.testing.assert_allclose(array.astype(float), model[name].astype(float), atol=tolerance)
    np.testing.assert_array_equal(scores["score"], program["score"])
    report = told(capsys, "info", "m.pt2")
    assert (report["fitted_on"], report["calibrated_on"]) == (900, 500)
    predict = ["predict", "m.pt2", "--out", "p.npz"]
    assert "leave out --model" in refused(capsys, *predict, "new.csv", *MODEL)
    assert "no sets" in refused(capsys, *predict, "new.csv", "--coverage", "0.9")
    assert "alpha = 0.001 is below" in refused(capsys, *predict, "new.csv", "--alpha", "0.001")
    np.savez("wide.npz", x=np.zeros((3, 65), np.float32))
    assert "shape (65,)" in refused(capsys, *predict, "wide.npz")
    # Any program with a score is taken, also one that says nothing about itself.
    torch.export.save(torch.export.load("m.pt2"), "plain.pt2")
    told(capsys, "predict", "plain.pt2", "new.csv", "--out", "plain.npz")
    assert list(arrays("plain.npz")) == ["score", "p_value", "flag", "output"]
    assert "says nothing about itself" in refused(capsys, "info", "plain.pt2")


def test_a_network_as_a_program_needs_no_code(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rgpr._files.networks.networks import load_weights

    net = network()
    load_weights(net, Path("weights.safetensors"))
    batch = torch.export.Dim("batch")
    exported = torch.export.export(net, (torch.zeros(2, 64),), dynamic_shapes=({0: batch},))
    torch.export.save(exported, "net.pt2")
    told(capsys, "fit", "--model", "net.pt2", "--train", "train.npz", "--out", "a.safetensors")
    weights = ["--weights", "weights.safetensors", "--train", "train.npz"]
    told(capsys, "fit", *MODEL, *weights, "--out", "b.safetensors")
    told(capsys, "score", "a.safetensors", "--model", "net.pt2", "new.csv", "--out", "a.csv")
    told(capsys, "score", "b.safetensors", *MODEL, "new.csv", "--out", "b.csv")
    assert Path("a.csv").read_bytes() == Path("b.csv").read_bytes()
    assert "holds its weights" in refused(
        capsys, "fit", "--model", "net.pt2", *weights, "--out", "c.safetensors"
    )
    assert "network alone" in refused(capsys, "predict", "net.pt2", "new.csv", "--out", "p.csv")


def test_onnx(fitted: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import onnxruntime

    told(capsys, "export", "m.safetensors", *MODEL, "--out", "m.onnx")
    session = onnxruntime.InferenceSession("m.onnx")
    assert [output.name for output in session.get_outputs()] == [
        "probabilities",
        "score",
        "p_value",
    ]
    said = refused(capsys, "export", "m.safetensors", *MODEL, "--form", "onnx", "--out", "m.pt2")
    assert "ends in .onnx or .pt2" in said


def test_info_needs_no_network(
    fitted: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = told(capsys, "info", "m.safetensors")
    assert report["likelihood"] == "classification"
    assert report["layers"] == ["input", "1", "3"]
    assert (report["fitted_on"], report["calibrated_on"]) == (900, 500)
    assert report["with_targets"] is True
    assert main(["info", "m.safetensors"]) == 0
    out = capsys.readouterr().out
    assert "calibrated on 500\n" in out
    assert "base          map: A trained network as it is. All uncertainty" in out
    assert "residual      onset: inputs like the training data are answered as by the base" in out
    assert "format        version 3 of the file's layout; 3 is the newest" in out
    assert f"rgpr {rgpr.__version__}" in out
    assert "not one that RGPR.save wrote" in refused(capsys, "info", "weights.safetensors")
    assert "no file nothing" in refused(capsys, "info", "nothing")


def test_what_a_user_can_get_wrong(
    fitted: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predict = ["predict", "m.safetensors", "new.csv", "--out"]
    assert "name the network by --model" in refused(capsys, *predict, "p.csv")
    assert "no folder" in refused(capsys, *predict, "no/p.csv", *MODEL)
    missing = ["predict", "m.safetensors", "none.csv", "--out", "p.csv", *MODEL]
    assert "no file or folder none.csv" in refused(capsys, *missing)
    other = refused(capsys, *predict, "p.csv", "--model", "command_nets:images")
    assert "m.safetensors was saved with another network" in other
    assert "--device" in refused(capsys, *predict, "p.csv", *MODEL, "--device", "cuda:99")
    with pytest.raises(SystemExit) as stopped:
        main([*predict, "p.xls", *MODEL])
    assert stopped.value.code == 2
    assert "expected a name that ends in .parquet, .csv or .npz" in capsys.readouterr().err
    assert main([*predict, "p.csv", "--model", "command_nets:broken", "--traceback"]) == 1
    assert "Traceback" in capsys.readouterr().err
    few = ["calibrate", "m.safetensors", *MODEL, "--val", "few.npz", "--out", "few.safetensors"]
    np.savez("few.npz", x=arrays("val.npz")["images"][:5])
    capsys.readouterr()
    assert main(few) == 0
    said = capsys.readouterr()
    assert "rgpr calibrate: warning: 5 examples: no p-value is below 1/6" in said.err
    assert "no p-value is below" not in said.out
    assert main([*few, "--json"]) == 0
    said = capsys.readouterr()
    assert any("5 examples" in line for line in json.loads(said.out)["warnings"])
    assert "rgpr calibrate: warning: 5 examples" in said.err
    assert "alpha = 0.05 is below" in refused(
        capsys, "predict", "few.safetensors", "new.csv", *MODEL, "--out", "p.csv"
    )
    assert not list(here.glob("*.parts"))


def test_what_a_users_code_prints_is_no_part_of_the_json(
    fitted: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("command_nets_loud.py").write_text(
        "import command_nets\n"
        "def digits():\n    print('building')\n    return command_nets.digits()\n"
    )
    score = ["score", "m.safetensors", "new.npz", "--model", "command_nets_loud:digits"]
    assert main([*score, "--out", "s.npz", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["rows"] == 397
    assert "building" in said.err


@pytest.mark.filterwarnings("ignore:no --weights")
def test_classes_are_not_guessed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that lacks a class would number the others wrongly."""
    fit = ["fit", "--model", "command_nets:images", "--train", "new", "--out", "m.safetensors"]
    told(capsys, *fit)
    Path("part").mkdir()
    for name in "024":
        (Path("part") / name).symlink_to(here / "new" / name)
    calibrate = ["calibrate", "m.safetensors", "--model", "command_nets:images", "--val", "part"]
    calibrate += ["--out", "c.safetensors"]
    assert "has 3 classes, 0, 2, 4, and the network 10 outputs" in refused(capsys, *calibrate)
    names = ",".join(map(str, range(10)))
    assert told(capsys, *calibrate, "--classes", names)["labelled"]
    assert "not among --classes" in refused(capsys, *calibrate, "--classes", "0,1,2")
