"""The benchmark command, and that the docs say what it measured."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import latency, profile  # noqa: E402
from benchmarks.__main__ import machine  # noqa: E402
from benchmarks.table import markdown  # noqa: E402
from benchmarks.timing import race, slope  # noqa: E402

import rgpr  # noqa: E402
from networks import mlp  # noqa: E402
from rgpr._backend import recording  # noqa: E402

RESULTS = ROOT / "results" / "benchmarks"
PICTURES = {"cpu": "speed-cpu.png", "cuda": "speed-h200.png"}


def table(heading: str) -> dict[str, list[str]]:
    """Rows of the first table under a heading of docs/speed.md, by their first cell.

    What is "the same" goes by the row before it, too.
    """
    text = (ROOT / "docs" / "speed.md").read_text().split(f"## {heading}\n")[1]
    lines = text[text.index("|") :].split("\n\n")[0].splitlines()
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]
    found: dict[str, list[str]] = {}
    last = ""
    for label, *cells in rows[2:]:
        name = label.replace("**", "").replace("`", "")
        found[f"{last}, {name}" if name.startswith("the same") else name] = cells
        last = name
    return found


def results(device: str) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    found: dict[str, dict[str, dict[str, dict[str, float]]]] = json.loads(
        (RESULTS / f"{device}.json").read_text()
    )
    return found


def shows(cell: str, value: float) -> bool:
    """Whether a cell is this number, rounded to as many digits as it has."""
    digits = re.match(r"[\d.]+", cell)
    assert digits is not None, cell
    places = len(digits[0].partition(".")[2])
    return abs(float(digits[0]) - value) <= 0.5001 * 10**-places


def test_the_readme_says_what_was_measured() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    (ours, written), *_ = (r.values() for r in results("cpu")["tuning"].values())
    said = re.search(r"([\d.]+) times faster .*? ([\d.]+) s against ([\d.]+) s", text)
    assert said is not None
    assert shows(said[1], written["ratio"])
    assert shows(said[2], written["seconds"])
    assert shows(said[3], ours["seconds"])
    gpu = results("cuda")
    cases = [f"ResNet-18, {dtype}" for dtype in ("float32", "bfloat16")]
    fits = [gpu["fitting"][f"{case}, 98 batches of 512"]["onset"] for case in cases]
    calls = [gpu["prediction"][f"{case}, batch 512, eager"]["LLL + RGPR"] for case in cases]
    for pattern, rows in (("% more than a bare pass", fits), ("% more on an H200", calls)):
        said = re.search(rf"(\d+) to (\d+) {pattern}", text)
        assert said is not None
        for number, row in zip(said.groups(), rows, strict=True):
            assert shows(number, 100 * (row["ratio"] - 1))
    cores = results("cpu")["prediction"]
    for pattern, case in (
        (r"images (\d+) % more on two cores", "ResNet-18, float32, batch 32, eager"),
        (r"LeNet (\d+) % more on two cores", "LeNet, float32, batch 256, eager"),
    ):
        said = re.search(pattern, text)
        assert said is not None
        assert shows(said[1], 100 * (cores[case]["LLL + RGPR"]["ratio"] - 1))
    waiting = json.loads((RESULTS / "cuda-latency.json").read_text())["latency"]
    said = re.search(r"MLP on an H200 at batch 512 (\d+) to (\d+) times, compiled ([\d.]+)", text)
    assert said is not None
    modes = (
        "float32, batch 512, eager",
        "bfloat16, batch 512, eager",
        "float32, batch 512, compiled",
    )
    for number, mode in zip(said.groups(), modes, strict=True):
        row = gpu["prediction"][f"MLP 784-256-256, {mode}"]["LLL + RGPR"]
        assert shows(number, row["ratio"])
    said = re.search(r"([\d.]+) times until the answer is ready, compiled ([\d.]+) times", text)
    assert said is not None
    for number, mode in zip(said.groups(), ("eager", "compiled"), strict=True):
        row = waiting[f"MLP 784-256-256, batch 512, {mode}"]["LLL + RGPR"]
        assert shows(number, row["ready ratio"])
    said = re.search(
        r"(\d+) 000 times faster than laplace-torch's own .*?, (\d+) times on an", text
    )
    assert said is not None
    heads = [
        found["head, 100 classes, 512 features, batch 32"] for found in (cores, gpu["prediction"])
    ]
    for number, head, unit in zip(said.groups(), heads, (1000, 1), strict=True):
        (times,) = [row["ratio"] for name, row in head.items() if "laplace-torch" in name]
        assert shows(number, times / unit)
    guide = (ROOT / "docs" / "tuning.md").read_text()
    assert f"| {written['seconds']:.1f} |" in guide
    assert f"| {ours['seconds']:.2f} |" in guide


def test_small_batches_are_measured_with_recorded_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (False, True):
        monkeypatch.setattr(recording, "_enabled", before)
        with latency.recorded():
            assert recording._enabled
        assert recording._enabled == before


def test_race_measures_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    now = [0.0]  # a clock that nothing disturbs
    monkeypatch.setattr("benchmarks.timing.time.perf_counter", lambda: now[0])

    def takes(first: float, others: float, name: str) -> Callable[[], None]:
        def run() -> None:
            now[0] += others if name in order else first
            order.append(name)

        return run

    # One that waits for a compiler at first is measured like the others, one that is slow is not.
    runs = {"a": takes(1.2, 0.012, "a"), "b": takes(0.02, 0.02, "b"), "c": takes(0.1, 1.1, "c")}
    found = race(runs, rounds=2, long=["c"])
    assert order.count("c") == 1 + 2
    assert order.count("b") == 2 + 3 + 2 * (1 + 2)
    assert order.count("a") == 2 + 3 + 2 * (1 + 3)
    assert order[-1] == "c"
    assert found["b"]["ratio"] == pytest.approx(0.02 / 0.012)
    assert set(found["b"]) == {"seconds", "spread", "ratio"}


def test_the_profile_tells_the_network_from_what_reads_it() -> None:
    """Also while the residual looks up tensors of its own, as modules do by a function of torch."""
    x = torch.randn(60, 4)
    model = rgpr.RGPR(mlp()).fit([x], progress=False)
    parts: dict[str, set[str]] = {}

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            parts.setdefault(frame.f_code.co_qualname, set()).add(profile.part_of(frame))

    with torch.no_grad():
        model(x)
        sys.setprofile(look)
        try:
            model(x)
        finally:
            sys.setprofile(None)
    assert parts["Linear.forward"] == {"the network"}
    assert "distances of the layers" in parts["Module.__getattr__"]
    assert parts["cubes_beyond"] == {"distances of the layers"}


def test_exponents_of_growth() -> None:
    assert slope([1, 2, 4], [3.0, 12.0, 48.0]) == pytest.approx(2)


@pytest.mark.slow
def test_the_command_keeps_other_sections(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks"]
    path = tmp_path / "cpu.json"
    case = {"one": {"seconds": 1.0, "spread": 0.0, "ratio": 1.0}}
    before = {"gram": {"kept": case}, "startup": {"stale": case}}
    path.write_text(json.dumps({"machine": machine("cpu"), **before}))
    subprocess.run(
        [*command, "startup", "--device", "cpu", "--out", str(tmp_path)], cwd=ROOT, check=True
    )
    after = json.loads(path.read_text())
    assert after["gram"] == before["gram"]
    assert list(after["startup"]) == ["import"]
    assert after["startup"]["import"]["torch"]["ratio"] == 1
    assert path.with_suffix(".md").read_text() == markdown(after)
    unknown = subprocess.run([*command, "nonsense"], cwd=ROOT, capture_output=True, text=True)
    assert unknown.returncode == 2
    assert "no benchmark nonsense" in unknown.stderr


@pytest.mark.parametrize("device", PICTURES)
def test_docs_show_the_committed_results(device: str) -> None:
    table_file, picture = RESULTS / f"{device}.md", RESULTS / f"{device}.png"
    assert table_file.read_text() == markdown(results(device))
    assert (ROOT / "docs" / "images" / PICTURES[device]).read_bytes() == picture.read_bytes()


def test_docs_say_what_an_h200_measured() -> None:
    found, rows = results("cuda"), table("An H200")
    for column, dtype in enumerate(("float32", "bfloat16")):
        eager = found["prediction"][f"ResNet-18, {dtype}, batch 512, eager"]
        compiled = found["prediction"][f"ResNet-18, {dtype}, batch 512, compiled"]
        fit = found["fitting"][f"ResNet-18, {dtype}, 98 batches of 512"]
        network, ours, bare = eager["network"], eager["LLL + RGPR"], fit["bare pass"]
        said = {
            "the network alone": network["seconds"] * 1e3,
            "last-layer Laplace, ours": eager["LLL"]["ratio"],
            "last-layer Laplace + RGPR": ours["ratio"],
            "last-layer Laplace + RGPR, the same": eager["LLL + RGPR, paper"]["ratio"],
            "memory at most, over the network's": ours["memory"] / network["memory"],
            "reading every representation once at the speed of a copy": 1
            + network["floor"] / network["seconds"],
            "fit": fit["onset"]["ratio"],
            "fit over 98 batches of 512, over a bare pass, the same": fit["paper"]["ratio"],
            "its memory at most, over the network's": fit["onset"]["memory"] / bare["memory"],
            "compiled": compiled["LLL + RGPR"]["ratio"],
        }
        if dtype == "float32":
            said["last-layer Laplace, laplace-torch"] = eager["LLL, laplace-torch"]["ratio"]
        for label, value in said.items():
            matching = [r for name, r in rows.items() if name.startswith(label)]
            assert shows(matching[0][column], value), (label, matching, value)


def test_docs_say_what_two_cores_measured() -> None:
    found, rows = results("cpu")["prediction"], table("Two cores of a CPU")
    for column, case in enumerate(("ResNet-18, float32, batch 32", "LeNet, float32, batch 256")):
        eager, compiled = found[f"{case}, eager"], found[f"{case}, compiled"]
        said = {
            "the network alone": eager["network"]["seconds"] * 1e3,
            "last-layer Laplace, ours": eager["LLL"]["ratio"],
            "last-layer Laplace, laplace-torch": eager["LLL, laplace-torch"]["ratio"],
            "RGPR over the network": eager["RGPR"]["ratio"],
            "last-layer Laplace + RGPR": eager["LLL + RGPR"]["ratio"],
            'last-layer Laplace + RGPR, the same with residual="paper"': eager["LLL + RGPR, paper"][
                "ratio"
            ],
            "compiled, over the compiled network": compiled["LLL + RGPR"]["ratio"],
        }
        for label, value in said.items():
            assert shows(rows[label][column], value), (label, rows[label], value)


def test_docs_say_what_small_batches_measured() -> None:
    """To fill the tables anew: ``python -m benchmarks.small_batches``."""
    from benchmarks.pages import devices, shown
    from benchmarks.small_batches import BENCHMARK, PAGE, section

    assert "cuda" in devices(BENCHMARK)
    for device in devices(BENCHMARK):
        assert shown(PAGE, f"small batches {device}") == section(device)


def test_docs_say_where_time_goes() -> None:
    """To fill the table anew: ``python -m benchmarks.whereabouts``."""
    from benchmarks.pages import devices, shown
    from benchmarks.whereabouts import BENCHMARK, PAGE, section

    assert "cpu" in devices(BENCHMARK)
    for device in devices(BENCHMARK):
        assert shown(PAGE, f"profile {device}") == section(device)


@pytest.mark.parametrize("device", PICTURES)
def test_the_page_on_growth_shows_the_committed_exponents(device: str) -> None:
    """To make it anew: ``python -m benchmarks.exponents``."""
    from benchmarks.exponents import PAGE, section
    from benchmarks.pages import shown

    assert shown(PAGE, f"growth {device}") == section(device)
