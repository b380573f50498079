"""A killed run that is started again gives the same file."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from rgpr._files.outputs.parts import Parts, fingerprint
from rgpr.audit.monitor.files import run_of
from rgpr.cli import main

CODE = "import sys; from rgpr.cli import main; sys.exit(main(sys.argv[1:]))"
# Kills itself when the state takes its place, just before that or just behind it.
KILLED_AT_ITS_END = """
import os, signal, sys
from rgpr.cli import main

when, *arguments = sys.argv[1:]
replaced = False

def kill(event, about):
    global replaced
    to_state = event == "os.rename" and str(about[1]).endswith("s.safetensors")
    now, replaced = replaced or (to_state and when == "before"), to_state
    if now:
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
main(arguments)
"""
NO_MATPLOTLIB = f"import sys; sys.modules['matplotlib'] = None; {CODE}"
MODEL = ["--model", "command_nets:digits"]
SLOW = ["--preprocess", "command_nets:flat", "--batch-size", "16", "--chunk", "32"]


def predict(data: str, out: str, *more: str) -> list[str]:
    return ["predict", "m.safetensors", data, *MODEL, "--out", out, *SLOW, *more]


@contextmanager
def waiting(arguments: list[str], batch: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs the command, and waits before this batch until :func:`go_on`."""
    if not Path("gate").exists():
        os.mkfifo("gate")
    environment = {**os.environ, "RGPR_TEST_WAIT": str(batch)}
    process = subprocess.Popen([sys.executable, "-c", CODE, *arguments], env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def go_on() -> None:
    """Let the process that waits go on."""
    Path("gate").open("w").close()


def wait_until(process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> None:
    """Wait for what a process writes before it waits itself.

    A file that takes another's place just while it is read has two halves of two files.
    """
    while True:
        with suppress(ValueError):
            if ready():
                return
        assert process.poll() is None, "it ended too early"
        time.sleep(0.02)


def chunks_in(parts: Path) -> int:
    state = parts / "parts.json"
    found: int = json.loads(state.read_text())["done"] if state.is_file() else 0
    return found


def killed(arguments: list[str], parts: Path, chunks: int = 2) -> int:
    """Start a process and kill it once so many chunks are finished; returns how many were."""
    with waiting(arguments, batch=2 * chunks + 2) as process:  # in the middle of the next chunk
        wait_until(process, lambda: chunks_in(parts) >= chunks)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    return chunks_in(parts)


def monitor(data: str, state: str, *more: str) -> list[str]:
    settings = ["--preprocess", "command_nets:flat", "--batch-size", "16", "--save-every", "0"]
    return ["monitor", "m.safetensors", data, *MODEL, "--state", state, *settings, *more]


def stream(here: Path) -> None:
    """Rows like the held-out ones, in a file of their own and in one where noise follows them."""
    with np.load(here / "new.npz") as new:
        x = new["X"][np.random.default_rng(0).permutation(len(new["X"]))]
    np.savez(here / "before.npz", x=x[:150])
    noise = np.random.default_rng(1).random((90, 64)).astype(np.float32)
    np.savez(here / "stream.npz", x=np.concatenate([x[150:], noise]))


def rows_in(part: Path) -> int:
    run = run_of(part) if part.is_file() else None
    return 0 if run is None else int(run["rows"])


def test_a_killed_monitor_gives_the_same(
    fitted: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream(here)
    for state in ("whole.safetensors", "s.safetensors"):
        assert main(monitor("before.npz", state)) == 0
    begun = (here / "s.safetensors").read_bytes()
    assert begun == (here / "whole.safetensors").read_bytes()
    capsys.readouterr()
    assert main(monitor("stream.npz", "whole.safetensors", "--json")) == 3
    whole = json.loads(capsys.readouterr().out)
    part = here / "s.safetensors.part"
    arguments = monitor("stream.npz", "s.safetensors")
    for batches, rows in ((3, 48), (14, 272)):  # before the alarm, and behind it
        with waiting(arguments, batch=batches + 1) as process:
            wait_until(process, lambda rows=rows: rows_in(part) >= rows)
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        assert (here / "s.safetensors").read_bytes() == begun
    done = rows_in(part)
    assert done == 272
    assert main([*arguments, "--json"]) == 3
    again = json.loads(capsys.readouterr().out)
    assert again == {**whole, "state": "s.safetensors", "taken_up": done}
    assert (here / "s.safetensors").read_bytes() == (here / "whole.safetensors").read_bytes()
    assert not part.exists()


def test_an_interrupted_monitor_goes_on(
    fitted: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read is kept at once, however seldom it is kept otherwise."""
    stream(here)
    seldom = ("--save-every", "1000", "--preprocess", "command_nets:stopping")
    part = here / "s.safetensors.part"
    with monkeypatch.context() as patch:
        patch.setenv("RGPR_TEST_STOP", "4")
        patch.setenv("RGPR_TEST_INTERRUPT", "yes")
        assert main(monitor("stream.npz", "s.safetensors", *seldom)) == 130
    assert rows_in(part) == 48
    capsys.readouterr()
    assert main(monitor("stream.npz", "s.safetensors", *seldom)) == 3
    assert "went on behind 48 rows of an earlier run\nread 337 inputs" in capsys.readouterr().out
    assert main(monitor("stream.npz", "whole.safetensors", *seldom)) == 3
    assert (here / "s.safetensors").read_bytes() == (here / "whole.safetensors").read_bytes()
    assert not part.exists()


def test_a_monitor_does_not_mix_runs(
    fitted: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream(here)
    assert main(monitor("stream.npz", "whole.safetensors", "--batch-size", "32")) == 3
    stopping = ("--preprocess", "command_nets:stopping")
    with monkeypatch.context() as patch:
        patch.setenv("RGPR_TEST_STOP", "2")
        assert main(monitor("stream.npz", "s.safetensors", *stopping)) == 1
    part = here / "s.safetensors.part"
    assert rows_in(part) == 16
    capsys.readouterr()
    assert main(monitor("stream.npz", "s.safetensors", *stopping, "--batch-size", "32")) == 1
    said = capsys.readouterr().err
    assert "s.safetensors.part holds the beginning of another run: " in said
    assert "batch_size was 16 and is 32. Run it as before" in said
    assert main(monitor("before.npz", "s.safetensors", *stopping)) == 1
    assert "data was " in capsys.readouterr().err
    assert rows_in(part) == 16
    assert main(monitor("stream.npz", "s.safetensors", "--batch-size", "32", "--restart")) == 3
    assert "went on" not in capsys.readouterr().out
    assert (here / "s.safetensors").read_bytes() == (here / "whole.safetensors").read_bytes()
    assert not part.exists()
    with pytest.raises(SystemExit) as stopped:
        main(monitor("stream.npz", "s.safetensors", "--save-every", "often"))
    assert stopped.value.code == 2
    assert "expected a number of seconds" in capsys.readouterr().err


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_monitor_killed_at_its_end_counts_once(
    when: str, fitted: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream(here)
    assert main(monitor("before.npz", "whole.safetensors")) == 0
    assert main(monitor("before.npz", "s.safetensors")) == 0
    capsys.readouterr()
    assert main(monitor("stream.npz", "whole.safetensors", "--log", "whole.jsonl", "--json")) == 3
    whole = json.loads(capsys.readouterr().out)
    arguments = monitor("stream.npz", "s.safetensors", "--log", "log.jsonl", "--json")
    ended = subprocess.run([sys.executable, "-c", KILLED_AT_ITS_END, when, *arguments])
    assert ended.returncode == -signal.SIGKILL
    for _ in range(2):  # the second time, nothing went wrong before
        assert main(arguments) == 3
        again = json.loads(capsys.readouterr().out)
        assert again == {**whole, "state": "s.safetensors", "taken_up": 337}
    assert (here / "s.safetensors").read_bytes() == (here / "whole.safetensors").read_bytes()
    assert (here / "log.jsonl").read_bytes() == (here / "whole.jsonl").read_bytes()
    assert not (here / "s.safetensors.part").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_monitor_whose_log_cannot_be_written_counts_once(
    fitted: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream(here)
    assert main(monitor("stream.npz", "s.safetensors", "--log", "/dev/full")) == 1
    assert "No space left" in capsys.readouterr().err
    more = ("--log", "log.jsonl", "--prometheus", "m.prom", "--plot", "p.svg", "--json")
    assert main(monitor("stream.npz", "s.safetensors", *more)) == 3
    told = json.loads(capsys.readouterr().out)
    assert (told["count"], told["new"], told["taken_up"]) == (337, True, 337)
    assert json.loads((here / "log.jsonl").read_text())["count"] == 337
    assert "rgpr_monitor_inputs_total 337" in (here / "m.prom").read_text()
    assert "<svg" in (here / "p.svg").read_text()
    assert main(monitor("stream.npz", "s.safetensors")) == 3
    assert "finished this run before, so nothing was read; 337 inputs" in capsys.readouterr().out
    # The data of another day are read, also if they are the same under another name.
    shutil.copy("stream.npz", "tuesday.npz")
    assert main(monitor("tuesday.npz", "s.safetensors", *more)) == 3
    told = json.loads(capsys.readouterr().out)
    assert (told["count"], told["new"], told["taken_up"]) == (674, False, 0)


@pytest.mark.parametrize(
    ("option", "path", "words"),
    [
        ("--plot", "p.foo", "p.foo ends in '.foo', and matplotlib"),
        ("--plot", "p", "p ends in '', and matplotlib"),
        ("--plot", "folder.png", "folder.png is a folder; name a file"),
        ("--log", "folder.png", "folder.png is a folder; name a file"),
        ("--prometheus", "folder.png", "folder.png is a folder; name a file"),
        ("--state", "folder.png", "folder.png is a folder; name a file"),
        ("--log", "locked/log.jsonl", "may not write log.jsonl in locked"),
        ("--log", "locked.jsonl", "may not write to locked.jsonl"),
        ("--prometheus", "locked/m.prom", "may not write m.prom in locked"),
    ],
)
def test_a_monitor_refuses_what_it_cannot_write_before_it_reads(
    option: str,
    path: str,
    words: str,
    fitted: Path,
    here: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream(here)
    (here / "folder.png").mkdir()
    (here / "locked").mkdir(0o500)
    (here / "locked.jsonl").touch(0o400)
    if "locked" in path and os.access("locked", os.W_OK):
        pytest.skip("this user may write everywhere")
    monkeypatch.setenv("RGPR_TEST_STOP", "1")
    more = ("--preprocess", "command_nets:stopping", option, path)
    assert main(monitor("stream.npz", "s.safetensors", *more)) == 1
    assert words in capsys.readouterr().err
    assert not list(here.glob("s.safetensors*"))


def test_a_monitor_without_matplotlib_reads_nothing(fitted: Path, here: Path) -> None:
    stream(here)
    arguments = monitor("stream.npz", "s.safetensors", "--plot", "p.png")
    command = [sys.executable, "-c", NO_MATPLOTLIB, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "pip install '.[cli]'" in ended.stderr
    assert not list(here.glob("s.safetensors*"))


def test_two_monitors_of_one_state_lose_nothing(
    fitted: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fcntl", reason="needs a system with locks")
    stream(here)
    with waiting(monitor("stream.npz", "s.safetensors"), batch=2) as process:
        wait_until(process, lambda: rows_in(here / "s.safetensors.part") >= 16)
        refused = main(monitor("before.npz", "s.safetensors"))
        said = capsys.readouterr().err
        go_on()
        assert process.wait() == 3
    assert refused == 1
    assert "another process is writing to s.safetensors; wait for it, or name another" in said
    assert main(monitor("before.npz", "s.safetensors", "--json")) == 3
    assert json.loads(capsys.readouterr().out)["count"] == 487


@pytest.mark.parametrize(("data", "out"), [("new.csv", "p.parquet"), ("new", "p.npz")])
def test_killed_and_started_again(
    data: str, out: str, fitted: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(predict(data, f"whole-{out}")) == 0
    parts = here / f"{out}.parts"
    done = killed(predict(data, out), parts)
    assert done == 2  # of 13
    assert not (here / out).exists()
    capsys.readouterr()
    assert main(predict(data, out, "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["taken_up"] == 32 * done
    assert report["rows"] == 397
    assert (here / out).read_bytes() == (here / f"whole-{out}").read_bytes()
    assert not parts.exists()


@pytest.fixture
def begun(fitted: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The parts of a run that was interrupted after three chunks."""
    add = Parts.add

    def interrupted(parts: Parts, *what: object) -> None:
        add(parts, *what)  # type: ignore[arg-type]
        if parts.done == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Parts, "add", interrupted)
        assert main(predict("new.csv", "p.csv")) == 130
    return here / "p.csv.parts"


def test_interrupted_it_goes_on(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(predict("new.csv", "p.csv")) == 0
    assert "went on behind 96 rows" in capsys.readouterr().out
    assert main(predict("new.csv", "q.csv")) == 0
    assert Path("p.csv").read_bytes() == Path("q.csv").read_bytes()


def test_other_settings_do_not_go_on(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(predict("new.csv", "p.csv", "--alpha", "0.2")) == 1
    said = capsys.readouterr().err
    assert "alpha was None and is 0.2" in said
    assert "--restart" in said
    assert main(predict("new.parquet", "p.csv")) == 1
    assert "data was " in capsys.readouterr().err
    assert (begun / "00000002.npz").exists()
    assert main(predict("new.csv", "p.csv", "--alpha", "0.2", "--restart")) == 0
    assert "went on" not in capsys.readouterr().out


def test_another_file_under_the_same_name_does_not_go_on(
    begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Path("new.csv")
    text = data.read_text()
    data.unlink()
    data.write_text(text)
    assert main(predict("new.csv", "p.csv")) == 1
    assert "data was" in capsys.readouterr().err


def test_a_second_process_is_refused(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fcntl = pytest.importorskip("fcntl", reason="needs a system with locks")
    with (begun / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main(predict("new.csv", "p.csv")) == 1
        assert "another process is writing" in capsys.readouterr().err
    assert main(predict("new.csv", "p.csv")) == 0


def test_killed_while_the_parts_are_joined_or_removed(begun: Path) -> None:
    """What is left then is no beginning of anything, or all of it."""
    copy = begun.with_name("copy")
    shutil.copytree(begun, copy)
    assert main(predict("new.csv", "p.csv")) == 0
    whole = Path("p.csv").read_bytes()
    Path("p.csv").unlink()
    copy.rename(begun)
    (begun / "joined.csv").write_text("half a fi")
    (begun / ".0123.00000003.npz").write_bytes(b"half a chunk")
    assert main(predict("new.csv", "p.csv")) == 0
    assert Path("p.csv").read_bytes() == whole
    begun.mkdir()
    np.savez(begun / "00000007.npz", x=np.zeros(3))
    assert main(predict("new.csv", "p.csv")) == 0
    assert Path("p.csv").read_bytes() == whole
    assert not begun.exists()


def test_skipped_images_are_remembered(
    fitted: Path, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(here / "new", here / "some")
    for name in ("0/0000.png", "0/0020.png", "3/0130.png"):
        (here / "some" / name).write_bytes(b"no image")
    arguments = predict("some", "p.csv", "--json")
    capsys.readouterr()
    assert main(arguments) == 1
    said = capsys.readouterr().err
    assert "some/0/0000.png cannot be read" in said
    assert "--on-error skip" in said
    assert not (here / "p.csv.parts").exists()  # nothing was finished
    add = Parts.add

    def interrupted(parts: Parts, *what: object) -> None:
        add(parts, *what)  # type: ignore[arg-type]
        if parts.done == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Parts, "add", interrupted)
        assert main([*arguments, "--on-error", "skip"]) == 130
    capsys.readouterr()
    assert main([*arguments, "--on-error", "skip"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["rows"], report["taken_up"]) == (394, 64)
    assert [line.split(" ")[0] for line in report["skipped"]] == [
        "some/0/0000.png", "some/0/0020.png", "some/3/0130.png",
    ]  # fmt: skip
    rows = Path("p.csv").read_text().splitlines()
    assert len(rows) == 395
    assert "0000.png" not in rows[1]


def test_nothing_that_can_be_read(
    fitted: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "bad").mkdir()
    (here / "bad" / "a.png").write_bytes(b"no image")
    assert main(predict("bad", "p.csv", "--on-error", "skip")) == 1
    assert "nothing could be read" in capsys.readouterr().err
    np.savez("empty.npz", x=np.zeros((0, 64), np.float32))
    assert main(predict("empty.npz", "p.csv")) == 1
    assert "empty.npz (DATA) has no rows" in capsys.readouterr().err
    assert not list(here.glob("*.parts"))


def test_images_behind_links(fitted: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of a class may be a link, as may be an image, and one of these may be broken."""
    (here / "some").mkdir()
    shutil.copytree(here / "new" / "0", here / "elsewhere")
    (here / "some" / "0").symlink_to(here / "elsewhere")
    before = fingerprint(here / "some")
    (here / "elsewhere" / "notes.txt").touch()
    assert fingerprint(here / "some") == before
    os.utime(here / "elsewhere" / "0000.png", (1, 1))
    assert fingerprint(here / "some") != before
    (here / "elsewhere" / "0000.png").unlink()
    (here / "elsewhere" / "0000.png").symlink_to("nothing.png")
    assert main(predict("some", "p.csv", "--json")) == 1
    assert "some/0/0000.png cannot be read" in capsys.readouterr().err
    assert main(predict("some", "p.csv", "--json", "--on-error", "skip")) == 0
    assert "some/0/0000.png" in json.loads(capsys.readouterr().out)["skipped"][0]


def test_a_monitor_and_an_audit_say_what_they_left_out(
    fitted: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(here / "new", here / "some")
    (here / "some" / "3" / "0130.png").write_bytes(b"no image")
    assert main(monitor("some", "s.safetensors", "--on-error", "skip")) in (0, 3)
    assert "left out: some/3/0130.png cannot be read" in capsys.readouterr().out
    settings = [*MODEL, "--preprocess", "command_nets:flat", "--on-error", "skip"]
    audit = ["audit", "--fitted", "m.safetensors", *settings, "--out", "r.html"]
    assert main([*audit, "--test", "new", "--ood", "some=some"]) == 0
    assert capsys.readouterr().out.count("left out: some/3/0130.png cannot be read") == 1


def test_a_monitor_that_reads_nothing_fails(
    fitted: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "bad").mkdir()
    (here / "bad" / "a.png").write_bytes(b"no image")
    np.savez("empty.npz", x=np.zeros((0, 64), np.float32))
    for data, why in (("bad", " that can be read: bad/a.png cannot"), ("empty.npz", "")):
        assert main(monitor(data, "s.safetensors", "--on-error", "skip")) == 1
        assert f"{data} (DATA) has no rows{why}" in capsys.readouterr().err
        assert not list(here.glob("s.safetensors*part*"))
        assert not (here / "s.safetensors").exists()


@pytest.mark.skipif(os.name != "posix", reason="needs permissions as POSIX has them")
def test_a_state_keeps_its_link_and_its_permissions(fitted: Path, here: Path) -> None:
    stream(here)
    assert main(monitor("before.npz", "kept.safetensors")) == 0
    kept, link = here / "kept.safetensors", here / "s.safetensors"
    kept.chmod(0o660)
    before = kept.read_bytes()
    link.symlink_to(kept)
    with np.load(here / "stream.npz") as more:
        np.savez(here / "more.npz", x=more["x"][:50])
    assert main(monitor("more.npz", "s.safetensors")) == 0
    assert link.is_symlink()
    assert kept.read_bytes() != before
    assert kept.stat().st_mode & 0o777 == 0o660


@pytest.mark.skipif(os.name != "posix", reason="needs permissions as POSIX has them")
def test_answers_keep_links_and_permissions(fitted: Path, here: Path) -> None:
    (here / "elsewhere").mkdir()
    kept = here / "elsewhere" / "kept.text"
    kept.touch(mode=0o600)
    (here / "p.csv").symlink_to(kept)
    assert main(predict("new.csv", "p.csv")) == 0
    assert (here / "p.csv").is_symlink()
    assert len(kept.read_text().splitlines()) == 398
    assert kept.stat().st_mode & 0o777 == 0o600
    assert not list(here.glob("**/*.parts"))
