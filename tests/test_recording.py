"""Recorded calls: on a GPU as CUDA graphs, and everything that is the same on every device."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import rgpr
from devices import needs_gpu
from networks import LeNet, blobs, laplace_over_blobs, mlp
from rgpr._backend import compiled, recording
from rgpr._backend.recording import MOST, Recorder, Recordings
from rgpr.answers import recorded


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
    without = compiled.without_cuda_graphs
    assert without({}) is None
    assert without({"mode": "default"}) is None
    assert without({"mode": "reduce-overhead", "backend": "aot_eager"}) is None
    assert without({"mode": "reduce-overhead", "fullgraph": True}) == {
        "mode": "default",
        "fullgraph": True,
    }
    assert without({"mode": "max-autotune"}) == {"mode": "max-autotune-no-cudagraphs"}
    given: dict[str, Any] = {"options": {"triton.cudagraphs": True, "max_autotune": False}}
    assert without(given) == {"options": {"triton.cudagraphs": False, "max_autotune": False}}
    assert given["options"]["triton.cudagraphs"]


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
    assert eager.recorded == 2
    assert_same(model(3 * x), plainly(model, 3 * x))
    assert_same(model(x[:5]), plainly(model, x[:5]))


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


# -- on a GPU --------------------------------------------------------------------------------------


@needs_gpu
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


@needs_gpu
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


@needs_gpu
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


@needs_gpu
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


@needs_gpu
@pytest.mark.filterwarnings("error:predictions could not be recorded")
@pytest.mark.parametrize("base", ["network", "Laplace"])
@torch.no_grad()
def test_compiled_graphs_of_a_gpu(base: str) -> None:
    model, x = built(base).cuda(), inputs().cuda()
    model.compile(mode="reduce-overhead")
    for rows in (12, 7, 1, 5) * 4:
        assert_same(model(x[:rows]), model.forward(x[:rows]))
    answers = [(model(size * x), model.forward(size * x)) for size in (1.0, 2.0, 3.0)]
    for found, expected in answers:
        assert_same(found, expected)
    for change in ("sigma2", "temperature", "weights in place", "weights elsewhere", "calibrate"):
        CHANGES[change](model)
        for _ in range(3):
            assert_same(model(x), model.forward(x))
