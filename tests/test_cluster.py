"""The plan for many workers: by hand, and against a simulation that shares none of its formulas."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.cluster import Cluster, least_nodes, plan, simulate

# Ten files of 100 images and 1000 bytes, which a worker computes in 10 seconds.
SMALL = Cluster(
    images=1000, files=10, size=10, rate=10, workers=1, nodes=1, network=1e9, storage=1e9
)


def seconds(cluster: Cluster) -> float:
    return simulate(cluster) * 3600


@pytest.mark.parametrize(
    ("changed", "limit", "expected"),
    [
        ({}, "compute", 10 * 10),
        ({"start": 7}, "compute", 7 + 10 * 10),
        ({"workers": 2}, "compute", 5 * 10),
        ({"nodes": 4}, "compute", 3 * 10),  # somebody has three of ten files
        # The first file is read before anything is computed, and the others meanwhile.
        ({"network": 200}, "compute", 5 + 10 * 10),
        ({"network": 50}, "node network", 10 * 20 + 10),
        ({"network": 50, "nodes": 2}, "node network", 5 * 20 + 10),
        ({"network": 50, "workers": 2}, "node network", 10 * 20 + 10),
        ({"storage": 25, "nodes": 2, "start": 3}, "storage", 3 + 10 * 40 + 10),
    ],
)
def test_by_hand(changed: dict[str, float], limit: str, expected: float) -> None:
    cluster = replace(SMALL, **changed)
    found = plan(cluster)
    assert found.limit == limit
    assert found.hours * 3600 == pytest.approx(expected, rel=1e-5)
    assert seconds(cluster) == pytest.approx(expected, rel=1e-5)


def test_cost_and_nodes() -> None:
    priced = replace(SMALL, price=2.0)
    assert plan(replace(priced, nodes=5)).cost == pytest.approx(5 * 2 * 20 / 3600, rel=1e-5)
    for deadline, nodes in ((101, 1), (99, 2), (31, 4), (21, 5), (11, 10)):
        assert least_nodes(priced, deadline / 3600).nodes == nodes
    with pytest.raises(ValueError, match=r"what limits them is compute"):
        least_nodes(priced, 9 / 3600)
    with pytest.raises(ValueError, match=r"what limits them is storage"):
        least_nodes(replace(priced, storage=50), 100 / 3600)


def test_a_file_is_run_until_no_failure_comes_between() -> None:
    """The mean over many files, against repeated draws as the formula's text says them."""
    cluster = replace(SMALL, files=4000, images=400_000, failures=36, start=4)  # one in 100 s
    expected = (math.exp(0.1) - 1) * (100 + 4)
    assert plan(cluster).hours * 3600 == pytest.approx(4 + 4000 * expected, rel=1e-4)
    assert seconds(cluster) == pytest.approx(4 + 4000 * expected, rel=0.02)


def test_idle_workers_take_what_a_failure_gives_back() -> None:
    """Two workers and one file: the other one runs it, long before the first has started again."""
    cluster = replace(SMALL, images=100, files=1, workers=2, failures=360, start=1000)
    runs = [simulate(cluster, seed) * 3600 for seed in range(20)]
    assert any(1010.1 < each < 1020 for each in runs)


numbers = st.floats


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """With forty files or more for each worker; each of the three limits comes up."""
    workers, nodes = draw(st.integers(1, 8)), draw(st.integers(1, 6))
    rate, per_file = draw(numbers(10, 1e5)), draw(st.integers(100, 10_000))
    files = draw(st.integers(40, 80)) * workers * nodes
    needed = 1000 * workers * rate  # bytes a second that keep a node busy
    return Cluster(
        images=per_file * files,
        files=files,
        size=1000,
        rate=rate,
        workers=workers,
        nodes=nodes,
        network=draw(numbers(0.2, 5)) * needed,
        storage=draw(numbers(0.2, 5)) * needed * nodes,
        start=draw(numbers(0, 3)) * per_file / rate,
        spread=draw(numbers(0, 0.3)),
        failures=3600 * draw(st.just(0.0) | numbers(1e-6, 0.02)) * rate / per_file,
    )


@settings(max_examples=60)
@given(clusters(), st.integers(0, 10**6))
def test_the_plan_is_what_the_simulation_takes(cluster: Cluster, seed: int) -> None:
    """Within 10 %, with forty files or more for each worker: docs/speed.md says so."""
    assert simulate(cluster, seed) == pytest.approx(plan(cluster).hours, rel=0.1)


def test_what_the_times_of_files_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers start in 7 s and finish a file of 100 images each every 10 s, together."""
    from benchmarks import scaling

    monkeypatch.setattr(scaling, "FILES", 6)
    monkeypatch.setattr(scaling, "ROWS", 100)
    for number in range(6):
        file = tmp_path / f"{number}.parquet"
        file.touch()
        ends = 1007 + 10 * (1 + number // 2)
        os.utime(file, (ends, ends))
    found = scaling._measured(tmp_path, 1000, workers=2)
    assert found["images a second"] == pytest.approx(20)
    assert found["seconds"] == pytest.approx(0.05)
    assert found["start"] == pytest.approx(7)
    assert found["total"] == pytest.approx(37)


def test_the_page_shows_the_stored_figures() -> None:
    """To make it anew: ``python -m benchmarks.billion``."""
    from benchmarks.billion import clusters, section
    from benchmarks.pages import shown

    assert shown("speed.md", "billion") == section()
    for cluster in clusters().values():
        if cluster.files >= 40 * cluster.workers * cluster.nodes:
            assert simulate(cluster) == pytest.approx(plan(cluster).hours, rel=0.1)
