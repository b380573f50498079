"""Scaling: files scored by one and by two Ray actors, beside a loop without Ray. ms for one image.

Every worker has one thread. The time of an image is that between the first file of answers and
the last, so the start of the workers is not in it. Whole runs stand beside what the simulation of
`benchmarks.cluster` says from the figures of one actor, and the seconds that the actors took to
start: actors that start together on one machine wait for each other.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from rgpr import RGPR
from rgpr_paper.training import resnet18

from .cluster import Cluster, simulate
from .networks import made

ROOT = Path(__file__).parents[1]
FILES, ROWS, ROUNDS = 16, 128, 3
SIDE = 32
BATCH = 32


def channels_first(x: torch.Tensor) -> torch.Tensor:
    return x.permute(0, 3, 1, 2)


OPTIONS: dict[str, Any] = {
    "network": resnet18,
    "preprocess": channels_first,
    "scale": 1 / 255,
    "batch_size": BATCH,
}


def run(device: str, rounds: int = ROUNDS) -> Iterator[tuple[str, Any]]:
    """Parquet files and folders of images, made on the fly."""
    import ray

    assert device == "cpu"
    places = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(
        num_cpus=3,  # one beside the actors, for what Ray itself does
        _system_config={"worker_niceness": 0},  # the loop would come first otherwise
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        runtime_env={"env_vars": {"PYTHONPATH": places, "OMP_NUM_THREADS": "1"}},
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    threads = torch.get_num_threads()
    try:
        with TemporaryDirectory() as folder:
            place = Path(folder)
            network, shape = made("ResNet-18", "cpu")
            RGPR(network).fit([torch.rand(256, *shape)], progress=False).save(place / "model")
            torch.set_num_threads(1)
            for kind, write in (("parquet", _parquet), ("images", _images)):
                write(place / kind)
                yield (
                    f"ResNet-18, {FILES} files of {ROWS} images, {kind}",
                    _case(place, kind, rounds),
                )
    finally:
        torch.set_num_threads(threads)
        ray.shutdown()


def _case(place: Path, kind: str, count: int) -> dict[str, Any]:
    runs: dict[str, Callable[[Path], Any]] = {
        "loop": lambda out: _loop(place, kind, out),
        "Ray, 1 actor": lambda out: _ray(place, kind, out, 1),
        "Ray, 2 actors": lambda out: _ray(place, kind, out, 2),
    }
    runs["loop"](place / f"{kind}-warm")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for number in range(count):
        for worked, (name, score) in enumerate(runs.items()):
            out = place / f"{kind}-{number}-{worked}"
            began = time.time()
            score(out)
            found[name].append(_measured(out, began, max(1, worked)))
    results = {}
    for name, rounds in found.items():
        times = [each["seconds"] for each in rounds]
        loop = [each["seconds"] for each in found["loop"]]
        middle = statistics.median(times)
        low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else [middle] * 3
        results[name] = {
            **{key: statistics.median(each[key] for each in rounds) for key in rounds[0]},
            "spread": (high - low) / middle,
            "ratio": statistics.median(t / u for t, u in zip(times, loop, strict=True)),
        }
    one, two = found["Ray, 1 actor"], found["Ray, 2 actors"]
    results["Ray, 2 actors"]["throughput over one"] = statistics.median(
        a["seconds"] / b["seconds"] for a, b in zip(one, two, strict=True)
    )
    for workers, name in ((1, "Ray, 1 actor"), (2, "Ray, 2 actors")):
        start = results[name]["start"]
        results[name]["simulated"] = _simulated(results["Ray, 1 actor"], workers, start)
    return results


def _measured(out: Path, began: float, workers: int) -> dict[str, float]:
    """What the times at which files were finished say about a run.

    Returns:
        ``seconds`` for an image and the images a second, from the first file of each worker on;
        ``start``, until the first file begins; ``file spread``, the standard deviation of the time
        between files over its mean; and ``total``, all seconds of the run.
    """
    ends = sorted(path.stat().st_mtime for path in out.rglob("*.parquet"))
    assert len(ends) == FILES
    file = (ends[-1] - ends[workers - 1]) / (FILES - workers)  # of all workers together
    between = [b - a for a, b in pairwise(ends)]
    return {
        "seconds": file / ROWS,
        "images a second": ROWS / file,
        "start": max(0.0, ends[0] - began - workers * file),
        "file spread": statistics.stdev(between) / statistics.mean(between),
        "total": ends[-1] - began,
    }


def _simulated(one: dict[str, float], workers: int, start: float) -> float:
    """Seconds of a run from the figures of one actor: the median of several simulations."""
    cluster = Cluster(
        images=FILES * ROWS,
        files=FILES,
        size=SIDE * SIDE * 3,
        rate=one["images a second"],
        workers=workers,
        nodes=1,
        network=1e9,  # a local disk, whose time is in the rate of one actor already
        storage=1e9,
        start=start,
        spread=one["file spread"],
    )
    return statistics.median(3600 * simulate(cluster, seed) for seed in range(101))


def _loop(place: Path, kind: str, out: Path) -> None:
    """What an actor does, one file after the other, in this process."""
    from rgpr.integrations.ray.files import FileScorer
    from rgpr.integrations.ray.planning import input_files, parts_of

    parts = parts_of(input_files([place / kind]), out, ROWS)
    options = OPTIONS | {"column": _column(kind), "keep": None, "size": None, "device": "cpu"}
    scorer = FileScorer(path=place / "model", **options)
    for name, files in parts.items():
        part = {"files": np.array([json.dumps(files)]), "out": np.array([str(name)])}
        [failed] = scorer(part)["failed"]
        assert not failed, failed


def _ray(place: Path, kind: str, out: Path, actors: int) -> None:
    from rgpr.integrations.ray import score_files

    score_files(
        place / kind,
        out,
        place / "model",
        column=_column(kind),
        images_per_file=ROWS,
        actors=actors,
        **OPTIONS,
    )


def _column(kind: str) -> str:
    return "image" if kind == "parquet" else "x"


def _pixels() -> np.ndarray[Any, Any]:
    shape = (FILES * ROWS, SIDE, SIDE, 3)
    return np.random.default_rng(0).integers(0, 256, size=shape, dtype=np.uint8)


def _parquet(folder: Path) -> None:
    import ray

    rows = [{"id": number, "image": image} for number, image in enumerate(_pixels())]
    ray.data.from_items(rows, override_num_blocks=FILES).write_parquet(str(folder))


def _images(folder: Path) -> None:
    from PIL import Image

    folder.mkdir()
    for number, image in enumerate(_pixels()):
        Image.fromarray(image).save(folder / f"{number:06d}.png")
