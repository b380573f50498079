"""A local Ray cluster, with a worker lost on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

ray = pytest.importorskip("ray")

import rgpr  # noqa: E402
from networks import convolutional, mlp  # noqa: E402
from opening import as_opened  # noqa: E402
from rgpr.integrations import ray as scoring  # noqa: E402
from rgpr.integrations.ray import begun, columns, files, learning, planning  # noqa: E402
from trust.limits import no_hang  # noqa: E402

ROWS = 400


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    """Let a test fail that waits for a CPU of the cluster which no actor will give back."""
    with no_hang(600):
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    # Workers import what this process does.
    places = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(places)}},
    )
    # Workers cannot import this file.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield
    ray.shutdown()


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, rgpr.RGPR]:
    torch.manual_seed(0)
    model = rgpr.RGPR(mlp()).fit([torch.randn(100, 4)])
    model.calibrate([torch.randn(100, 4)], progress=False)
    model.save(tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors", model


def parquet(folder: Path) -> np.ndarray:
    """Eight files of arrays, as a cluster would find them."""
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    rows = [{"id": i, "x": row} for i, row in enumerate(x)]
    ray.data.from_items(rows, override_num_blocks=8).write_parquet(str(folder / "in"))
    return x


class Fragile(scoring.Predictor):
    """Kills its own process once, in the middle of the work."""

    marker = ""

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        assert len(batch["id"]) <= 32, "another batch_size"
        if 100 in batch["id"] and not os.path.exists(self.marker):
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)


def test_every_row_once_although_a_worker_dies(
    cluster: None, saved: tuple[Path, rgpr.RGPR], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = saved
    x = parquet(tmp_path)
    marker = tmp_path / "died"
    monkeypatch.setattr(Fragile, "marker", str(marker))
    monkeypatch.setattr("rgpr.integrations.ray.scoring.Predictor", Fragile)
    scored = scoring.score(ray.data.read_parquet(str(tmp_path / "in")), path, mlp, batch_size=32)
    scored.write_parquet(str(tmp_path / "out"))
    assert marker.exists()
    rows = ray.data.read_parquet(str(tmp_path / "out")).take_all()
    assert sorted(row["id"] for row in rows) == list(range(ROWS))
    rows.sort(key=lambda row: row["id"])
    with torch.no_grad():
        expected = model(torch.from_numpy(x))
        score, p_value = model.score(torch.from_numpy(x)), model.p_value(torch.from_numpy(x))
    np.testing.assert_allclose(
        np.stack([row["probabilities"] for row in rows]), expected.numpy(), atol=1e-6
    )
    assert [row["prediction"] for row in rows] == expected.argmax(1).tolist()
    np.testing.assert_allclose([row["score"] for row in rows], score.numpy(), atol=1e-4)
    # Batches of another size are rounded otherwise, which moves a score by one rank at the most.
    moved = np.abs(np.array([row["p_value"] for row in rows]) - p_value.numpy())
    assert moved.max() <= 1.01 / 101
    assert set(rows[0]) == {
        "id",
        "prediction",
        "confidence",
        "probabilities",
        "score",
        "p_value",
    }


def test_options_reach_the_workers(
    cluster: None, saved: tuple[Path, rgpr.RGPR], tmp_path: Path
) -> None:
    path, _ = saved
    x = parquet(tmp_path)
    options = {"autocast": torch.bfloat16, "scale": 0.5, "keep": ["id"]}
    data = ray.data.read_parquet(str(tmp_path / "in"))
    rows = scoring.score(data, path, mlp, batch_size=50, **options).take_all()
    scoring.score_files(tmp_path / "in", tmp_path / "out", path, mlp, batch_size=50, **options)
    by_hand = scoring.Predictor(path, mlp, **options)
    for found in (rows, answers(tmp_path / "out")):
        found.sort(key=lambda row: row["id"])
        assert [row["id"] for row in found] == list(range(ROWS))
        # The data are in files of fifty rows, so each batch is one of these.
        parts = [by_hand({"x": x[i : i + 50], "id": np.arange(50)}) for i in range(0, ROWS, 50)]
        expected = np.concatenate([part["score"] for part in parts])
        np.testing.assert_allclose([row["score"] for row in found], expected, rtol=1e-5)
    exact = scoring.Predictor(path, mlp, scale=0.5)({"x": x})["score"]
    assert not np.allclose(expected, exact, rtol=1e-5)


def test_ray_is_given_nothing_that_a_release_will_drop(
    cluster: None, saved: tuple[Path, rgpr.RGPR]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scored = scoring.score(ray.data.range(4), saved[0], mlp, column="id", actors=(1, 2))
    assert scored is not None


def test_actors_that_leave_no_cpu_to_read_with_are_warned_of(
    cluster: None, saved: tuple[Path, rgpr.RGPR]
) -> None:
    with pytest.warns(UserWarning, match="2 actors that reserve 1 CPUs each leave no") as told:
        scoring.score(ray.data.range(4), saved[0], mlp, column="id", actors=2)
    assert [each.filename for each in told] == [__file__]


@pytest.mark.parametrize(
    ("actors", "cpus", "there", "none"),
    [(1, 1, 2, False), (2, 0.5, 2, False), (1, 0.9, 1, True), (2, 1, 2, True), (1, 1, 0, False)],
)
def test_a_whole_cpu_has_to_be_left(actors: int, cpus: float, there: float, none: bool) -> None:
    """A cluster that has no CPU yet gets some by being asked for them."""
    assert columns.no_room(actors, cpus, there) == none


def test_a_network_that_cannot_be_made_ends_the_run(
    cluster: None, saved: tuple[Path, rgpr.RGPR]
) -> None:
    def network() -> torch.nn.Module:
        raise ValueError("no weights here")

    with pytest.raises(ray.exceptions.RayError, match="no weights here"):
        scoring.score(ray.data.range(4), saved[0], network, column="id").materialize()


class FragileLearner(learning.Learner):
    """Kills its own process once, when it is given some of its rows."""

    marker = ""

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, object]:
        marker = f"{self.marker}-{self.kind.__name__}"
        if 130 in batch["id"] and not os.path.exists(marker):
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)


def test_learning_is_that_of_one_process_although_a_worker_dies(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them work at a time, and there are more rows than the sample of a state holds."""
    torch.manual_seed(0)
    many = 5 * ROWS
    network, x = mlp().double(), np.random.default_rng(0).normal(size=(many, 4))
    y = np.arange(many) % 3
    rows = [{"id": i, "bytes": 2 * row, "y": y[i]} for i, row in enumerate(x)]
    ray.data.from_items(rows, override_num_blocks=8).write_parquet(str(tmp_path / "in"))
    monkeypatch.setattr(FragileLearner, "marker", str(tmp_path / "died"))
    monkeypatch.setattr("rgpr.integrations.ray.learning.Learner", FragileLearner)
    options = {"column": "bytes", "target": "y", "scale": 0.5, "batch_size": 32}
    options |= {"rows_per_state": 150, "actors": 2, "cpus": 0.5}
    train = ray.data.read_parquet(str(tmp_path / "in"))
    model = scoring.fit(rgpr.RGPR(network), train, **options)
    assert (tmp_path / "died-FitState").exists()
    inputs, labels = torch.from_numpy(x), torch.from_numpy(y)
    alone = rgpr.RGPR(network).fit([(inputs, labels)])
    assert model._fit_count == many
    torch.testing.assert_close(model.score(3 * inputs), alone.score(3 * inputs), rtol=1e-6, atol=0)
    torch.testing.assert_close(model(3 * inputs), alone(3 * inputs), rtol=0, atol=1e-6)
    held_out = ray.data.from_items(
        [{"id": i, "x": row + 1, "y": 0} for i, row in enumerate(x[:200])]
    )
    with pytest.warns(UserWarning, match="all labels are"):
        report = scoring.calibrate(model, held_out, target="y", rows_per_state=50)
    assert (tmp_path / "died-CalibrationState").exists()
    with pytest.warns(UserWarning, match="all labels are"):
        expected = alone.calibrate(inputs[:200] + 1, torch.zeros(200).long())
    assert report.nll == pytest.approx(expected.nll, rel=1e-6)
    for name in ("_references", "_label_scores", "temperature"):
        ours, theirs = getattr(model, name), getattr(alone, name)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def test_a_learner_by_hand(tmp_path: Path) -> None:
    model = rgpr.RGPR(mlp())
    x, y = np.random.default_rng(0).normal(size=(50, 2, 2)), np.arange(50) % 3
    inputs = learning.Inputs("x", 0.5, lambda x: x.flatten(1))
    learner = learning.Learner(rgpr.FitState, model, inputs, "y", 20)
    (tmp_path / "s").write_bytes(learner({"x": x, "y": y})["state"][0])
    state = rgpr.FitState.load(tmp_path / "s", model)
    flat = torch.from_numpy(x).float().flatten(1) * 0.5
    alone = rgpr.RGPR(model.posterior.network).fit([(flat, torch.from_numpy(y))])
    torch.testing.assert_close(
        model.fit(state).score(flat), alone.score(flat), rtol=1e-4, atol=1e-5
    )
    for batch, kind, reason in (
        ({"x": x}, "KeyError", "name the targets with target="),
        ({"x": x, "y": np.array(["a word"] * 50)}, "TypeError", "'a word'"),
        ({"x": x, "y": y + 3}, "ValueError", "classes"),
    ):
        refused = learner(batch)
        assert refused["kind"] == [kind]
        assert reason in refused["reason"][0]

    class WrongError(ValueError):
        pass

    def wrong(x: torch.Tensor) -> torch.Tensor:
        raise WrongError("so it is")

    learner.inputs = learning.Inputs("x", 1.0, wrong)
    refused = learner({"x": x, "y": y})
    assert (refused["kind"][0], refused["reason"][0]) == ("ValueError", "so it is")
    learner.inputs = learning.Inputs("x", 1.0, lambda x: x[:3].flatten(1))
    assert "made shape (3, 4) of 20 rows" in learner({"x": x, "y": y})["reason"][0]


# -- files ----------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import ray
places = os.pathsep.join([{tests!r}, os.environ.get("PYTHONPATH", "")])
runtime = {{"env_vars": {{"PYTHONPATH": places}}}}
ray.init(address={address!r}, log_to_driver=False, runtime_env=runtime)
ray.data.DataContext.get_current().enable_progress_bars = False
from networks import mlp
from rgpr.integrations.ray import score_files
process, out = os.getpid(), Path({out!r})

calls = []

def fatal(x):
    assert len(x) <= 20, "another batch_size"
    calls.append(len(x))
    if len(calls) == 8:  # two files of three batches each, and two batches of the third
        os.kill(process, signal.SIGKILL)  # the one that called score_files
        os.kill(os.getpid(), signal.SIGKILL)
    return x

score_files({inputs!r}, out, {path!r}, mlp, preprocess=fatal, batch_size=20)
"""


def answers(folder: Path) -> list[dict[str, object]]:
    import pyarrow.parquet as pq

    return [row for file in folder.rglob("*.parquet") for row in pq.read_table(file).to_pylist()]


def test_a_killed_run_goes_on(cluster: None, saved: tuple[Path, rgpr.RGPR], tmp_path: Path) -> None:
    path, model = saved
    x = parquet(tmp_path)
    out = tmp_path / "out"
    code = KILLED.format(
        tests=str(Path(__file__).parents[1]),
        address=ray.get_runtime_context().gcs_address,
        inputs=str(tmp_path / "in"),
        out=str(out),
        path=str(path),
    )
    killed = subprocess.run([sys.executable, "-c", code], timeout=240)
    assert killed.returncode == -signal.SIGKILL
    finished = {file: file.stat().st_mtime_ns for file in out.glob("[!.]*.parquet")}
    assert len(finished) == 2
    assert list(out.glob(".*.parquet")) != []  # the third, which was begun
    assert len(scoring.score_files(tmp_path / "in", out, path, mlp, batch_size=20)) == 8
    assert all(file.stat().st_mtime_ns == written for file, written in finished.items())
    assert list(out.glob(".*.parquet")) == []  # what the killed one had begun to write
    rows = sorted(answers(out), key=lambda row: row["id"])
    assert [row["id"] for row in rows] == list(range(ROWS))
    np.testing.assert_allclose(
        [row["score"] for row in rows], model.score(torch.from_numpy(x)).detach(), atol=1e-4
    )
    with pytest.raises(ValueError, match=r"scale was 1\.0 and is 2\.0"):
        scoring.score_files(tmp_path / "in", out, path, mlp, scale=2)
    for left in range(2):  # one file is left to score, and none
        if left == 0:
            min(finished).unlink()
        with pytest.raises(ValueError, match="answers of another run"):
            scoring.score_files(tmp_path / "in", out, path, mlp, preprocess=lambda x: 0.9 * x)
        assert min(finished).exists() == bool(left)
        if left == 0:  # a smaller batch may be what lets a run go on
            scoring.score_files(tmp_path / "in", out, path, mlp, batch_size=7)


def test_a_file_that_is_mended_is_scored_and_the_others_stay(
    cluster: None, saved: tuple[Path, rgpr.RGPR], tmp_path: Path
) -> None:
    path, model = saved
    x, out = parquet(tmp_path), tmp_path / "out"
    first, *_, last = sorted((tmp_path / "in").glob("*.parquet"))
    whole = last.read_bytes()
    last.write_bytes(whole[:100])
    with pytest.raises(ValueError, match="no 'nope'"):
        by_hand(path, [first], out / "by-hand.parquet", column="nope")
    with pytest.raises(ValueError, match=f"{last.name} could not be scored"):
        scoring.score_files(tmp_path / "in", out, path, mlp)
    assert len(answers(out)) == ROWS * 7 // 8  # the others were scored
    last.write_bytes(whole)
    added = tmp_path / "in" / "zz.parquet"
    pq_twice(last, added)
    scoring.score_files(tmp_path / "in", out, path, mlp)
    assert len(answers(out)) == ROWS * 9 // 8
    added.unlink()
    with pytest.raises(ValueError, match=r"holds zz\.parquet, which none of these inputs"):
        scoring.score_files(tmp_path / "in", out, path, mlp)
    (out / added.name).unlink()
    rows = sorted(answers(out), key=lambda row: row["id"])
    assert [row["id"] for row in rows] == list(range(ROWS))
    written = {file.name: file.stat().st_mtime_ns for file in out.glob("*.parquet")}
    pq_twice(first, first)
    (out / last.name).write_bytes(b"")  # as a full disk may leave it
    scoring.score_files(tmp_path / "in", out, path, mlp)
    anew = {f.name for f in out.glob("*.parquet") if f.stat().st_mtime_ns != written[f.name]}
    assert anew == {first.name, last.name}
    rows = sorted(answers(out), key=lambda row: row["id"])
    assert len(rows) == ROWS
    expected = model.score(torch.from_numpy(x)).detach().numpy()
    moved = np.array([row["score"] for row in rows]) - expected
    assert (np.abs(moved) > 1e-3).sum() == ROWS // 8


def pq_twice(file: Path, out: Path) -> None:
    """Write the rows of a file into another, with inputs that are twice as large."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = pq.read_table(file).to_pylist()
    table = pa.table({"id": [r["id"] for r in rows], "x": [[2 * v for v in r["x"]] for r in rows]})
    pq.write_table(table, out)


def test_options_that_fail_do_not_bind_a_folder(tmp_path: Path) -> None:
    """What was begun binds a run only once an answer stands in the folder."""
    begun.check_begun(tmp_path, "m", {"column": "image"}, anew=True)
    begun.check_begun(tmp_path, "m", {"column": "x"}, anew=True)
    begun.check_begun(tmp_path, "m", {"column": "x"}, anew=False)
    with pytest.raises(ValueError, match=r"column was x and is image.*Call it as before"):
        begun.check_begun(tmp_path, "m", {"column": "image"}, anew=False)


def test_answers_come_in_the_order_of_the_rows(
    cluster: None, saved: tuple[Path, rgpr.RGPR]
) -> None:
    """Without a column that names the rows nothing else tells which answer is whose."""
    path, model = saved
    x = np.random.default_rng(0).normal(size=(160, 4)).astype(np.float32)
    first = float(x[0, 0])

    def slow(rows: torch.Tensor) -> torch.Tensor:
        if float(rows[0, 0]) == first:
            time.sleep(3)
        return rows

    before = ray.data.DataContext.get_current().execution_options.preserve_order
    data = ray.data.from_items([{"x": row} for row in x], override_num_blocks=4)
    scored = scoring.score(data, path, mlp, batch_size=40, preprocess=slow, actors=2, cpus=0.5)
    found = [row["score"] for row in scored.iter_rows()]
    np.testing.assert_allclose(found, model.score(torch.from_numpy(x)).detach(), atol=1e-4)
    assert ray.data.DataContext.get_current().execution_options.preserve_order == before


def test_what_workers_refuse_reaches_the_caller_as_it_was(cluster: None) -> None:
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    x[40, 1] = np.nan
    data = ray.data.from_items([{"x": row} for row in x])
    with pytest.raises(ValueError, match=r"not finite.* counted from the first of every 8192 rows"):
        scoring.fit(rgpr.RGPR(mlp()), data, batch_size=20)


@pytest.mark.slow
def test_images_in_folders(cluster: None, tmp_path: Path) -> None:
    from PIL import Image

    def network() -> torch.nn.Module:
        return convolutional(channels=3)

    def channels_first(x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 3, 1, 2)

    torch.manual_seed(0)
    model = rgpr.RGPR(network()).fit([torch.rand(60, 3, 8, 8)])
    model.save(tmp_path / "m")
    pixels = np.random.default_rng(0).integers(0, 256, size=(7, 8, 8, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        folder = tmp_path / "in" / ("cats" if number % 2 else "dogs")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
    options = {"scale": 1 / 255, "preprocess": channels_first}
    scoring.score_files(
        tmp_path / "in", tmp_path / "out", tmp_path / "m", network, images_per_file=3, **options
    )
    assert len(list((tmp_path / "out").glob("images-*.parquet"))) == 3
    found = {int(Path(str(row["path"])).stem): row["score"] for row in answers(tmp_path / "out")}
    images = ray.data.read_images(str(tmp_path / "in"), include_paths=True)
    scored = scoring.score(images, tmp_path / "m", network, column="image", **options).take_all()
    others = {int(Path(row["path"]).stem): row["score"] for row in scored}
    with torch.no_grad():
        expected = model.score(torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255)
    for each in (found, others):
        np.testing.assert_allclose(
            [each[n] for n in range(7)], expected.numpy(), rtol=1e-4, atol=1e-5
        )


def test_files_that_are_refused(tmp_path: Path, saved: tuple[Path, rgpr.RGPR]) -> None:
    path, _ = saved
    (tmp_path / "in").mkdir()
    with pytest.raises(FileNotFoundError, match="with parquet files or images"):
        scoring.score_files(tmp_path / "in", tmp_path / "out", path, mlp)
    for name in ("a.parquet", "b.png"):
        (tmp_path / "in" / name).touch()
    with pytest.raises(ValueError, match="both parquet files and images"):
        scoring.score_files(tmp_path / "in", tmp_path / "out", path, mlp)
    (tmp_path / "in" / "b.png").rename(tmp_path / "in" / "b.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet is a file of inputs, and would be replaced"):
        scoring.score_files([tmp_path / "in" / "a.parquet"], tmp_path / "in", path, mlp)
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "b.parquet").touch()
    with pytest.raises(ValueError, match=r"holds b\.parquet, which none of these inputs"):
        scoring.score_files(tmp_path / "in" / "a.parquet", tmp_path / "out", path, mlp)
    with pytest.raises(TypeError, match="network= is a Sequential; give a function"):
        scoring.score_files(tmp_path / "in", tmp_path / "out", path, mlp())


def test_which_files_are_read(tmp_path: Path) -> None:
    """Every file that a name leads to, and nothing that others hide or are still writing."""
    root, elsewhere = tmp_path / "in", tmp_path / "elsewhere"
    names = ("a.parquet", "sub/b.PARQUET", "about.txt", ".hidden/c.parquet", "_temporary/d.parquet")
    for name in (*names, "._e.parquet", "sub/.f.parquet"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    elsewhere.mkdir()
    (elsewhere / "0123abcd").touch()
    (root / "linked.parquet").symlink_to(elsewhere / "0123abcd")
    (root / "again.parquet").symlink_to(root / "a.parquet")
    (elsewhere / "g.parquet").touch()
    (root / "link").symlink_to(elsewhere)
    (elsewhere / "up").symlink_to(root)
    (root / "link2").symlink_to(elsewhere)
    found = [os.path.relpath(file, root) for file in planning.input_files([root])]
    every = ["a.parquet", "again.parquet", "link/g.parquet", "link2/g.parquet"]
    every += ["linked.parquet", "sub/b.PARQUET"]
    assert found == every
    parts = planning.parts_of(planning.input_files([root]), tmp_path / "out", 10)
    assert [str(part.relative_to(tmp_path / "out")) for part in parts] == every
    listed = planning.input_files([root / "sub", root / "a.parquet"])
    assert [Path(file).name for file in listed] == ["a.parquet", "b.PARQUET"]
    with pytest.raises(ValueError, match=r"about\.txt is neither a parquet file nor an image"):
        planning.input_files([root / "a.parquet", root / "about.txt"])
    with pytest.raises(ValueError, match=r"a\.parquet is named twice"):
        planning.input_files([root / "a.parquet", root])
    with pytest.raises(ValueError, match=r"_e\.parquet begins with a dot or an underscore"):
        planning.input_files([root / "._e.parquet"])
    with pytest.raises(FileNotFoundError, match=r"there is no .*nowhere"):
        planning.input_files([root / "nowhere.parquet"])


def test_counts_and_names_that_are_refused(tmp_path: Path, saved: tuple[Path, rgpr.RGPR]) -> None:
    (tmp_path / "a.parquet").touch()
    for wrong in ({"batch_size": 0}, {"images_per_file": -1}):
        with pytest.raises(ValueError, match="must be a whole number, at least 1"):
            scoring.score_files(tmp_path / "a.parquet", tmp_path / "out", saved[0], mlp, **wrong)
    with pytest.raises(TypeError, match=r"keep=\['id'\]"):
        scoring.score_files(tmp_path / "a.parquet", tmp_path / "out", saved[0], mlp, keep="id")
    with pytest.raises(KeyError, match=r"columns \['id', 'x'\], and no 'nope'"):
        scoring.Predictor(saved[0], mlp, keep=["nope"])({"x": np.zeros((2, 4)), "id": np.ones(2)})
    rows = np.empty(2, dtype=object)
    rows[:] = [np.zeros(4), None]
    with pytest.raises(ValueError, match="row 1 of 'x' has no value"):
        scoring.Predictor(saved[0], mlp)({"x": rows})


class Texts(torch.nn.Module):
    """Takes ids of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = torch.nn.Embedding(50, 8), torch.nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.words(ids).mean(1).relu())


def test_ids_are_no_numbers_to_scale(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(1, 50, size=(40, 6))
    model = rgpr.RGPR(Texts(), input="words").fit([torch.from_numpy(ids)], progress=False)
    model.save(tmp_path / "m")
    found = scoring.Predictor(tmp_path / "m", Texts)({"x": ids})
    np.testing.assert_allclose(found["score"], model.score(torch.from_numpy(ids)).detach())
    with pytest.raises(ValueError, match=r"scale = 0\.5, and the column 'x' holds ids"):
        scoring.Predictor(tmp_path / "m", Texts, scale=0.5)({"x": ids})


def test_answers_inside_the_inputs(tmp_path: Path, saved: tuple[Path, rgpr.RGPR]) -> None:
    """A second run would take them for inputs."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.parquet").touch()
    for out in ("in", "in/answers"):
        with pytest.raises(ValueError, match="would take the answers for inputs"):
            scoring.score_files(tmp_path / "in", tmp_path / out, saved[0], mlp)
    assert [file.name for file in (tmp_path / "in").iterdir()] == ["a.parquet"]


def by_hand(path: Path, inputs: list[Path], out: Path, **options: object) -> int:
    """What an actor of ``score_files`` does with one part."""
    scorer = files.FileScorer(
        path=path, batch_size=8, **{"network": mlp, "size": None, "keep": None, **options}
    )
    batch = {"files": [json.dumps([str(each) for each in inputs])], "out": [str(out)]}
    [failed] = scorer({name: np.array(value) for name, value in batch.items()})["failed"]
    if failed:
        raise ValueError(failed)
    import pyarrow.parquet as pq

    return int(pq.read_metadata(out).num_rows)


@pytest.mark.parametrize("rows", [3, 100])
def test_a_run_goes_on_with_the_functions_that_it_began_with(
    tmp_path: Path, saved: tuple[Path, rgpr.RGPR], rows: int
) -> None:
    """Functions cannot be compared, so the first rows of a finished file are."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    x = torch.randn(rows, 4)
    x[0, 0] = torch.inf  # whose score is infinite both times
    inputs, out = tmp_path / "in.parquet", tmp_path / "out.parquet"
    pq.write_table(pa.table({"x": x.tolist()}), inputs)
    by_hand(saved[0], [inputs], out)
    finished = ([str(inputs)], str(out))
    by_hand(saved[0], [inputs], tmp_path / "more.parquet", finished=finished)
    for changed in (
        {"preprocess": lambda x: 10 * x},
        {"network": lambda: nn.Sequential(*list(mlp())[:-1], Turned(16, 3))},
    ):
        with pytest.raises(ValueError, match="holds answers of another run"):
            by_hand(saved[0], [inputs], tmp_path / "other.parquet", finished=finished, **changed)


def test_a_worker_finds_out_once_that_it_is_refused(
    tmp_path: Path, saved: tuple[Path, rgpr.RGPR]
) -> None:
    """Each part of a run with thousands of them would score the same rows again."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    inputs, out, calls = tmp_path / "in.parquet", tmp_path / "out.parquet", []
    pq.write_table(pa.table({"x": torch.randn(20, 4).tolist()}), inputs)
    by_hand(saved[0], [inputs], out)

    def other(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return 10 * x

    scorer = files.FileScorer(
        path=saved[0],
        network=mlp,
        batch_size=8,
        size=None,
        preprocess=other,
        finished=([str(inputs)], str(out)),
    )
    parts = {"files": np.array([json.dumps([str(inputs)])] * 3)}
    parts["out"] = np.array([str(tmp_path / f"{number}.parquet") for number in range(3)])
    failed = [*scorer(parts)["failed"], *scorer(parts)["failed"]]
    assert len(set(failed)) == 1
    assert "holds answers of another run" in failed[0]
    assert calls == [8, 8]


class Turned(nn.Linear):
    """Gives the logits of the classes with the other sign."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return -super().forward(h)


def test_a_model_that_is_replaced_in_the_middle_of_a_run(
    cluster: None, saved: tuple[Path, rgpr.RGPR], tmp_path: Path
) -> None:
    """Workers that start late, or again, would give answers of another model."""
    path, _ = saved
    parquet(tmp_path)
    other = rgpr.RGPR(mlp()).fit([3 * torch.randn(100, 4)])

    def network() -> torch.nn.Module:  # what a worker calls first
        other.save(path)
        return mlp()

    with pytest.raises(ValueError, match="no longer the model that this run began"):
        scoring.score_files(tmp_path / "in", tmp_path / "out", path, network)
    assert answers(tmp_path / "out") == []


def test_a_file_without_rows_has_the_columns_of_the_others(
    tmp_path: Path, saved: tuple[Path, rgpr.RGPR]
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "out").mkdir()
    table = pa.table({"id": [1, 2], "x": [[0.0, 1.0, 2.0, 3.0], [1.0, 1.0, 1.0, 1.0]]})
    for name, part in (("a", table.slice(0, 0)), ("b", table)):
        pq.write_table(part, tmp_path / f"{name}.parquet")
        rows = by_hand(
            saved[0], [tmp_path / f"{name}.parquet"], tmp_path / "out" / f"{name}.parquet"
        )
        assert rows == part.num_rows
    empty, full = (pq.read_table(tmp_path / "out" / f"{name}.parquet") for name in "ab")
    assert empty.schema == full.schema
    assert pq.read_table(tmp_path / "out")["id"].to_pylist() == [1, 2]


def test_an_ending_in_capitals(tmp_path: Path, saved: tuple[Path, rgpr.RGPR]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": [[0.0, 1.0, 2.0, 3.0]]}), tmp_path / "A.PARQUET")
    (found,) = planning.input_files([tmp_path])
    parts = planning.parts_of([found], tmp_path / "out", 10)
    assert [name.name for name in parts] == ["A.PARQUET"]
    assert by_hand(saved[0], [Path(found)], tmp_path / "out" / "a.parquet") == 1


def test_columns_named_like_answers(tmp_path: Path, saved: tuple[Path, rgpr.RGPR]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    x = np.zeros((2, 4), np.float32)
    predict = scoring.Predictor(saved[0], mlp)
    with pytest.raises(ValueError, match=r"a column 'score', .* keep="):
        predict({"x": x, "score": np.zeros(2)})
    assert "score" in scoring.Predictor(saved[0], mlp, keep=[])({"x": x, "score": np.zeros(2)})
    table = pa.table({"x": x.tolist(), "prediction": [1, 2], "id": [1, 2]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a column 'prediction', .* keep="):
        by_hand(saved[0], [tmp_path / "a.parquet"], tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()
    assert by_hand(saved[0], [tmp_path / "a.parquet"], tmp_path / "out.parquet", keep=["id"]) == 2


def test_columns_of_nested_lists(tmp_path: Path, saved: tuple[Path, rgpr.RGPR]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def written(x: list[object]) -> list[Path]:
        pq.write_table(pa.table({"x": x}), tmp_path / "a.parquet")
        return [tmp_path / "a.parquet"]

    path, model = saved
    nested = [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]]
    flat = {"preprocess": lambda x: x.flatten(1)}
    assert by_hand(path, written(nested), tmp_path / "out.parquet", **flat) == 2
    with torch.no_grad():
        expected = model.score(torch.tensor(nested).flatten(1))
    found = pq.read_table(tmp_path / "out.parquet")["score"].to_numpy()
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5)
    with pytest.raises(ValueError, match=r"a row of 'x' holds parts of the shapes"):
        by_hand(path, written([[[1.0], [3.0, 4.0]]]), tmp_path / "out.parquet")
    with pytest.raises(ValueError, match=r"column 'x' holds \['a', 'b'\]"):
        by_hand(path, written(["a", "b"]), tmp_path / "out.parquet")


def test_images_are_opened_with_care(
    tmp_path: Path, saved: tuple[Path, rgpr.RGPR], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other formats under a known ending, and more pixels than the limit."""
    from PIL import Image

    image = Image.fromarray(np.zeros((1, 4), np.uint8))
    image.save(tmp_path / "a.png", format="TIFF")
    image.save(tmp_path / "b.png")
    image.save(tmp_path / "c.tif")
    options = {"preprocess": lambda x: x[:, 0, :, 0]}
    out = tmp_path / "out.parquet"
    assert [Path(name).name for name in planning.input_files([tmp_path])] == ["a.png", "b.png"]
    assert by_hand(saved[0], [tmp_path / "b.png"], out, **options) == 1
    out = tmp_path / "other.parquet"
    with pytest.raises(ValueError, match=r"a.png cannot be read as an image"):
        by_hand(saved[0], [tmp_path / "a.png"], out, **options)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 3)  # of which Pillow itself would only warn
    with pytest.raises(ValueError, match=r"b.png cannot be read as an image"):
        by_hand(saved[0], [tmp_path / "b.png"], out, **options)


def test_images_are_read_while_others_are_scored(
    tmp_path: Path, saved: tuple[Path, rgpr.RGPR]
) -> None:
    """The first of the second batch, by the time that the first batch goes into the network."""
    from PIL import Image

    names = [tmp_path / f"{number:02d}.png" for number in range(10)]
    for name in names:
        Image.fromarray(np.zeros((1, 4), np.uint8)).save(name)
    begun = threading.Event()

    def scored(x: torch.Tensor) -> torch.Tensor:
        assert begun.wait(60)
        return x[:, 0, :, 0]

    as_opened[str(names[8])] = begun.set
    try:
        assert by_hand(saved[0], names, tmp_path / "out.parquet", preprocess=scored) == 10
    finally:
        as_opened.clear()
    assert [row["path"] for row in answers(tmp_path)] == [str(name) for name in names]


@pytest.mark.parametrize(
    "likelihood", ["classification", pytest.param("regression", marks=pytest.mark.slow)]
)
def test_autocast_and_compiled_graphs(tmp_path: Path, likelihood: str) -> None:
    x = torch.randn(100, 4)
    model = rgpr.RGPR(mlp(), likelihood=likelihood).fit([x])
    model.calibrate([torch.randn(60, 4)], progress=False)
    model.save(tmp_path / "m")
    batch = {"x": np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)}
    expected = scoring.Predictor(tmp_path / "m", mlp)(batch)
    compiled = scoring.Predictor(tmp_path / "m", mlp, compile=True)
    coarse = scoring.Predictor(tmp_path / "m", mlp, autocast=torch.bfloat16)
    both = scoring.Predictor(tmp_path / "m", mlp, autocast=torch.bfloat16, compile=True)
    rough = coarse(batch)
    for name, values in expected.items():
        if name == "prediction":
            continue
        np.testing.assert_allclose(compiled(batch)[name], values, rtol=1e-4, atol=1e-5)
        few = {"x": batch["x"][:3]}
        np.testing.assert_allclose(compiled(few)[name], values[:3], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(rough[name], values, rtol=0.1, atol=0.05)
        np.testing.assert_allclose(both(batch)[name], rough[name], rtol=0.05, atol=0.02)
    assert not np.array_equal(rough["score"], expected["score"])  # it did run in another dtype
    with pytest.raises(ValueError, match="one input has shape"):
        compiled({"x": np.zeros((6, 5), np.float32)})


def test_images_of_differing_sizes(tmp_path: Path) -> None:
    rgpr.RGPR(mlp()).fit([torch.randn(100, 4)]).save(tmp_path / "m")
    images = np.empty(2, dtype=object)
    images[:] = [np.zeros((3, 3)), np.zeros((3, 4))]
    with pytest.raises(ValueError, match="brings them to one by size="):
        scoring.Predictor(tmp_path / "m", mlp)({"x": images})


def test_a_predictor_by_hand(tmp_path: Path) -> None:
    model = rgpr.RGPR(mlp(4, 2), likelihood="regression").fit([torch.randn(100, 4)])
    model.save(tmp_path / "m")
    predict = scoring.Predictor(tmp_path / "m", lambda: mlp(4, 2), keep=[], scale=0.5)
    x = np.random.default_rng(0).normal(size=(6, 4))
    found = predict({"x": x, "other": np.zeros(6)})
    with torch.no_grad():
        mean, variance = model(torch.from_numpy(x).float() * 0.5, diagonal_output=True)
    np.testing.assert_allclose(found["mean"], mean.numpy(), rtol=1e-5)
    np.testing.assert_allclose(found["variance"], variance.numpy(), rtol=1e-5)
    with torch.no_grad():
        score = model.score(torch.from_numpy(x).float() * 0.5)
    np.testing.assert_allclose(found["score"], score.numpy(), rtol=1e-5)
    assert set(found) == {"mean", "variance", "score"}
    with pytest.raises(KeyError, match="name the inputs with column="):
        predict({"images": x})
    with pytest.raises(FileNotFoundError, match="save a model there first"):
        scoring.score(None, tmp_path / "nothing", mlp)


@pytest.mark.parametrize("labelled", [False, True])
def test_a_calibrated_predictor_by_hand(tmp_path: Path, labelled: bool) -> None:
    """Regression and bytes as inputs; p-values need no labels."""
    x = torch.randn(100, 4)
    model = rgpr.RGPR(mlp(4, 2), likelihood="regression").fit([x])
    held_out = torch.randn(60, 4)
    batch = (held_out, torch.randn(60, 2)) if labelled else held_out
    model.calibrate([batch], progress=False)
    model.save(tmp_path / "m")
    predict = scoring.Predictor(tmp_path / "m", lambda: mlp(4, 2), scale=1 / 255)
    rows = np.random.default_rng(0).integers(0, 256, size=(6, 4), dtype=np.uint8)
    found = predict({"x": rows, "id": np.arange(6)})
    inputs = torch.from_numpy(rows).float() / 255
    with torch.no_grad():
        mean, variance = model(inputs, diagonal_output=True)
        expected = {"score": model.score(inputs), "p_value": model.p_value(inputs)}
    np.testing.assert_allclose(found["mean"], mean.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["variance"], variance.numpy(), rtol=1e-5)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values.numpy(), rtol=1e-5)
    assert set(found) == {"id", "mean", "variance", "score", "p_value"}


def test_a_network_in_double_precision_gets_all_digits(tmp_path: Path) -> None:
    """Rounded to float32, inputs around a million would lose all that tells them apart."""
    x = 1e6 + torch.randn(100, 4).double() / 100
    network = mlp().double()
    model = rgpr.RGPR(network).fit([x])
    model.save(tmp_path / "m")
    predict = scoring.Predictor(tmp_path / "m", lambda: mlp().double())
    found = predict({"x": x.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(found["score"], model.score(x).numpy(), rtol=1e-6)
