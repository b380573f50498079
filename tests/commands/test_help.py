"""What the command says about itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rgpr.cli import main
from rgpr.commands import COMMANDS


def helped(capsys: pytest.CaptureFixture[str], *names: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([*names, "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


def every() -> Iterator[tuple[str, ...]]:
    yield ()
    for name in COMMANDS:
        yield (name,)
    for name in ("list", "run", "report"):
        yield "paper", name


@pytest.mark.parametrize("names", list(every()), ids=" ".join)
def test_every_help_ends_with_an_example(
    names: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = helped(capsys, *names)
    _, _, example = text.partition("\nexample:\n")
    lines = example.splitlines()
    assert lines
    for line in lines:
        assert line.startswith(f"  rgpr {' '.join(names)}".rstrip())
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize(
    "name", ["fit", "calibrate", "predict", "score", "export", "audit", "monitor"]
)
def test_the_help_says_what_code_is_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = helped(capsys, name)
    assert "Code is run only where you name it" in text
    assert "with the current folder first on the path" in text


@pytest.mark.parametrize("name", ["fit", "calibrate", "predict", "score", "export", "info"])
def test_the_shared_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = helped(capsys, name)
    for option in ("--json", "--no-progress", "--traceback"):
        assert option in text


def test_the_exit_codes_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    text = helped(capsys)
    for line in ("0    done", "1    cannot be done", "2    wrong usage", "130  interrupted"):
        assert line in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["fit", "--model", "a:b"],
        ["predict", "m", "d", "--out", "p.csv", "--batch-size", "0"],
        ["predict", "m", "d", "--out", "p.csv", "--size", "axb"],
        ["predict", "m", "d", "--out", "p.csv", "--std", "0"],
        ["predict", "m", "d", "--out", "p.csv", "--mean", "a"],
        ["fit", "--model", "a:b", "--train", "t", "--out", "m", "--layers", "a,,b"],
        ["nothing"],
    ],
)
def test_wrong_usage_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="needs the extra cli")
    assert main(["--print-completion", shell]) == 0
    script = capsys.readouterr().out
    assert "calibrate" in script
    assert "max-nll-increase" in script


def test_completion_in_bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="needs the extra cli")
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    assert main(["--print-completion", "bash"]) == 0
    script = tmp_path / "rgpr.sh"
    script.write_text(capsys.readouterr().out)
    lines = 'COMP_WORDS=(rgpr cal); COMP_CWORD=1; _shtab_rgpr; echo "${COMPREPLY[@]}"'
    done = subprocess.run(
        [bash, "-c", f"source {script}; {lines}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["calibrate"]


def test_without_the_extra_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 1
    assert "pip install '.[cli]'" in capsys.readouterr().err
