"""The score beside every detector that reads logits or features, in the form of OpenOOD.

Not in the paper. On the networks of the other experiments, this library's score and confidence over
last-layer Laplace are measured beside the detectors of :mod:`rgpr_paper.rivals`, each with fixed
settings: those of its paper or its authors' code, those with which OpenOOD starts, or the defaults
of the library that computes it. :attr:`rgpr_paper.rivals.Rival.source` says which, and the page
has it in its table of settings. OpenOOD itself goes on to choose settings on outliers; this
experiment chooses nothing on any. Near and far outliers are those of :mod:`rgpr_paper.near_far`.

FPR95 is given in both meanings: the share of outliers that pass where 95 % of the data do, as in
the paper, and the share of data that is refused where 95 % of the outliers are, as in OpenOOD. So
is the area under precision against recall, with the data and with the outliers as what is to be
found.

The network runs once on every image, and the detectors are fitted and measured on what that pass
left. Cost is what a detector adds to the network's own pass, from the fastest of several laps of
each. A detector that fails is kept with the text of its error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from rgpr._network.guards import evaluating
from rgpr._progress import bar
from rgpr.baselines._pytorch_ood import pytorch_ood
from rgpr.metrics import auprc, auroc, fpr95, fpr95_openood

from ..comparison import PAPER_NAMES
from ..context import Context
from ..data import Loader
from ..detector_page import page
from ..experiment import Experiment, register
from ..networks import kept
from ..outputs import Outputs, write_some
from ..rivals import RIVALS, Bench, Rival
from ..section import Section
from ..subject import Subject
from ..units import Result, read_units, run_seeds

__all__ = ["METRICS", "render", "run"]

NAME = "openood"
# Each takes the scores of data and of outliers, higher for inputs more like the data.
METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "auroc": auroc,
    "fpr95": fpr95,
    "fpr95 openood": fpr95_openood,
    "aupr in": auprc,
    "aupr out": lambda inside, outside: auprc(-outside, -inside),
}
_MICRO = 1e6
_LAPS = 5


def run(context: Context) -> None:
    """A unit for each set and seed."""
    sets = context.image_sets(*PAPER_NAMES)
    codes = {rival.name: rival.code for rival in RIVALS.values()}
    run_seeds(context, NAME, sets, _unit, detectors=codes)


def _unit(context: Context, name: str, seed: int) -> Result:
    pytorch_ood("ViM")  # where the library is missing, the run stops here and not after training
    subject = Subject.of(context, name, seed)
    competing, network = subject.competing, subject.model.posterior.network
    clock = Clock(context.device)
    clock.warm(network, competing.test)
    train = subject.outputs(competing.train)
    training_pass = clock.lap()
    bench, found = subject.bench(train), subject.found
    network_pass = partial(_run_network, network, competing.test)
    measuring = _Measuring(
        bench,
        subject.images,
        found,
        subject.where,
        training_pass,
        network_pass,
        clock,
    )
    measured = {
        rival.name: measuring.tried(rival) for rival in bar(RIVALS.values(), "detectors", True)
    }
    _keep(context, name, seed, bench, found)
    return {
        **subject.about(),
        "seconds": competing.seconds | {"training images, one pass": training_pass},
        "laps": _LAPS,
        "network": _MICRO * clock.fastest(network_pass)[0] / len(competing.test.x),
        "detectors": measured,
    }


class Clock:
    """Seconds between laps, counted when the device has done its work.

    Args:
        device: Where the work is done.
        seconds: Tells the time.
    """

    def __init__(self, device: str, seconds: Callable[[], float] = time.perf_counter) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._seconds = seconds
        self._started = self._now()

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return self._seconds()

    def lap(self) -> float:
        """Seconds since the last lap, or since the clock was made."""
        before, self._started = self._started, self._now()
        return self._started - before

    def fastest(self, *passes: Callable[[], object], laps: int = _LAPS) -> list[float]:
        """Seconds of the fastest lap of each pass.

        The passes take turns, so that a slow phase of the machine is in no pass alone.
        """
        seconds: list[list[float]] = [[] for _ in passes]
        for _ in range(laps):
            for run, each in zip(passes, seconds, strict=True):
                self.lap()
                run()
                each.append(self.lap())
        return [min(each) for each in seconds]

    @torch.no_grad()
    def warm(self, network: nn.Module, loader: Loader) -> None:
        """Run the network once, because the first run on a GPU is slow, and start a lap."""
        with evaluating(network) as modes, modes:
            network(next(iter(Loader(loader.x))))
        self.lap()


@torch.no_grad()
def _run_network(network: nn.Module, test: Loader) -> None:
    """Run the bare network on every test image, in batches of 1000."""
    with evaluating(network) as modes, modes:
        for x in Loader(test.x):
            network(x)


@dataclass(frozen=True)
class _Measuring:
    """Fits detectors, one after the other, and measures them on the same outputs.

    Attributes:
        bench: What detectors are fitted on.
        images: Test images and outliers by name.
        found: The network's outputs on them.
        where: Names of the near and of the far outliers.
        training_pass: Seconds of the pass over the training images.
        network_pass: Runs the bare network on the test images.
        clock: Takes the time.
    """

    bench: Bench
    images: dict[str, Loader]
    found: dict[str, Outputs]
    where: dict[str, list[str]]
    training_pass: float
    network_pass: Callable[[], object]
    clock: Clock

    def tried(self, rival: Rival) -> dict[str, Any]:
        """The detector's measures, or the text of the error that it failed with."""
        about = {"paper": rival.paper, "code": rival.code, "reads": rival.reads}
        try:
            return about | {"ours": rival.ours} | self._measured(rival)
        except Exception as error:  # whatever other libraries raise must not lose the unit
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            tqdm.write(f"{rival.name} failed, and no claim holds without it: {text}", sys.stderr)
            return about | {"ours": rival.ours, "error": text}

    def _measured(self, rival: Rival) -> dict[str, Any]:
        self.clock.lap()
        fitted = rival.fit(self.bench)
        seconds = self.clock.lap()
        if fitted.seconds is not None:
            seconds = fitted.seconds
        elif rival.trains:
            seconds += self.training_pass
        # The first calls on a device are slow, so this pass is not timed.
        inside = self._scores(rival, fitted.score, "test")
        passes: list[Callable[[], object]] = [partial(self._scores, rival, fitted.score, "test")]
        # A detector that reads images runs the network as well, so the network's pass is taken off.
        passes += [self.network_pass] if rival.reads == "images" else []
        scoring, *network = self.clock.fastest(*passes)
        each = (scoring - sum(network)) / len(inside)
        values: dict[str, Any] = {}
        for where, kinds in self.where.items():
            outside = {kind: self._scores(rival, fitted.score, kind) for kind in kinds}
            values[where] = {
                metric: {kind: value(-inside, -scores) for kind, scores in outside.items()}
                for metric, value in METRICS.items()
            }
        values["all"] = {
            metric: {
                "mean": mean(v for where in self.where for v in values[where][metric].values())
            }
            for metric in METRICS
        }
        for where in self.where:
            for found in values[where].values():
                found["mean"] = mean(found.values())
        return {
            "setting": fitted.setting,
            "fit": seconds,
            "microseconds": _MICRO * each,
            **values,
        }

    def _batches(self, rival: Rival, kind: str) -> Iterable[Tensor]:
        """What the detector reads of a set, 1000 rows at a time."""
        if rival.reads == "images":
            return Loader(self.images[kind].x)
        found = self.found[kind]
        read = found.logits if rival.reads == "logits" else found.features
        return torch.split(read, 1000)

    def _scores(self, rival: Rival, score: Callable[[Tensor], Tensor], kind: str) -> Tensor:
        """Scores of a set, ``(N,)`` in float64, higher for stranger inputs."""
        # Detectors that need gradients turn them on again.
        with torch.no_grad():
            return torch.cat([score(each).double() for each in self._batches(rival, kind)])


def _keep(context: Context, name: str, seed: int, bench: Bench, found: dict[str, Outputs]) -> None:
    """Keep some outputs for studies that need no network, in two files beside the checkpoints."""
    some = {kind: (each, 5000 if kind == "test" else 2000) for kind, each in found.items()}
    some["validation"] = (bench.validation, 2000)
    write_some(kept(context, f"{NAME}-{name}", seed, "npz"), some, seed)
    trained = {"train": (bench.train, 10_000)}
    write_some(kept(context, f"{NAME}-{name}-train", seed, "npz"), trained, seed)


def render(folder: Path) -> Section:
    """A table for each set, a picture of all detectors, and their settings."""
    return page(read_units(folder), folder)


register(
    Experiment(
        name=NAME,
        title="The score beside every detector, in OpenOOD's form",
        paper="ours",
        place=155,
        run=run,
        render=render,
    )
)
