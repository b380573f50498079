"""What goes wrong names the file, the option that it was given by, and the option that mends it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rgpr.cli import main

MODEL = ("--model", "command_nets:digits")
WEIGHTS = ("--weights", "weights.safetensors")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(list(arguments)) == 1
    return capsys.readouterr().err


def arrays(path: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(path) as file:
        return file["x"], file["y"]


@pytest.fixture
def audited(fitted: Path, here: Path) -> list[str]:
    return ["audit", *MODEL, *WEIGHTS, "--train", "train.npz", "--out", "r.html"]


def test_data_without_rows(
    audited: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = arrays("train.npz")
    np.savez("empty.npz", x=x[:0], y=y[:0])
    assert "empty.npz (--test) has no rows" in said(capsys, *audited, "--test", "empty.npz")
    more = ("--test", "train.npz", "--val", "empty.npz")
    assert "empty.npz (--val) has no rows" in said(capsys, *audited, *more)
    more = ("--test", "train.npz", "--ood", "none=empty.npz")
    assert "empty.npz (--ood none) has no rows" in said(capsys, *audited, *more)
    fit = ("fit", *MODEL, *WEIGHTS, "--train", "empty.npz", "--out", "e.safetensors")
    assert "empty.npz (--train) has no rows" in said(capsys, *fit)
    calibrate = (
        "calibrate",
        "m.safetensors",
        *MODEL,
        "--val",
        "empty.npz",
        "--out",
        "e.safetensors",
    )
    assert "empty.npz (--val) has no rows" in said(capsys, *calibrate)
    (here / "bad" / "0").mkdir(parents=True)
    (here / "bad" / "0" / "a.png").write_bytes(b"no image")
    flat = ("--preprocess", "command_nets:flat", "--on-error", "skip")
    calibrate = (
        "calibrate",
        "m.safetensors",
        *MODEL,
        "--val",
        "bad",
        "--out",
        "e.safetensors",
        *flat,
    )
    assert "bad (--val) has no rows that can be read" in said(capsys, *calibrate)


def test_rows_that_do_not_fit(audited: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    x, y = arrays("train.npz")
    np.savez("ten.npz", x=x, y=y + 1)
    found = said(capsys, *audited, "--test", "ten.npz")
    assert "rgpr audit: ten.npz (--test): batch 0 has the label 10 " in found
    found = said(capsys, *audited, "--test", "train.npz", "--val", "ten.npz")
    assert "rgpr audit: ten.npz (--val): batch 0 has the label 10 " in found
    np.savez("half.npz", x=x, y=y + 0.5)
    found = said(capsys, *audited, "--test", "half.npz")
    assert "half.npz (--test): batch 0 has targets such as" in found
    assert "say --likelihood regression" in found
    np.savez("square.npz", x=x.reshape(-1, 8, 8))
    found = said(capsys, *audited, "--test", "train.npz", "--ood", "a=square.npz")
    assert "square.npz (--ood a): 900 rows of shape (8, 8), inputs 'x', no targets. " in found
    assert "one input has shape (8, 8)" in found
    assert "--preprocess module:function" in found
    predict = ("predict", "m.safetensors", *MODEL, "square.npz", "--out", "p.csv")
    assert "square.npz (DATA): 900 rows of shape (8, 8)" in said(capsys, *predict)


def test_a_column_too_many(
    audited: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "digit.csv").write_text((here / "new.csv").read_text().replace("label", "digit", 1))
    wanted = "65 columns as inputs, no target. If one of these columns holds the targets, name it"
    predict = ("predict", "m.safetensors", *MODEL, "digit.csv", "--out", "p.csv")
    assert f"digit.csv (DATA): {wanted} by --target NAME" in said(capsys, *predict)
    found = said(capsys, *audited, "--test", "digit.csv")
    assert f"digit.csv (--test): {wanted} by --target NAME" in found


def test_a_table_that_was_saved_with_its_index(
    audited: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pandas as pd

    frame = pd.read_csv("new.csv")
    frame.to_csv("index.csv")
    found = said(capsys, *audited, "--test", "index.csv")
    assert "index.csv: a column without a name would be an input" in found
    assert "frame.to_csv(path, index=False)" in found
    pd.read_csv("index.csv").to_csv("again.csv", index=False)
    assert "again.csv: the column 'Unnamed: 0'" in said(capsys, *audited, "--test", "again.csv")
    columns = ",".join(frame.columns.drop("label"))
    predict = ["predict", "m.safetensors", *MODEL, "index.csv", "--out", "p.csv"]
    assert main([*predict, "--columns", columns]) == 0
    frame.set_index("p00").rename_axis(None).to_parquet("index.parquet")
    predict[4] = "index.parquet"
    assert "the column '__index_level_0__'" in said(capsys, *predict)


def test_images_that_are_bytes(
    audited: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = arrays("train.npz")
    pixels = (255 * x).round().astype(np.uint8)
    np.savez("bytes.npz", x=pixels, y=y)
    fit = ["fit", *MODEL, *WEIGHTS, "--out", "b.safetensors", "--train"]
    found = said(capsys, *fit, "bytes.npz")
    assert "bytes.npz (--train): batch 0: the input has dtype torch.uint8" in found
    assert "x.float() / 255: --divide 255, or in general --preprocess module:function" in found
    assert main([*fit, "bytes.npz", "--divide", "255"]) == 0
    for name, data, more in (("a", "train.npz", ()), ("b", "bytes.npz", ("--divide", "255"))):
        scores = ("score", "b.safetensors", *MODEL, data, "--out", f"{name}.npz", *more)
        assert main([*scores]) == 0
    with np.load("a.npz") as one, np.load("b.npz") as other:
        np.testing.assert_allclose(one["score"], other["score"], rtol=1e-6)
    found = said(capsys, *fit, "new", "--divide", "255", "--preprocess", "command_nets:flat")
    assert "leave out --divide" in found
    with pytest.raises(SystemExit):
        main([*fit, "bytes.npz", "--divide", "0"])


def test_later_errors_do_not_name_data_that_were_read(
    audited: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrate = ("calibrate", "m.safetensors", *MODEL, "--val", "new", "--out", "e.safetensors")
    flat = ("--preprocess", "command_nets:flat", "--max-nll-increase", "-1")
    assert said(capsys, *calibrate, *flat).startswith("rgpr calibrate: max_nll_increase = -1")


@pytest.mark.parametrize(
    ("arguments", "option", "same"),
    [
        (["fit", *WEIGHTS, "--train", "t.safetensors", "--out", "t.safetensors"], "out", "--train"),
        (["fit", *WEIGHTS, "--train", "train.npz", "--out", WEIGHTS[1]], "out", "--weights"),
        (["calibrate", "m.safetensors", "--val", "v", "--out", "link.safetensors"], "out", "--val"),
        (["predict", "m.safetensors", "new.csv", "--out", "./new.csv"], "out", "DATA"),
        (["score", "m.safetensors", "new.csv", "--out", "new.csv"], "out", "DATA"),
        (["monitor", "m.safetensors", "new.csv", "--state", "new.csv"], "state", "DATA"),
        (["monitor", "m.safetensors", "new.csv", "--log", "m.safetensors"], "log", "FILE"),
        (["monitor", "m.safetensors", "new.csv", "--log", "s"], "log", "--state"),
        (["monitor", "m.safetensors", "new.csv", "--prometheus", "s"], "prometheus", "--state"),
        (["monitor", "m.safetensors", "new.csv", "--plot", "new.csv"], "plot", "DATA"),
        (["export", "m.safetensors", "--model", "m.pt2", "--out", "m.pt2"], "out", "--model"),
        (["audit", "--test", "t", "--ood", "a=b.html", "--out", "b.html"], "out", "--ood a"),
    ],
)
def test_nothing_is_written_over_what_is_read(
    arguments: list[str],
    option: str,
    same: str,
    fitted: Path,
    here: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if arguments[0] == "monitor" and "--state" not in arguments:
        arguments = [*arguments, "--state", "s"]
    np.savez(here / "v", x=np.zeros((3, 64)))
    (here / "v.npz").rename(here / "v")
    (here / "link.safetensors").symlink_to("v")
    before = {path: path.read_bytes() for path in here.iterdir() if path.is_file()}
    found = said(capsys, *arguments[:1], *MODEL, *arguments[1:])
    assert f": --{option} " in found
    assert f"is the same file as {same}, which it would overwrite" in found
    assert {path: path.read_bytes() for path in here.iterdir() if path.is_file()} == before


def test_a_models_file_has_a_models_name(
    fitted: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = ["fit", *MODEL, *WEIGHTS, "--train", "train.npz"]
    calibrate = ["calibrate", "m.safetensors", *MODEL, "--val", "val.npz"]
    for arguments in (fit, calibrate):
        with pytest.raises(SystemExit):
            main([*arguments, "--out", "m.npz"])
        assert "'m.npz': expected a name that ends in .safetensors" in capsys.readouterr().err
    assert main([*calibrate, "--out", "m.safetensors"]) == 0  # in its place


def test_levels_are_no_matter_of_the_data(
    fitted: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predict = ("predict", "m.safetensors", *MODEL, "new.csv", "--out", "p.csv")
    for option, value in (("--alpha", "2"), ("--alpha", "1e-9"), ("--coverage", "1.5")):
        assert said(capsys, *predict, option, value).startswith(f"rgpr predict: {option} ")


def test_a_state_is_no_model(fitted: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch = ["monitor", "m.safetensors", "val.npz", *MODEL, "--state", "s.safetensors"]
    assert main(watch) == 0
    found = said(capsys, "info", "s.safetensors")
    assert "s.safetensors is the state of a monitor and no model: rgpr monitor FILE DATA" in found
