"""Threads, forks and two models over one network: everybody gets the answer of a thread alone.

A network that the user left in training mode, with a hook of the user's own, is the hard case: its
modes are switched for every prediction, and hooks come and go. Answers are compared bit by bit with
those of a single thread, and afterwards modes, hooks and parameters have to be those from before.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rgpr
from rgpr._network import guards
from rgpr.posteriors import MCDropout, dropout

from .cases import Case, Untouched, random_case, told
from .limits import FOR_EVER, end_if_it_hangs, ended, joined, no_hang, untraced_fork

Amount = Callable[[int, int], int]
Tally = Callable[..., None]
Ask = Callable[[], tuple[Tensor, ...]]

# Seconds after which a forked child counts as hung: some thousand times as long as it takes, since
# a child may also wait for a processor. Less than FOR_EVER, so that it can say where it waited.
PATIENCE = 120

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
quiet = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def _often() -> Iterator[None]:
    """Threads take turns as often as Python can, and attention is always computed in one way.

    Torch's fast path of attention rounds in another way, and torch takes it or not by whether any
    module inside has a hook just then, of whichever thread. New threads are not traced, for
    coverage say: Python ends a thread that installs its trace while another one does.
    """
    before, fast = sys.getswitchinterval(), torch.backends.mha.get_fastpath_enabled()
    trace = threading.gettrace()
    threading.settrace(None)
    sys.setswitchinterval(1e-6)
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    sys.setswitchinterval(before)
    torch.backends.mha.set_fastpath_enabled(fast)
    threading.settrace(trace)


class Seen:
    """A hook of the user's own on a part of the network, which counts its calls.

    It has no lock, which a thread might hold while the process forks: adding to a list is one step.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modes: list[bool] = []
        self._handle = module.register_forward_hook(self)

    @property
    def calls(self) -> int:
        return len(self._modes)

    @property
    def modes(self) -> set[bool]:
        return set(self._modes)

    def __call__(self, module: nn.Module, *_: Any) -> None:
        self._modes.append(module.training)

    def __deepcopy__(self, _: Any) -> Seen:
        return self  # copies of a network, as an ensemble has them, call the same hook

    def remove(self) -> None:
        self._handle.remove()


def small_case(seed: int) -> Case:
    """With batches of ordinary size, of every kind of network and base."""
    case = random_case(seed, data="ordinary")
    return case if case.outputs <= 100 else random_case(seed, data="ordinary", outputs=3)


def questions(model: rgpr.RGPR, x: Tensor) -> list[Ask]:
    """Calls of several kinds with the answers that they are to give, each a tuple of tensors."""

    def plain() -> tuple[Tensor, ...]:
        found = model(x)
        return found if isinstance(found, tuple) else (found,)

    return [
        plain,
        lambda: (model.score(x),),
        lambda: (model.variance(x),),
        lambda: (model.p_value(x),),
        lambda: (torch.from_numpy(model.predict(x, alpha=0.2, progress=False).score),),
    ]


def equal(found: tuple[Tensor, ...], known: tuple[Tensor, ...]) -> bool:
    pairs = zip(found, known, strict=True)
    return all(
        torch.equal(a.detach().nan_to_num(7.0), b.detach().nan_to_num(7.0)) for a, b in pairs
    )


@contextmanager
def no_guard_left() -> Iterator[None]:
    """Nothing waits for ever, and nothing is held afterwards."""
    with no_hang(3 * FOR_EVER):  # later than threads and children give up, who say more
        yield
    assert not guards._users
    assert not guards._changing
    assert guards._holder is None


def ask_at_once(asks: list[Ask], threads: int, rounds: int) -> int:
    """Ask everything from many threads, each in another order; returns the number of answers."""
    known = [ask() for ask in asks]
    wrong: list[str] = []
    answered: list[int] = []
    start = threading.Event()

    def work(number: int) -> None:
        start.wait(FOR_EVER)
        try:
            for turn in range(rounds):
                place = (number + turn) % len(asks)
                with torch.set_grad_enabled(turn % 2 == 0):  # which is every thread's own
                    if not equal(asks[place](), known[place]):
                        wrong.append(f"thread {number}: question {place} has another answer")
                answered.append(place)
        except BaseException as error:
            wrong.append(f"thread {number}: {error!r}")

    workers = [
        threading.Thread(target=work, args=(number,), daemon=True) for number in range(threads)
    ]
    for worker in workers:
        worker.start()
    start.set()
    joined(workers)
    assert not wrong, wrong[:3]
    assert len(answered) == threads * rounds
    return len(answered)


def calibrated(case: Case, **options: Any) -> rgpr.RGPR:
    model = case.model(**options)
    model.calibrate(case.inputs(30, seed=3), progress=False)
    return model


@pytest.mark.parametrize("training", [True, False], ids=["training mode", "evaluation mode"])
def test_many_threads_and_one_model(amount: Amount, tally: Tally, training: bool) -> None:
    for seed in range(amount(3, 120)):
        case = small_case(seed)
        case.network.train(training)
        seen = Seen(case.network)
        untouched = Untouched(case.network)
        with told(case), no_guard_left():
            model = calibrated(case)
            asked = ask_at_once(questions(model, case.inputs(6, seed=4)), 6, 10)
        untouched.check()
        assert seen.modes == {False}
        assert seen.calls >= asked
        tally("answers asked for by six threads at once", asked)


@pytest.mark.parametrize("training", [True, False], ids=["training mode", "evaluation mode"])
def test_two_models_over_one_network(amount: Amount, tally: Tally, training: bool) -> None:
    """Another residual, other layers: each reads its own, whatever the other reads just then."""
    for seed in range(amount(3, 120)):
        case = small_case(seed)
        case.network.train(training)
        untouched = Untouched(case.network)
        with told(case), no_guard_left():
            models = [calibrated(case, residual="onset"), calibrated(case, residual="paper")]
            if case.base == "map":
                models.append(calibrated(case, layers=[]))
            x = case.inputs(6, seed=4)
            asked = ask_at_once([ask for model in models for ask in questions(model, x)], 6, 10)
        untouched.check()
        tally("answers of several models over one network", asked)


def test_fits_beside_predictions(amount: Amount, tally: Tally) -> None:
    """One thread predicts with a model while others fit and calibrate new ones on its network."""
    for seed in range(amount(2, 80)):
        case = small_case(seed)
        case.network.train()
        untouched = Untouched(case.network)
        with told(case), no_guard_left():
            model, x = calibrated(case), case.inputs(6, seed=4)

            def again(case: Case = case, x: Tensor = x) -> tuple[Tensor, ...]:
                new = rgpr.RGPR(case.network, likelihood=case.likelihood)
                new.fit([case.inputs(30)], progress=False)
                new.calibrate(case.inputs(20, seed=5), progress=False)
                return (new.score(x), new.sigma2)

            asked = ask_at_once([*questions(model, x)[:3], again], 4, 8)
        untouched.check()
        tally("predictions, fits and calibrations at once", asked)


def test_hooks_that_come_and_go(amount: Amount, tally: Tally) -> None:
    """Users may add and remove hooks of their own while other threads predict."""
    for seed in range(amount(2, 80)):
        case = small_case(seed)
        untouched = Untouched(case.network)
        modules = list(case.network.modules())
        done = threading.Event()

        rounds = [0]

        def change(
            modules: list[nn.Module] = modules,
            done: threading.Event = done,
            rounds: list[int] = rounds,
        ) -> None:
            # The short rest leaves a turn to the threads that predict: a thread that never rests
            # can keep them from Python's lock for minutes on a machine that is busy.
            while not done.wait(1e-4):
                hooks = [Seen(module) for module in modules]
                for hook in hooks:
                    hook.remove()
                rounds[0] += 1

        with told(case), no_guard_left():
            model = calibrated(case)
            user = threading.Thread(target=change, daemon=True)
            user.start()
            asked, enough = 0, 24
            try:
                # Which threads get a turn is the system's choice, so questions go on until hooks
                # came and went as often as one round has answers.
                while asked == 0 or rounds[0] < enough:
                    assert user.is_alive()
                    asked += ask_at_once(questions(model, case.inputs(6, seed=4)), 3, 8)
            finally:
                done.set()
                joined([user])
        untouched.check()
        tally("answers while the user's hooks come and go", asked)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes in the thread that asks: the threads of OpenMP do not survive a fork."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@forks
@quiet
@pytest.mark.usefixtures("one_thread")
def test_forks_while_threads_predict(amount: Amount, tally: Tally, tmp_path: Path) -> None:
    """A child has the answers of before, and a network that is as the user left it.

    Kernels of torch may hold locks of their own at a fork, and then the child waits for ever inside
    of one, as it would over the bare network. Such children are told by where they wait, and
    counted, and half of all must answer; one that waits for a lock of ours fails the test.
    """
    forked, hung = 0, 0
    for seed in range(amount(2, 60)):
        case = small_case(seed)
        case.network.train()
        seen = Seen(case.network)
        untouched = Untouched(case.network)
        with told(case), no_guard_left():
            model, x = calibrated(case), case.inputs(6, seed=4)
            asks = questions(model, x)
            if case.base == "dropout":
                continue  # torch's own source of randomness may be in use at the fork
            known = [ask() for ask in asks]
            done = threading.Event()

            def work(asks: list[Ask] = asks, done: threading.Event = done) -> None:
                while not done.is_set():
                    for ask in asks[:3]:
                        ask()

            workers = [threading.Thread(target=work, daemon=True) for _ in range(3)]
            for worker in workers:
                worker.start()
            try:
                traces = [tmp_path / f"{seed}-{number}" for number in range(4)]
                children = [fork(untouched, asks, known, trace) for trace in traces]
            finally:
                done.set()
                joined(workers)
            for child, trace in zip(children, traces, strict=True):
                failed = ended(child) != 0
                assert not failed or within_torch(trace), said(trace)
                hung += failed
            forked += len(children)
        untouched.check()
        seen.remove()
    assert hung <= forked // 2
    tally("processes forked while three threads predict", forked)
    tally("of these, children that torch's own kernels kept waiting", hung)


@forks
@quiet
@pytest.mark.usefixtures("one_thread")
def test_a_fork_while_another_thread_draws_dropout(amount: Amount, tally: Tally) -> None:
    """The lock that keeps threads from drawing at once is free in the child."""
    for seed in range(amount(1, 10)):
        case = random_case(seed, kind="mlp", data="ordinary", dtype=torch.float32)
        network = nn.Sequential(nn.Dropout(0.2), case.network)
        model = rgpr.RGPR(MCDropout(network, n_samples=3), likelihood=case.likelihood)
        x = case.inputs(20)
        with told(case):
            model.fit([x], progress=False)
        with dropout._global_source:  # as another thread would hold it
            child = untraced_fork()
            if child == 0:
                end_if_it_hangs()
                try:
                    model(x)
                    os._exit(0)
                except BaseException:
                    os._exit(1)
        assert ended(child) == 0
        tally("processes forked while a thread draws dropout")


def said(trace: Path) -> str:
    """Where a child waited, if it came so far as to say so."""
    return trace.read_text() if trace.exists() else "the child hung before its first step"


def within_torch(trace: Path) -> bool:
    """Whether a child that was ended waited in a kernel of torch, and not for a lock of Python."""
    frames = [line for line in said(trace).splitlines() if line.startswith("  File")]
    locks = ("_network/guards.py", "posteriors/dropout.py", "_backend/compiled.py", "threading.py")
    return bool(frames) and not any(file in frames[0] for file in locks)


def fork(
    untouched: Untouched, asks: list[Ask], known: list[tuple[Tensor, ...]], trace: Path
) -> int:
    """A child that looks at the network, and asks everything again.

    One that takes longer than :data:`PATIENCE` is ended, and writes where it was.
    """
    child = untraced_fork()
    if child:
        return child
    faulthandler.dump_traceback_later(PATIENCE, exit=True, file=trace.open("w"))
    try:
        untouched.check()
        same = [equal(ask(), answer) for ask, answer in zip(asks, known, strict=True)]
        untouched.check()
        os._exit(0 if all(same) else 2)
    except BaseException:
        os._exit(1)
