"""Thousands of calls in one process: nothing is left behind.

After a warm-up a long run is cut in two, and the second half may leave no tensor, hardly any Python
object, and no more memory than the allocator's own unrest. Where memory grew all the same, the same
is run once more, since only a leak grows every time. A service that predicts for months does what
the second half does.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import rgpr

from .cases import Case, Untouched, random_case, told

Amount = Callable[[int, int], int]
Tally = Callable[..., None]

# Python's own caches come and go by a few objects; a leak of one an iteration would be thousands.
OBJECTS = 20
# Memory that the allocator may hold back without anything being alive in it.
MEBIBYTES = 6


@pytest.fixture(autouse=True)
def _frozen() -> Iterator[None]:
    """What was there before is not looked at again: imports alone are a million objects."""
    gc.freeze()
    yield
    gc.unfreeze()


class Alive(NamedTuple):
    """What is there: objects that Python tracks, tensors among them, and memory in MiB."""

    objects: int
    tensors: int
    resident: float


def alive() -> Alive:
    gc.collect()
    gc.collect()
    objects = gc.get_objects()
    tensors = sum(issubclass(type(each), Tensor) for each in objects)
    return Alive(len(objects), tensors, resident())


def resident() -> float:
    """The memory of this process in MiB, zero where the system does not tell.

    Pages of files, such as torch's own libraries, are not counted: the system takes them away
    where memory is short, which would hide a leak. What it moved to the disk is counted, because
    this process still has it.
    """
    with contextlib.suppress(OSError, AttributeError):  # what was freed before goes back at once,
        ctypes.CDLL(None).malloc_trim(0)  # or a leak could fill it without being seen
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    counted = ("RssAnon:", "VmSwap:")
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith(counted))


def flat(step: Callable[[int], Any], rounds: int) -> None:
    """Run a step so often three times: to warm up, and twice to be compared.

    Where there is more memory at the end, it is run once more and has to stay as it is then.
    """
    for number in range(2 * rounds):
        step(number % rounds)
    before = alive()
    after = nothing_left(step, rounds, before)
    if after.resident > before.resident + MEBIBYTES:
        before = after
        after = nothing_left(step, rounds, before)
    assert after.resident <= before.resident + MEBIBYTES, f"{before} became {after}"


def nothing_left(step: Callable[[int], Any], rounds: int, before: Alive) -> Alive:
    """What is there after so many steps, which may leave no tensor and hardly any object."""
    for number in range(rounds):
        step(number)
    after = alive()
    assert after.tensors <= before.tensors, f"{after.tensors - before.tensors} tensors are left"
    assert after.objects <= before.objects + OBJECTS, f"{before} became {after}"
    return after


def soak_case(seed: int) -> Case:
    kind = ("mlp", "convolutional", "attending", "recurrent", "reused")[seed % 5]
    base = ("map", "ensemble", "temperature")[seed % 3]
    return random_case(
        seed, kind=kind, base=base, dtype=torch.float32, data="ordinary", outputs=3,
        likelihood=("classification", "classification", "regression", "multilabel")[seed % 4],
    )  # fmt: skip


def every_call(case: Case, model: rgpr.RGPR) -> list[Callable[[], Any]]:
    """All that is asked of a fitted and calibrated model, one after the other."""
    x = case.inputs(8, seed=4)
    far = 1e6 * x
    broken = x.clone()
    broken[0] = torch.nan

    def gradients() -> None:
        moved = x.clone().requires_grad_()
        torch.autograd.grad(model.score(moved).sum(), moved)

    def refused() -> None:
        with pytest.raises(ValueError, match="shape"):
            model(x[..., :0])

    def in_a_thread() -> None:
        thread = threading.Thread(target=lambda: model.score(x))
        thread.start()
        thread.join()

    return [
        lambda: model(x),
        lambda: model(far),
        lambda: model(broken),
        lambda: model(x, link_approx="mc", n_samples=6),
        lambda: model.score(x),
        lambda: model.variance(far),
        lambda: model.p_value(x),
        lambda: model.predict(x, alpha=0.2, progress=False),
        lambda: model.explain(x),
        gradients,
        refused,
        # Coverage keeps a tracer for every thread that ever ran, which would look like a leak.
        refused if threading.gettrace() else in_a_thread,
    ]


def test_predictions_leave_nothing_behind(amount: Amount, tally: Tally) -> None:
    for seed in range(amount(2, 10)):
        case = soak_case(seed)
        with told(case):
            model = case.model()
            model.calibrate(case.inputs(40, seed=3), progress=False)
            untouched, calls = Untouched(case.network), every_call(case, model)
            rounds = amount(240, 2400)
            flat(lambda number, calls=calls: calls[number % len(calls)](), rounds)
            untouched.check()
        tally("predictions and scores in one process with flat memory", 3 * rounds)


def fitting(case: Case) -> Callable[[int], None]:
    """Fits and calibrates a model that stays, and one that goes with the end of the step."""
    x, y, held_out, labels = (
        case.inputs(60), case.targets(60), case.inputs(40, seed=3), case.targets(40)
    )  # fmt: skip
    kept = rgpr.RGPR(case.network, likelihood=case.likelihood)
    broken = x.clone()
    broken[50] = torch.inf

    def step(number: int) -> None:
        new = rgpr.RGPR(case.network, likelihood=case.likelihood, residual=case.residual)
        for model in (kept, new):
            model.fit([(x[:30], y[:30]), (x[30:], y[30:])], progress=False)
            model.calibrate(held_out, labels, progress=False)
        if number % 5 == 0:
            with pytest.raises(ValueError, match="not finite"):
                new.fit([broken], progress=False)

    return step


def test_fits_and_calibrations_leave_nothing_behind(amount: Amount, tally: Tally) -> None:
    for seed in range(amount(2, 10)):
        case = soak_case(seed)
        with told(case):
            untouched, rounds = Untouched(case.network), amount(8, 150)
            flat(fitting(case), rounds)
            untouched.check()
        tally("fits and calibrations in one process with flat memory", 6 * rounds)


@pytest.mark.parametrize("what", ["tensors", "objects", "memory"])
def test_a_leak_would_be_seen(what: str) -> None:
    kept: list[Any] = []
    one: dict[str, Callable[[], Any]] = {
        "tensors": lambda: torch.zeros(1),
        "objects": lambda: [nn.ReLU],
        "memory": lambda: b"x" * 2**20,  # zeros would take no memory before they are written
    }
    if what == "memory" and sys.platform != "linux":
        pytest.skip("this system does not tell")
    with pytest.raises(AssertionError, match=r"tensors are left|became"):
        flat(lambda _: kept.append(one[what]()), 50)
