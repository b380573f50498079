"""Recorded calls: on a GPU as CUDA graphs, and everything that is the same on every device."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import list_mode_options
from torch.utils.flop_counter import FlopCounterMode

import rgpr
from devices import needs_gpu
from networks import LeNet, blobs, laplace_over_blobs, mlp
from rgpr._backend import compiled, recording
from rgpr._backend.recording import MOST, Recorder, Recordings, Sizes
from rgpr._network.guards import evaluating
from rgpr.answers import recorded
from test_interrupts import interrupted_everywhere


class Repeating(Recorder):
    """Records on a CPU: a replay makes the call again, on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded, self.replayed, self.fails = 0, 0, False

    def ready(self) -> bool:
        return True

    def follow(self) -> None:
        pass

    def leave(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def pool(self) -> Any:
        return None

    def record(self, call: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.recorded += 1
        answers = call()

        def replay() -> None:
            self.replayed += 1
            again = call()
            if isinstance(answers, Tensor):
                answers.copy_(again)
            else:
                for old, new in zip(answers, again, strict=True):
                    old.copy_(new)

        return replay, answers


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Repeating]:
    """Recordings on a CPU, as on a GPU."""
    found = Repeating()
    for module in (recording, compiled):
        monkeypatch.setattr(module, "recorder_of", lambda device: found)
    with torch.no_grad():
        yield found


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def test_a_size_is_recorded_when_it_comes_again(recorder: Repeating) -> None:
    recordings = Recordings([])
    for number in range(5):
        x = torch.randn(3, 4)
        assert torch.equal(recordings(doubled, x), 2 * x)
        assert recorder.recorded == (number > 0)
    assert recorder.replayed == 4


def test_answers_stay_as_they_are(recorder: Repeating) -> None:
    recordings = Recordings([])
    inputs = [torch.randn(3, 4) for _ in range(5)]
    answers = [recordings(doubled, x) for x in inputs]
    for x, answer in zip(inputs, answers, strict=True):
        assert torch.equal(answer, 2 * x)


def test_few_sizes_are_recorded(recorder: Repeating) -> None:
    recordings = Recordings([])
    for size in [*range(1, MOST + 5)] * 3:
        x = torch.randn(size, 4)
        assert torch.equal(recordings(doubled, x), 2 * x)
    assert recorder.recorded == MOST


def test_sizes_that_come_once_take_no_place(recorder: Repeating) -> None:
    """As in a service that joins the requests of some milliseconds to a batch."""
    recordings = Recordings([])
    for size in range(10, 10 + 3 * MOST):
        recordings(doubled, torch.randn(size, 4))
    for _ in range(3):
        recordings(doubled, torch.randn(5, 4))
    assert recorder.recorded == 1
    sizes = Sizes(first=1)
    for size in range(10_000):
        sizes.wanted(size, 0, 0)
    assert len(sizes._counts) <= 64
    assert sizes.wanted(9_999, 0, 0)
    assert not sizes.wanted(9_999, MOST, 0)
    assert not sizes.wanted(0, 0, 0)


def test_an_interrupt_leaves_the_turn_to_others() -> None:
    recorder, free = Repeating(), []

    def run() -> None:
        with recorder.turn() as mine, recorder.turn() as again:
            assert mine
            assert not again  # as in a handler of signals that predicts
        # A generator that was interrupted before its first step ends when it is collected.
        gc.collect()

    def check() -> None:
        def take() -> None:
            with recorder.turn() as mine:
                free.append(mine)

        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        assert free.pop()

    assert interrupted_everywhere(run, ("_backend/recording.py",), check) > 50


def test_a_handler_of_signals_that_predicts_gets_no_turn() -> None:
    """Not even if the signal comes while its thread takes the lock."""
    recorder, nested = Repeating(), []

    class Interrupted:
        def __init__(self) -> None:
            self.lock = threading.RLock()
            self.release = self.lock.release

        def acquire(self, blocking: bool) -> bool:
            found = self.lock.acquire(blocking=blocking)
            with recorder.turn() as mine:
                nested.append(mine)
            return found

    recorder._lock = Interrupted()  # type: ignore[assignment]
    with recorder.turn() as mine:
        assert mine
        assert nested == [False]
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(recorder._lock.lock.acquire, blocking=False).result()  # type: ignore[attr-defined]


def test_other_memory_and_other_modes_are_recorded_again(recorder: Repeating) -> None:
    weight, x = nn.Parameter(torch.ones(4)), torch.randn(3, 4)
    recordings = Recordings([weight])
    call = lambda x: x * weight  # noqa: E731
    recordings(call, x), recordings(call, x)
    weight.mul_(3)
    assert torch.equal(recordings(call, x), 3 * x)
    assert recorder.recorded == 1
    weight.data = torch.full((4,), 5.0)
    assert torch.equal(recordings(call, x), 5 * x)
    assert recorder.recorded == 2
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high" if before == "highest" else "highest")
        assert torch.equal(recordings(call, x), 5 * x)
    finally:
        torch.set_float32_matmul_precision(before)
    assert recorder.recorded == 3


def test_what_cannot_be_recorded_warns_once(recorder: Repeating) -> None:
    recordings, x, recorder.fails = Recordings([]), torch.randn(3, 4), True
    recordings(doubled, x)
    with pytest.warns(UserWarning, match="could not be recorded"):
        assert torch.equal(recordings(doubled, x), 2 * x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (3, 3, 5, 5):
            x = torch.randn(size, 4)
            assert torch.equal(recordings(doubled, x), 2 * x)


def test_a_thread_without_its_turn_does_not_wait(recorder: Repeating) -> None:
    recordings, x = Recordings([]), torch.randn(3, 4)
    recordings(doubled, x), recordings(doubled, x)
    with recorder.turn() as mine:
        assert mine
        assert torch.equal(recordings(doubled, x), 2 * x)
    assert recorder.replayed == 1


@pytest.mark.parametrize(
    "inside",
    [
        torch.enable_grad,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: FlopCounterMode(display=False),
    ],
)
def test_not_everything_is_recorded(recorder: Repeating, inside: Callable[[], Any]) -> None:
    recordings, x = Recordings([]), torch.randn(3, 4)
    with inside():
        for _ in range(3):
            assert torch.equal(recordings(doubled, x), 2 * x)
        torch.vmap(lambda row: recordings(doubled, row))(x)
    assert recorder.recorded == 0


def test_options_without_cuda_graphs() -> None:
    def without(options: dict[str, Any], in_order: bool = False) -> dict[str, Any] | None:
        return compiled.without_cuda_graphs(compiled.spelled_out(options, in_order=in_order))

    assert without({}) is None
    assert without({"mode": "default"}) is None
    assert without({"mode": "reduce-overhead", "backend": "aot_eager"}) is None
    found = without({"mode": "reduce-overhead", "fullgraph": True})
    assert found == {"options": {"triton.cudagraphs": False}, "fullgraph": True}
    apart = list_mode_options("max-autotune-no-cudagraphs")
    assert without({"mode": "max-autotune"}) == {"options": {**apart, "triton.cudagraphs": False}}
    assert without({"backend": "aot_eager", "options": {"triton.cudagraphs": True}}) is None
    given: dict[str, Any] = {"options": {"triton.cudagraphs": True, "max_autotune": False}}
    assert without(given) == {"options": {"triton.cudagraphs": False, "max_autotune": False}}
    assert given["options"]["triton.cudagraphs"]
    found = without(given, in_order=True)
    assert found is not None
    assert found["options"]["reorder_for_locality"] is False
    theirs = {"options": {"reorder_for_locality": True}}
    assert compiled.spelled_out(theirs, in_order=True) == theirs
    both = compiled.spelled_out({"mode": "default", "options": {}}, in_order=True)
    with pytest.raises(RuntimeError, match="Either mode or options"):
        torch.compile(nn.Linear(2, 2), **both)


@pytest.mark.filterwarnings("ignore")
def test_compiled_calls_are_recorded(recorder: Repeating) -> None:
    x = torch.cat([blobs()[0], 1e9 * blobs()[0][:5], torch.full((1, 4), torch.nan)])
    model = rgpr.RGPR(mlp()).fit([blobs()[0]])
    expected = model(x)
    model.compile(mode="reduce-overhead")
    for rows in (len(x), 7, 1) * 3:
        torch.testing.assert_close(
            model(x[:rows]), expected[:rows], rtol=1e-5, atol=1e-6, equal_nan=True
        )
    assert recorder.recorded == 3
    scores = copy.deepcopy(model).score(x)
    for rows in (len(x), 7, 1) * 3:
        found = model.score(x[:rows])
        torch.testing.assert_close(found, scores[:rows], rtol=1e-5, atol=1e-6, equal_nan=True)
    assert recorder.recorded == 6
    for change in (
        lambda: setattr(model, "temperature", 0.5),
        lambda: setattr(model, "sigma2", 3 * model.sigma2),
        lambda: model.posterior.network[0].weight.mul_(2),
        lambda: setattr(model.posterior.network[0].weight, "data", torch.randn(16, 4)),
    ):
        change()
        for _ in range(3):
            torch.testing.assert_close(
                model(x[:9]), model.forward(x[:9]), rtol=1e-5, atol=1e-6, equal_nan=True
            )
    torch.testing.assert_close(
        copy.deepcopy(model)(x[:9]), model.forward(x[:9]), rtol=1e-5, atol=1e-6
    )


# -- plain calls in eager mode ---------------------------------------------------------------------

BASES: dict[str, Callable[[], rgpr.RGPR]] = {
    "network": lambda: rgpr.RGPR(mlp()).fit([blobs()]),
    "Laplace": lambda: rgpr.RGPR(laplace_over_blobs("classification", "kron")[0]).fit([blobs()]),
    "diagonal": lambda: rgpr.RGPR(laplace_over_blobs("classification", "diag")[0]).fit([blobs()]),
    "paper": lambda: rgpr.RGPR(mlp(), residual="paper").fit([blobs()]),
    "regression": lambda: rgpr.RGPR(mlp(), likelihood="regression").fit([blobs()[0]]),
    "regression over Laplace": lambda: rgpr.RGPR(laplace_over_blobs("regression", "kron")[0]).fit(
        [blobs()[0]]
    ),
    "one output": lambda: rgpr.RGPR(mlp(4, 1), likelihood="classification").fit([blobs()[0]]),
}


def built(base: str) -> rgpr.RGPR:
    with torch.enable_grad():  # fitting Laplace takes gradients
        return BASES[base]()


@pytest.fixture
def eager(recorder: Repeating, monkeypatch: pytest.MonkeyPatch) -> Repeating:
    monkeypatch.setattr(recorded, "recorder_of", lambda device: recorder)
    return recorder


def inputs() -> Tensor:
    x = blobs()[0][:12].clone()
    x[1] *= 30
    x[2], x[3, 0], x[4, 1], x[5] = 1e30, torch.nan, torch.inf, -torch.inf
    return x


def plainly(model: rgpr.RGPR, x: Tensor) -> Any:
    """The answer of a copy, which has no recordings yet."""
    return copy.deepcopy(model)(x)


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recorded_answers_are_those_of_plain_calls(
    eager: Repeating, base: str, dtype: torch.dtype
) -> None:
    model, x = built(base).to(dtype), inputs().to(dtype)
    expected = plainly(model, x)
    for _ in range(5):
        assert_same(model(x), expected)
    assert eager.recorded == 1
    assert_same(model(3 * x), plainly(model, 3 * x))
    assert_same(model(x[:5]), plainly(model, x[:5]))


def test_sizes_that_come_once_take_no_place_of_plain_calls(eager: Repeating) -> None:
    model = built("network")
    for size in range(10, 10 + 3 * MOST):
        model(torch.randn(size, 4))
    x = torch.randn(5, 4)
    for _ in range(5):
        assert_same(model(x), plainly(model, x))
    assert eager.recorded == 1


CHANGES: dict[str, Callable[[rgpr.RGPR], Any]] = {
    "sigma2": lambda m: setattr(m, "sigma2", 3 * m.sigma2),
    "sigma2 in place": lambda m: m.sigma2.mul_(3),
    "temperature": lambda m: setattr(m, "temperature", 2.0),
    "weights in place": lambda m: m.posterior.network[0].weight.mul_(2),
    "weights elsewhere": lambda m: setattr(
        m.posterior.network[0].weight, "data", torch.randn_like(m.posterior.network[0].weight)
    ),
    "a layer": lambda m: m.posterior.network.__setitem__(1, nn.Tanh()),
    "calibrate": lambda m: m.calibrate([blobs()], progress=False),
    "load_state_dict": lambda m: m.load_state_dict(
        rgpr.RGPR(mlp()).fit([2 * blobs()[0]]).state_dict()
    ),
    "fit": lambda m: m.fit([2 * blobs()[0]]),
    "prototypes in place": lambda m: m.residual.coordinates[1].origin.add_(1),
    "nan": lambda m: setattr(m, "nan", "propagate"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("base", ["network", "Laplace"])
def test_calls_are_recorded_once_nobody_watches_any_more(eager: Repeating, base: str) -> None:
    model, x, seen = built(base), inputs(), []
    expected = plainly(model, x)
    watching = model.posterior.register_forward_hook(lambda *_: seen.append(1))
    for _ in range(4):
        assert_same(model(x), expected)
    assert len(seen) == 4
    assert not eager.recorded
    watching.remove()
    for _ in range(4):
        assert_same(model(x), expected)
    assert len(seen) == 4
    assert eager.recorded == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", CHANGES)
def test_recorded_calls_see_every_change(eager: Repeating, change: str) -> None:
    model, x = built("network"), inputs()
    for _ in range(4):
        model(x)
    CHANGES[change](model)
    for _ in range(5):
        assert_same(model(x), plainly(model, x))
    assert eager.replayed


def test_hooks_of_users_run(eager: Repeating) -> None:
    model, x, seen = built("network"), inputs(), []
    for _ in range(4):
        model(x)
    handle = model.posterior.network[0].register_forward_hook(lambda *_: seen.append("network"))
    before = eager.replayed
    model(x)
    assert seen == ["network"]
    assert eager.replayed > before
    handle.remove()
    handle = model.residual.register_forward_hook(lambda *_: seen.append("residual"))  # type: ignore[union-attr]
    before = eager.replayed
    model(x)
    assert eager.replayed == before
    handle.remove()
    assert len(model.posterior.network[0]._forward_hooks) == 0


def test_a_network_that_fails_leaves_nothing_behind(eager: Repeating) -> None:
    model, x = built("network"), inputs()
    for _ in range(4):
        model(x)

    def fail(*_: Any) -> None:
        raise ValueError("no")

    network = model.posterior.network.train()
    handle = network[2].register_forward_hook(fail)
    with pytest.raises(ValueError, match="no"):
        model(x)
    handle.remove()
    assert not any(module._forward_hooks for module in network.modules())
    assert network.training
    assert_same(model(x), plainly(model, x))


def test_the_networks_own_inputs_are_not_overwritten(eager: Repeating) -> None:
    """A network may keep what it got."""
    kept: list[Tensor] = []
    model, x = built("network"), blobs()[0][:5]
    model.posterior.network.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    for number in range(6):
        model(x + number)
    for number, given in enumerate(kept[-2:], start=4):
        assert torch.equal(given, x + number)


# -- inputs, networks and users that recordings were not made for ----------------------------------


def mlp_of(forward: Callable[[nn.Sequential, Tensor], Tensor]) -> nn.Module:
    """The usual network inside of one whose pass is another function."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return forward(self.inner, x)

    return Around()


def test_inputs_that_do_not_fit_are_always_refused(eager: Repeating) -> None:
    x = blobs()[0][:7]
    flattens = mlp_of(lambda inner, x: inner(x.flatten(1)))
    casts = mlp_of(lambda inner, x: inner(x.float()))
    for network, wrong in ((flattens, x[..., None]), (casts, x.double()), (mlp(), x.double())):
        model = rgpr.RGPR(network).fit([blobs()[0]])
        for _ in range(5):
            with pytest.raises((TypeError, ValueError), match=r"fitted on inputs|computes in"):
                model(wrong)
        before = eager.replayed
        for _ in range(4):
            assert_same(model(x), plainly(model, x))
        assert eager.replayed > before


@pytest.mark.filterwarnings("error")
def test_errors_of_the_network_do_not_end_recording(eager: Repeating) -> None:
    fails = True

    def sometimes(inner: nn.Sequential, x: Tensor) -> Tensor:
        if fails and len(x) == 7:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
        return inner(x)

    model, x = rgpr.RGPR(mlp_of(sometimes)).fit([blobs()[0]]), blobs()[0][:7]
    for _ in range(5):
        with pytest.raises(RuntimeError, match="mat1"):
            model(x)
    fails = False
    for _ in range(4):
        assert_same(model(x), plainly(model, x))
    assert eager.replayed


def test_a_recording_that_another_thread_made_anew_is_the_one_to_replay(
    recorder: Repeating, monkeypatch: pytest.MonkeyPatch
) -> None:
    recordings, x, used = Recordings([weight := nn.Parameter(torch.ones(4))]), torch.ones(3, 4), []
    call = lambda x: x * weight  # noqa: E731
    recordings(call, x), recordings(call, x)
    turn, (old,) = recorder.turn, recordings._by_size.values()
    assert old is not None
    monkeypatch.setattr(old, "replay", lambda: used.append("old"))

    def later() -> Any:
        """The turn of this thread comes after that of another one."""
        monkeypatch.setattr(recorder, "turn", turn)
        weight.data = torch.full((4,), 5.0)
        recordings(call, x)
        return turn()

    monkeypatch.setattr(recorder, "turn", later)
    assert torch.equal(recordings(call, x), 5 * x)
    assert not used


class Meanwhile(nn.Module):
    """Whoever asks for its mode finds that another call did something in the meantime."""

    def __init__(self, does: Callable[[], Any]) -> None:
        self.does, self.mode, self.armed = does, False, False
        super().__init__()

    @property
    def training(self) -> bool:  # type: ignore[override]
        if self.armed:
            self.armed = False
            self.does()
        return self.mode

    @training.setter
    def training(self, mode: bool) -> None:
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_modes_that_another_call_switches_meanwhile_are_switched_here_too(
    eager: Repeating,
) -> None:
    network = mlp()
    guard = evaluating(network)
    first = Meanwhile(lambda: (guard.__enter__(), guard.__enter__()))
    last = Meanwhile(lambda: guard.__exit__(None, None, None))
    model, x = rgpr.RGPR(nn.Sequential(first, *network, last)).fit([blobs()[0]]), blobs()[0][:7]
    for _ in range(4):
        model(x)
    modes: list[bool] = []
    network[0].register_forward_hook(lambda module, *_: modes.append(module.training))
    model.eval()
    network.train()
    first.armed = last.armed = True
    model(x)
    assert modes == [False]
    assert network[0].training


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("base", ["network", "Laplace"])
@pytest.mark.parametrize("name", ["forward", "point"])
@pytest.mark.parametrize("where", ["in a subclass", "on the object", "later"])
def test_methods_of_users_are_called(eager: Repeating, base: str, name: str, where: str) -> None:
    model, x, seen = built(base), inputs(), []
    own = getattr(type(model.posterior), name)

    def method(self: Any, x: Tensor) -> Any:
        seen.append(name)
        return own(self, x)

    if where == "later":
        for _ in range(4):
            model(x)
    if where == "in a subclass":
        model.posterior.__class__ = type("Mine", (type(model.posterior),), {name: method})
    else:
        setattr(model.posterior, name, method.__get__(model.posterior))
    before, replayed = len(seen), eager.replayed
    for _ in range(5):
        model(x)
    # Neither base calls it in a plain call.
    assert len(seen) - before == (0 if name == "point" else 5)
    assert eager.replayed == replayed


@pytest.mark.parametrize("base", ["network", "Laplace"])
@pytest.mark.filterwarnings("ignore")
def test_networks_that_ask_for_gradients_leave_no_graph(eager: Repeating, base: str) -> None:
    def with_gradients(module: nn.Module, call: Callable[[Tensor], Tensor]) -> None:
        def forward(x: Tensor) -> Tensor:
            with torch.enable_grad():
                return call(x)

        module.forward = forward

    model, x = built(base), inputs()
    expected = plainly(model, x)
    with_gradients(model.posterior.network, model.posterior.network.forward)
    for _ in range(6):
        assert_same(model(x), expected)
    (passage,) = model._recorded._by_form.values()
    buffers = [*passage._read, *passage._outputs]
    assert not any(buffer.requires_grad for buffer in buffers)
    assert not passage._reading.features


def test_positions_are_averaged_where_networks_ask_for_gradients(eager: Repeating) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act, self.last = nn.Conv1d(1, 8, 3), nn.ReLU(), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                return self.last(self.act(self.first(x[:, None])).flatten(1))

    model, x = rgpr.RGPR(Net()).fit([blobs()[0]]), inputs()
    for _ in range(5):
        assert_same(model(x), plainly(model, x))
    assert eager.replayed


def test_tables_of_hooks_may_be_replaced(eager: Repeating) -> None:
    model, x = built("network"), inputs()
    for _ in range(4):
        model(x)
    for module in model.posterior.network.modules():
        module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
        module._forward_pre_hooks_with_kwargs = OrderedDict()
    before = eager.replayed
    assert_same(model(x), plainly(model, x))
    assert eager.replayed > before
    assert not any(module._forward_hooks for module in model.posterior.network.modules())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("base", BASES)
def test_every_call_runs_the_network_once(eager: Repeating, base: str) -> None:
    model, passes = built(base), []
    model.posterior.network.register_forward_hook(lambda *_: passes.append(1))
    for number in range(1, 7):
        x = number * inputs()
        expected = plainly(model, x)
        before = len(passes)
        assert_same(model(x), expected)
        assert len(passes) == before + 1
    assert eager.recorded == 1


def test_a_model_that_moves_has_no_recordings(eager: Repeating) -> None:
    model, x, waited = built("network"), inputs(), []
    eager.finish = lambda: waited.append(1)  # type: ignore[method-assign]
    for _ in range(4):
        model(x)
    model.double()
    assert waited
    assert model._recorded._parts is None
    assert not model._recorded._by_form


def test_replicas_are_not_recorded(eager: Repeating) -> None:
    model, x = built("network"), inputs()
    replica = copy.copy(model)
    replica.posterior = copy.copy(model.posterior)
    replica.posterior.network = model.posterior.network._replicate_for_data_parallel()
    for _ in range(5):
        assert_same(replica(x), model.forward(x))
    assert model._recorded._by_form.keys() <= {(x.shape, x.stride(), x.dtype)}
    seen = replica._recorded = type(model._recorded)()
    for _ in range(5):
        replica(x)
    assert seen._parts is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("ending", [False, True])
def test_too_little_memory_ends_nothing(eager: Repeating, ending: bool) -> None:
    full = True
    record = eager.record

    def without_memory(call: Callable[[], Any], pool: Any) -> Any:
        if not full:
            return record(call, pool)
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            if ending:  # of a recording that has failed
                raise RuntimeError("operation failed due to a previous error during capture")

    eager.record = without_memory  # type: ignore[method-assign]
    model, recordings, x = built("network"), Recordings([]), inputs()
    for _ in range(200):
        model(x)
        recordings(doubled, x)
    full = False
    for _ in range(5):
        assert_same(model(x), plainly(model, x))
        assert_same(recordings(doubled, x), 2 * x)
    assert model._recorded._made == recordings._made == 1
    assert len(model._recorded._by_form) == 1


def test_tensors_that_are_not_plain_are_not_recorded(eager: Repeating) -> None:
    x = blobs()[0][:2]
    for wrong in (x.to_sparse(), x.to_sparse_csr(), torch.nested.nested_tensor(list(x))):
        assert not recording.may_record(wrong)
        model = built("network")
        for _ in range(4):
            with pytest.raises(TypeError, match=r"dense|pad"):
                model(wrong)


@pytest.mark.filterwarnings("error")
def test_representations_of_other_widths_are_not_forced_into_recordings(eager: Repeating) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.act, self.last = nn.Conv1d(1, 8, 3), nn.ReLU(), nn.Linear(16, 3)
            self.kept = 8

        def forward(self, x: Tensor) -> Tensor:
            h = self.act(self.first(x[:, None])[:, : self.kept])
            return self.last(h.repeat(1, 8 // self.kept, 1).flatten(1))

    model, x = rgpr.RGPR(Net(), layers={"act": 1}).fit([blobs()[0]]), inputs()
    for _ in range(4):
        model(x)
    (passage,) = model._recorded._by_form.values()
    shapes = [buffer.shape for buffer in passage._read]
    for kept in (4, 1):
        model.posterior.network.kept = kept
        expected, found = [], []
        for call, answers in ((plainly, expected), (lambda model, x: model(x), found)):
            try:
                answers.append(call(model, x))
            except RuntimeError as error:
                answers.append(str(error))
        assert type(found[0]) is type(expected[0])
        assert found == expected if isinstance(found[0], str) else True
        if isinstance(found[0], Tensor):
            assert_same(found[0], expected[0])
        assert [buffer.shape for buffer in passage._read] == shapes


def test_whole_models_of_earlier_versions_are_read(eager: Repeating) -> None:
    model, x = built("network"), inputs()
    expected = plainly(model, x)
    del model._recorded
    read = pickle.loads(pickle.dumps(model))
    for _ in range(5):
        assert_same(read(x), expected)
    assert eager.replayed


@pytest.mark.parametrize("value", [None, "0", "1"])
def test_nothing_is_recorded_unless_asked_for(value: str | None) -> None:
    environment = {name: old for name, old in os.environ.items() if name != "RGPR_RECORD"}
    if value is not None:
        environment["RGPR_RECORD"] = value
    says = "from rgpr._backend import recording; print(recording._enabled)"
    run = [sys.executable, "-c", says]
    out = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.split() == [str(value == "1")]


# -- on a GPU --------------------------------------------------------------------------------------


@pytest.fixture
def switched_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Recordings as a user gets them who asks for them."""
    find = recording.recorder_of
    monkeypatch.setattr(recording, "_enabled", True)
    find.cache_clear()
    yield
    find.cache_clear()


def on_gpu(test: Any) -> Any:
    """Needs a GPU, and records there."""
    return needs_gpu(pytest.mark.usefixtures("switched_on")(test))


@on_gpu
@pytest.mark.filterwarnings("error:predictions could not be recorded")
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@torch.no_grad()
def test_graphs_of_a_gpu_answer_as_plain_calls(base: str, dtype: torch.dtype) -> None:
    model, x = built(base).cuda().to(dtype), inputs().cuda().to(dtype)
    for rows in (12, 7, 1, 300):
        some = x.repeat(25, 1)[:rows]
        expected = plainly(model, some)
        for _ in range(5):
            assert_same(model(some), expected)
    assert len(model._recorded._by_form) == 4
    with torch.inference_mode():
        assert_same(model(x), plainly(model, x))


@on_gpu
@torch.no_grad()
def test_graphs_of_a_gpu_read_images() -> None:
    model = rgpr.RGPR(LeNet()).fit([torch.rand(40, 1, 8, 8)]).cuda()
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.rand(9, 1, 8, 8).cuda().contiguous(memory_format=layout)
        expected = plainly(model, x)
        for _ in range(5):
            assert_same(model(x), expected)
    for size in range(1, 20):
        x = torch.rand(size, 1, 8, 8).cuda()
        for _ in range(4):
            assert_same(model(x), plainly(model, x))
    assert len(model._recorded._by_form) <= MOST


@on_gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_graphs_of_a_gpu_see_every_change(change: str) -> None:
    model, x = built("network").cuda(), inputs().cuda()
    for _ in range(4):
        model(x)
    CHANGES[change](model)
    for _ in range(5):
        assert_same(model(x), plainly(model, x))


@on_gpu
@torch.no_grad()
def test_graphs_of_a_gpu_follow_streams_and_threads() -> None:
    model = built("Laplace").cuda()
    batches = [(number + 1) * blobs()[0].cuda() for number in range(8)]
    expected = [plainly(model, x) for x in batches]
    for _ in range(4):
        model(batches[0])

    def work(number: int) -> Tensor:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            answer = model(batches[number])
            torch.cuda.current_stream().synchronize()
            return answer.cpu()

    torch.cuda.synchronize()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            for found, answer in zip(pool.map(work, range(8)), expected, strict=True):
                assert_same(found, answer.cpu())


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Scores take their digits from a float32 network."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@on_gpu
@pytest.mark.filterwarnings("error:predictions could not be recorded")
@pytest.mark.parametrize("base", ["network", "Laplace"])
@torch.no_grad()
def test_compiled_graphs_of_a_gpu(base: str) -> None:
    model, x = built(base).cuda(), inputs().cuda()
    model.compile(mode="reduce-overhead")
    for rows in (12, 7, 1, 5) * 4:
        assert_same(model(x[:rows]), model.forward(x[:rows]))
        assert_near(model.score(x[:rows]), model._say(x[:rows]).score)
    scores = [(model.score(size * x), model._say(size * x).score) for size in (1.0, 2.0, 3.0)]
    for score, usual in scores:
        assert_near(score, usual)
    answers = [(model(size * x), model.forward(size * x)) for size in (1.0, 2.0, 3.0)]
    for found, expected in answers:
        assert_same(found, expected)
    for change in ("sigma2", "temperature", "weights in place", "weights elsewhere", "calibrate"):
        CHANGES[change](model)
        for _ in range(3):
            assert_same(model(x), model.forward(x))
            assert_near(model.score(x), model._say(x).score)
