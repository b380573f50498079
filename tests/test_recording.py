"""Recorded calls: on a GPU as CUDA graphs, and everything that is the same on every device."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import rgpr
from networks import LeNet, blobs, laplace_over_blobs, mlp
from rgpr._backend import compiled, recording
from rgpr._backend.recording import MOST, Recorder, Recordings


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
    torch.testing.assert_close(copy.deepcopy(model)(x[:9]), model.forward(x[:9]), rtol=1e-5, atol=1e-6)
