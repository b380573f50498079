"""Interrupts at any point of a call, and processes that fork: the network is left as it was."""

from __future__ import annotations

import dis
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import rgpr
from networks import mlp
from rgpr._network import guards
from rgpr._network.guards import evaluating
from rgpr._network.running import capture

NOTHING = dis.opmap["NOP"]


class Interrupt(KeyboardInterrupt):
    """What the test raises, and nobody else."""


class At:
    """Raises at the ``number``-th step of Python in files whose names have one of ``parts``."""

    def __init__(self, number: int, parts: tuple[str, ...]) -> None:
        self.left, self._parts = number, parts

    def __enter__(self) -> At:
        self._before = sys.gettrace()  # that of coverage, say
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        if not any(part in frame.f_code.co_filename for part in self._parts):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, _: Any) -> Any:
        # Python takes no interrupt at a step that does nothing, and where a block ends with a loop
        # such a step lies outside of what the block's guard covers.
        if event == "opcode" and frame.f_code.co_code[frame.f_lasti] != NOTHING:
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise Interrupt
        return self._step


def interrupted_everywhere(
    run: Callable[[], Any], parts: tuple[str, ...], check: Callable[[], None], step: int = 1
) -> int:
    """Interrupt a call at every step of Python in some files, one after the other."""
    run()
    number = 1
    while True:
        try:
            with At(number, parts) as at:
                run()
        except Interrupt:
            pass
        check()
        if at.left > 0:
            return number
        number += step


def hooks_of(network: nn.Module) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
    return sum(len(getattr(module, kind)) for module in network.modules() for kind in kinds)


def trained() -> nn.Module:
    """With a part that the user froze, and a hook of the user's own."""
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    network.train()
    network[1].eval()
    network[2].register_forward_hook(lambda *_: None)
    return network


def untouched(network: nn.Module) -> Callable[[], None]:
    before = [module.training for module in network.modules()], hooks_of(network)

    def check() -> None:
        assert ([module.training for module in network.modules()], hooks_of(network)) == before
        assert not guards._users
        assert guards._holder is None
        assert not guards._changing
        free = []
        thread = threading.Thread(target=lambda: free.append(guards._lock.acquire(timeout=5)))
        thread.start()
        thread.join()
        assert free == [True]
        guards._lock = threading.RLock()  # the thread that had it is gone

    return check


def guards_everywhere() -> None:
    network, x = trained(), torch.randn(5, 4)
    layers = rgpr.RGPR(network).fit([x], progress=False)._layers

    def run() -> None:
        reading = capture(network, layers, [torch.clone] * len(layers), x)
        with evaluating(network) as modes, modes, reading, reading:
            network(x)

    parts = ("_network/guards.py", "_network/running.py", "test_interrupts.py")
    assert interrupted_everywhere(run, parts, untouched(network)) > 300


def predictions_everywhere() -> None:
    """Every seventh step of the library's and of torch's own code for modules and hooks."""
    network, x = trained(), torch.randn(5, 4)
    model = rgpr.RGPR(network).fit([x], progress=False)
    expected = model(x)

    def run() -> None:
        model(x)

    parts = (os.path.join("src", "rgpr", ""), "nn/modules/module.py", "utils/hooks.py")
    assert interrupted_everywhere(run, parts, untouched(network), step=7) > 1000
    assert torch.equal(model(x), expected)


def fits_everywhere() -> None:
    network, x = trained(), torch.randn(40, 4)

    def run() -> None:
        rgpr.RGPR(network).fit([x], progress=False)

    parts = ("_network/guards.py", "_network/running.py", "rgpr/extension/")
    assert interrupted_everywhere(run, parts, untouched(network), step=13) > 1000


EVERYWHERE = {
    each.__name__: each for each in (guards_everywhere, predictions_everywhere, fits_everywhere)
}


@pytest.mark.parametrize("name", EVERYWHERE)
def test_the_network_is_left_as_it_was_from_every_step(name: str) -> None:
    """In a process of its own: torch's modes, of gradients say, do not survive such interrupts."""
    done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_guard_that_is_entered_once_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="entered twice"), evaluating(mlp()):
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_while_another_thread_predicts() -> None:
    """The child has the network's own modes, none of the other thread's hooks, and a free lock."""
    network, x = trained(), torch.randn(5, 4)
    model = rgpr.RGPR(network).fit([x], progress=False)
    check = untouched(network)
    inside, leave = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        if threading.current_thread() is thread:
            inside.set()
            leave.wait(60)

    handle = network[0].register_forward_pre_hook(wait)
    thread = threading.Thread(target=lambda: model(x))
    thread.start()
    assert inside.wait(60)
    guards._lock.acquire()  # as if this very moment were one of the other thread's
    child = os.fork()
    if child == 0:
        try:
            handle.remove()
            check()
            os._exit(0)
        except BaseException:
            os._exit(1)
    guards._lock.release()
    leave.set()
    thread.join()
    handle.remove()
    assert os.waitpid(child, 0)[1] == 0
    check()


class Telling(nn.Linear):
    """Tells, the first time that its mode is asked for, and waits for what is done about it."""

    asked: Callable[[], None] | None = None

    @property
    def training(self) -> bool:
        tell, Telling.asked = Telling.asked, None
        if tell is not None:
            tell()
        return self.__dict__["mode"]

    @training.setter
    def training(self, mode: bool) -> None:
        self.__dict__["mode"] = mode


def test_a_thread_that_finds_evaluation_mode_keeps_it() -> None:
    """Another thread switches the modes just as this one looks at them, and leaves first."""
    network = Telling(4, 3).train()
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with evaluating(network) as modes, modes:
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)

    def between() -> None:
        thread.start()
        entered.wait(1)  # in vain where this thread keeps the other out while it looks

    Telling.asked = between
    with evaluating(network) as modes, modes:
        leave.set()
        thread.join()
        assert not network.training
    assert network.training


class TellingLate(OrderedDict[int, bool]):
    """Lets another thread run before it notes that a hook takes keywords."""

    other: Callable[[], None] | None = None

    def __setitem__(self, key: int, value: bool) -> None:
        other, self.other = self.other, None
        if other is not None:
            other()
        super().__setitem__(key, value)


def test_a_thread_that_runs_a_layer_whose_input_is_about_to_be_read() -> None:
    """Torch has registered the hook then, and calls it without the keywords that it asked for."""
    network, x = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 3)), torch.randn(40, 4)
    model = rgpr.RGPR(network, layers=["2:input"]).fit([x], progress=False)
    expected, found = network(x), []

    def run() -> None:
        thread = threading.Thread(target=lambda: found.append(network(x)))
        thread.start()
        thread.join()

    late = TellingLate()
    late.other = run
    network[2]._forward_pre_hooks_with_kwargs = late
    model(x)
    assert torch.equal(found[0], expected)


def test_a_step_within_a_step_leaves_the_lock_with_the_outer_one() -> None:
    """As where a signal handler predicts."""
    taken = []

    def outer() -> None:
        guards._locked(lambda: None)
        thread = threading.Thread(target=lambda: taken.append(guards._lock.acquire(timeout=0.1)))
        thread.start()
        thread.join()

    guards._locked(outer)
    assert taken == [False]


if __name__ == "__main__":
    EVERYWHERE[sys.argv[1]]()
