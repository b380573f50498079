from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from laplace import Laplace
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.data import DataLoader, TensorDataset

import rgpr
from networks import LeNet, blobs, convolutional, laplace_over_blobs, mlp
from rgpr._backend.arithmetic import FASTER
from rgpr.posteriors import MCDropout, Temperature
from rgpr.residual.coordinates import Standardizer
from rgpr.residual.variance import Residual
from rgpr.saving import export

pytestmark = pytest.mark.filterwarnings("ignore")


def laplace_model(likelihood: str = "classification", structure: str = "kron") -> rgpr.RGPR:
    la, x, y = laplace_over_blobs(likelihood, structure)
    return rgpr.RGPR(la).fit([(x, y)])


def calibrated(likelihood: str = "classification") -> rgpr.RGPR:
    """Like everyday models: over a Laplace approximation, with references and a temperature."""
    model = laplace_model(likelihood)
    x, y = blobs()
    if likelihood == "regression":
        y = torch.randn(len(x), 3)
    model.temperature = 1.3  # calibrating leaves it, or raises it
    model.calibrate([(x + 0.1 * torch.randn_like(x), y)], progress=False)
    return model


def tuned() -> rgpr.RGPR:
    la, x, y = laplace_over_blobs("classification", "kron")
    model = rgpr.RGPR(la, residual="paper").fit([(x, y)])
    model.tune([(x, y)], "ood", progress=False)
    return model


MODELS = {
    "map": (lambda: rgpr.RGPR(mlp()).fit([blobs()[0]]), (4,)),
    "the paper's residual": (lambda: rgpr.RGPR(mlp(), residual="paper").fit([blobs()[0]]), (4,)),
    "images": (lambda: rgpr.RGPR(LeNet()).fit([torch.rand(40, 1, 8, 8)]), (1, 8, 8)),
    "last-layer Laplace": (laplace_model, (4,)),
    "diagonal": (lambda: laplace_model(structure="diag"), (4,)),
    "full": (lambda: laplace_model(structure="full"), (4,)),
    "calibrated": (calibrated, (4,)),
    "tuned": (tuned, (4,)),
    "one output": (lambda: rgpr.RGPR(mlp(4, 1)).fit([blobs()[0]]), (4,)),
    "temperature": (lambda: rgpr.RGPR(Temperature(mlp(), 1.5)).fit([blobs()[0]]), (4,)),
    "ensemble": (lambda: rgpr.RGPR([mlp(), mlp()]).fit([blobs()[0]]), (4,)),
}


def answers(path: Path, x: Tensor) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(str(path))
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {"x": x.numpy()}), strict=True))


def assert_agrees(model: rgpr.RGPR, found: dict[str, np.ndarray], x: Tensor) -> None:
    """All that a file answers is what the model answers, up to the network's rounding."""
    with torch.no_grad():
        np.testing.assert_allclose(found["score"], model.score(x).numpy(), atol=1e-4)
        if model._references is not None:
            moved = np.abs(found["p_value"] - model.p_value(x).numpy()).max()
            assert moved <= 1.01 / (len(model._references) + 1)  # one rank at the most
        answer = model(x)
    if model.likelihood == "classification":
        np.testing.assert_allclose(found["probabilities"], answer.numpy(), atol=1e-5)
    else:
        np.testing.assert_allclose(found["mean"], answer[0].numpy(), atol=1e-5)
        np.testing.assert_allclose(found["covariance"], answer[1].numpy(), rtol=1e-5, atol=1e-5)


# Each takes a quarter of a minute; the others run the same operations.
SLOW = ("full", "diagonal", "temperature", "ensemble")


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        pytest.param(*MODELS[name], id=name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in MODELS
    ],
)
def test_onnxruntime_agrees(build, shape: tuple[int, ...], tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model = build()
    path = export.onnx(model, tmp_path / "model.onnx", torch.rand(1, *shape))
    assert os.listdir(tmp_path) == ["model.onnx"]
    names = {"probabilities", "score"} | ({"p_value"} if model._references is not None else set())
    for rows in (1, 2, 13):
        for size in (1.0, 30.0):
            x = size * torch.randn(rows, *shape)
            found = answers(path, x)
            assert set(found) == names
            assert_agrees(model, found, x)
    assert model.variance(x).max() > 0  # the residual was seen, too
    near, x = answers(path, torch.randn(9, *shape)), 1e14 * torch.randn(9, *shape)
    far = answers(path, x)
    p = far["probabilities"]
    np.testing.assert_allclose(p, 1 / p.shape[1], atol=1e-3)
    assert far["score"].min() > near["score"].max()
    if "p_value" in names:
        assert (far["p_value"] == 1 / (len(model._references) + 1)).all()


def test_a_file_stores_of_constants_only_what_its_graph_uses(tmp_path: Path) -> None:
    """Prototypes hold their axes beside a product that the graph uses alone."""
    x, y = torch.randn(400, 4), torch.arange(400) % 3
    network = nn.Sequential(nn.Linear(4, 200), nn.ReLU(), nn.Linear(200, 3))
    model = rgpr.RGPR(network).fit([(x, y)], progress=False)
    path = export.onnx(model, tmp_path / "model.onnx", x[:2])
    graph = onnx.load(path).graph
    constants = {constant.name for constant in graph.initializer}
    read = {name for node in graph.node for name in node.input}
    assert constants <= read
    assert not any(
        constants & set(node.input[:1]) for node in graph.node if node.op_type == "Slice"
    )
    assert_agrees(model, answers(path, x[:9]), x[:9])


class Table(nn.Module):
    """Uses several parts of one large constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(200, 200))
        self.last = nn.Linear(200, 3)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.repeat(1, 40)[:, :150]
        found = [wide @ self.table[i : i + 150] for i in range(0, 50, 10)]
        return self.last(torch.relu(torch.stack(found).sum(0)))


def test_a_constant_that_is_used_in_several_parts_stays_whole(tmp_path: Path) -> None:
    model, x = rgpr.RGPR(Table(), ["last"]).fit([torch.randn(60, 4)]), torch.randn(9, 4)
    path = export.onnx(model, tmp_path / "model.onnx", x[:2])
    sizes = [np.prod(constant.dims) for constant in onnx.load(path).graph.initializer]
    assert sum(sizes) < 1.1 * 200 * 200
    assert_agrees(model, answers(path, x), x)


def test_an_infinite_layer_beside_a_silent_one_in_a_file(tmp_path: Path) -> None:
    """Numbers of a file may be rounded to float32, in which the largest of float64 is infinite."""
    parts = [Standardizer(torch.zeros(2), torch.ones(2)) for _ in range(3)]
    residual = Residual(parts, torch.ones(3), combine="onset")
    x = torch.tensor([[1e3, torch.inf, 0.0], [1e3, 0.0, torch.inf], [1e3, 0.0, 1.0]]).double()
    path = tmp_path / "residual.onnx"
    graph = torch.onnx.export(residual, (x,), dynamo=True, input_names=["x"], verbose=False)
    assert graph is not None
    graph.save(path)
    (found,) = answers(path, x).values()
    np.testing.assert_allclose(found, residual(x).numpy(), rtol=1e-6)
    assert np.isinf(found[:2]).all()


@pytest.mark.parametrize("residual", ["onset", "paper"])
def test_special_values_stay_in_their_row(residual: str, tmp_path: Path) -> None:
    x = torch.randn(60, 4)
    model = rgpr.RGPR(mlp(), residual=residual).fit([x])
    model.calibrate([torch.randn(40, 4)], progress=False)
    path = export.onnx(model, tmp_path / "model.onnx", x[:2])
    spoiled = x[:5].clone()
    spoiled[1, 0], spoiled[2, 3], spoiled[3, 1] = torch.inf, -torch.inf, torch.nan
    found = answers(path, spoiled)
    np.testing.assert_allclose(found["probabilities"][[1, 2]], 1 / 3, rtol=1e-6)
    assert np.isposinf(found["score"][[1, 2]]).all()
    assert (found["p_value"][[1, 2]] == 1 / 41).all()
    for answer in found.values():
        assert np.isnan(answer[3]).all()
    good = {name: answer[[0, 4]] for name, answer in found.items()}
    assert_agrees(model, good, x[[0, 4]])


@pytest.mark.parametrize("build", [pytest.param(laplace_model, marks=pytest.mark.slow), calibrated])
def test_regression_gives_the_pair(build, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model = build("regression")
    path = export.onnx(model, tmp_path / "m.onnx", torch.randn(5, 4))
    for x in (torch.randn(7, 4), 10 * torch.randn(7, 4)):
        found = answers(path, x)
        extra = [] if build is laplace_model else ["p_value"]
        assert list(found) == ["mean", "covariance", "score", *extra]
        assert_agrees(model, found, x)


def test_the_program_is_the_model() -> None:
    model = calibrated()
    model.posterior.network.train()
    exported = export.program(model, torch.randn(3, 4))
    assert model.posterior.network.training
    x = torch.cat([torch.randn(11, 4), 50 * torch.randn(5, 4)])
    with torch.no_grad():
        torch.testing.assert_close(exported.module()(x), model(x))
        everything = export.program(model, torch.randn(3, 4), everything=True).module()(x)
        probabilities, score, p_value = everything
        torch.testing.assert_close(probabilities, model(x))
        torch.testing.assert_close(score, model.score(x))
        torch.testing.assert_close(p_value, model.p_value(x))
        fixed = export.program(model, x, dynamic=False, everything=True).module()(x)
    for dynamic, static in zip(everything, fixed, strict=True):
        torch.testing.assert_close(dynamic, static)


def test_it_runs_where_neither_library_is(tmp_path: Path) -> None:
    """In a process of its own that cannot import them."""
    model = calibrated()
    path = export.onnx(model, tmp_path / "model.onnx", torch.randn(2, 4))
    x = torch.randn(6, 4)
    np.save(tmp_path / "x.npy", x.numpy())
    code = f"""
import sys
for name in ("rgpr", "laplace", "torch"):
    sys.modules[name] = None  # importing them now fails
import numpy, onnxruntime
session = onnxruntime.InferenceSession({str(path)!r})
x = numpy.load({str(tmp_path / "x.npy")!r})
names = ["probabilities", "score", "p_value"]
for name, answer in zip(names, session.run(names, {{"x": x}})):
    numpy.save({str(tmp_path)!r} + "/" + name, answer)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
    names = ("probabilities", "score", "p_value")
    assert_agrees(model, {name: np.load(tmp_path / f"{name}.npy") for name in names}, x)


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    x = torch.randn(30, 4)
    dropout = MCDropout(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3)))
    with pytest.raises(TypeError, match=r"MCDropout cannot become a graph.*random samples"):
        export.onnx(rgpr.RGPR(dropout).fit([x]), tmp_path / "m.onnx", x)
    with pytest.raises(RuntimeError, match="not fitted"):
        export.program(rgpr.RGPR(mlp()), x)
    with pytest.raises(FileNotFoundError, match="no folder"):
        export.onnx(rgpr.RGPR(convolutional()), tmp_path / "no" / "m.onnx", x)
    la = Laplace(mlp(), "classification", "all", "diag")
    la.fit(DataLoader(TensorDataset(*blobs()), batch_size=40))
    with pytest.raises(TypeError, match=r"LaplacePosterior cannot become a graph.*another library"):
        export.program(rgpr.RGPR(la).fit([x]), x)


def test_compiled_in_place() -> None:
    """One graph for the first size of a batch, one for all others, made anew when needed."""
    model = calibrated()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    network, x = model.posterior.network.train(), torch.cat([blobs()[0], 1e9 * blobs()[0][:5]])
    expected = model(x)
    model.compile(backend="aot_eager", fullgraph=True)
    for rows in (len(x), 7, 1, len(x), 12):
        torch.testing.assert_close(model(x[:rows]), expected[:rows], rtol=1e-5, atol=1e-6)
    assert network.training
    assert torch.equal(model(x[:0]), expected[:0])
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x), expected, rtol=0.1, atol=0.05)
    before = network[-1].bias.detach().clone()
    for change in (
        lambda: network[-1].bias.data.zero_(),
        lambda: network.load_state_dict({**network.state_dict(), "4.bias": before}, assign=True),
        lambda: network.__setitem__(1, nn.Tanh()),
        lambda: network.__setitem__(1, nn.ReLU()),
        lambda: setattr(model, "temperature", 0.5),
        lambda: model.calibrate([blobs()], progress=False),
    ):
        change()
        torch.testing.assert_close(model(x), model.forward(x), rtol=1e-5, atol=1e-6)
    model.sigma2 = 3 * model.sigma2
    changed = model(x)
    assert (changed - expected).abs().max() > 1e-3
    torch.testing.assert_close(changed, model.forward(x), rtol=1e-5, atol=1e-6)
    # What the graph does not hold goes the usual way, and so do copies.
    bridged = model(x, link_approx="bridge")
    torch.testing.assert_close(bridged, model.forward(x, link_approx="bridge"))
    torch.testing.assert_close(copy.deepcopy(model)(x), changed, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="fitted on inputs of shape"):
        model(x[:, :2])


COMPILED = {
    "classification": lambda: calibrated(),
    "one output": lambda: _calibrated_on_blobs(mlp(4, 1), "classification"),
    "multilabel": lambda: _calibrated_on_blobs(mlp(4, 3), "multilabel"),
    "regression": lambda: calibrated("regression"),
    "the paper's residual": lambda: tuned(),
}


def _calibrated_on_blobs(network: nn.Module, likelihood: str) -> rgpr.RGPR:
    x, y = blobs()
    y = torch.randint(0, 2, (len(x), 3)) if likelihood == "multilabel" else y % 2
    model = rgpr.RGPR(network, likelihood=likelihood).fit([x], progress=False)
    model.calibrate([(x + 0.1 * torch.randn_like(x), y)], progress=False)
    return model


# Of the forms of outputs two are compiled always, and the others each night.
@pytest.mark.parametrize(
    "build",
    [
        pytest.param(
            build,
            id=name,
            marks=[pytest.mark.slow] if name in ("one output", "multilabel") else [],
        )
        for name, build in COMPILED.items()
    ],
)
def test_all_answers_are_compiled(build, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Not only plain calls: one graph gives score, p-value, flag, sets, intervals and predict."""
    model = build().requires_grad_(False)
    compiled = copy.deepcopy(model)
    compiled.compile(backend="aot_eager", fullgraph=True)
    x = torch.cat([blobs()[0], 3 * blobs()[0][:9], 1e9 * blobs()[0][:5]])
    x[3, 0], x[4, 1] = torch.inf, torch.nan
    calls = ["score"]
    if model._references is not None:
        calls += ["p_value", "flag"]
    if model._label_scores is not None:
        calls.append("predict_set" if model.likelihood == "classification" else "interval")
    with torch.no_grad():
        compiled.score(x[:7]), compiled.score(x[:9])  # compiles for this size and for all others
        # From now on nothing may go the usual way.
        monkeypatch.setattr(compiled, "_say", None)
        for rows in (x[:7], x, x[2:30]):
            for call in calls:
                found, expected = getattr(compiled, call)(rows), getattr(model, call)(rows)
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
        found, expected = compiled.predict(x, progress=False), model.predict(x, progress=False)
    for (name, one), (_, other) in zip(found._arrays(), expected._arrays(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=name)


def made(model: rgpr.RGPR) -> int:
    """How many graphs a compiled model has for what is no plain call."""
    assert model._compiled is not None
    return len(model._compiled._made.by_key)


def test_compiled_scores_notice_what_changed() -> None:
    model = calibrated()
    model.compile(backend="eager")
    x, other = blobs()[0], copy.deepcopy(model)
    assert other._compiled is None  # a copy has other tensors
    with torch.no_grad():
        follows_changes(model, other, x)


def follows_changes(model: rgpr.RGPR, other: rgpr.RGPR, x: Tensor) -> None:
    before = model.score(x)
    assert made(model) == 1
    torch.testing.assert_close(before, other.score(x))
    model.posterior.network[-1].bias.data.add_(torch.tensor([1.0, 0.0, 0.0]))
    assert (model.score(x) - before).abs().max() > 1e-3
    torch.testing.assert_close(model.score(x), copy.deepcopy(model).score(x))
    model.fit([(x / 2, blobs()[1])], progress=False)
    torch.testing.assert_close(model.score(x), copy.deepcopy(model).score(x))
    with pytest.raises(RuntimeError, match="not calibrated"):
        model.p_value(x)
    with pytest.raises(ValueError, match="fitted on inputs of shape"):
        model.score(x[:, :2])
    assert made(model) == 1


def test_one_graph_for_the_first_size_one_for_others_and_one_for_a_row() -> None:
    model, x = calibrated(), blobs()[0]
    model.compile(backend="eager")
    graphs = []
    for rows in (7, 7, 9, 20, 1, 1):
        model.p_value(x[:rows]), model.flag(x[:rows]), model.predict(x[:rows], progress=False)
        graphs.append(made(model))
    assert graphs == [1, 1, 2, 2, 3, 3]
    model.p_value(x.repeat(20, 1))  # beyond the rows that kernels of a GPU measure together
    assert made(model) == 3


def test_a_compiled_model_with_other_weights_for_a_call() -> None:
    """As torch.func.functional_call lends them: tensors that are no parameters."""
    model, x = calibrated(), blobs()[0][:9]
    model.compile(backend="eager")
    name, weight = next(iter(model.named_parameters()))
    with torch.no_grad():
        before = model(x)
        found = torch.func.functional_call(model, {name: 2 * weight}, (x,))
        assert torch.equal(model(x), before)
        weight.mul_(2)
        torch.testing.assert_close(found, model(x), rtol=1e-5, atol=1e-6)
    assert (found - before).abs().max() > 1e-3


DERIVATIVES = {
    "of inputs": lambda score, x: torch.autograd.grad(score(x).sum(), x)[0],
    "twice": lambda score, x: torch.autograd.functional.hvp(lambda x: score(x).sum(), x, x)[1],
    "forward, while gradients are off": lambda score, x: forward_derivative(score, x),
    "torch.func.jvp": lambda score, x: torch.func.jvp(score, (x,), (x,))[1],
    "torch.func.grad": lambda score, x: torch.func.grad(lambda x: score(x).sum())(x),
}


def forward_derivative(score: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.no_grad(), forward_ad.dual_level():
        found = forward_ad.unpack_dual(score(forward_ad.make_dual(x, x))).tangent
    assert found is not None
    return found


# A score is compiled while gradients are off, so the others are tried each night.
@pytest.mark.parametrize(
    ("call", "derivative"),
    [
        pytest.param(
            call,
            derivative,
            id=f"{call}-{name}",
            marks=[pytest.mark.slow] if call == "score" and "off" not in name else [],
        )
        for call in ("score", "__call__")
        for name, derivative in DERIVATIVES.items()
    ],
)
def test_compiled_models_have_all_derivatives(call, derivative) -> None:  # type: ignore[no-untyped-def]
    model, x = calibrated(), blobs()[0][:9].double().requires_grad_()
    model = model.double().requires_grad_(False)
    plain = copy.deepcopy(model)
    model.compile(backend="aot_eager")
    with torch.no_grad():
        model(x), model.score(x)
    found, expected = (derivative(getattr(m, call), x) for m in (model, plain))
    assert expected.abs().max() > 0
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("call", ["score", "__call__"])
def test_compiled_models_are_part_of_other_graphs(call: str) -> None:
    torch._dynamo.reset()
    x = blobs()[0]
    model = rgpr.RGPR(mlp()).fit([x], progress=False).eval()
    plain = copy.deepcopy(model)
    model.compile(backend="eager")
    with torch.no_grad():
        getattr(model, call)(x)
        found = torch.compile(lambda x: 2 * getattr(model, call)(x), backend="eager")(x)
    expected = 2 * getattr(plain, call)(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_compiled_model_that_is_told_to_raise_does() -> None:
    model, x = calibrated(), blobs()[0][:9].clone()
    model.compile(backend="eager")
    with torch.no_grad():
        model(x), model.score(x)
    x[3, 1] = torch.nan
    model.nan = "raise"
    with torch.no_grad():
        for call in (model, model.score, model.p_value, model.flag):
            with pytest.raises(ValueError, match="row 3 of the input holds a NaN"):
                call(x)


def test_a_compiled_model_names_the_device_of_an_input_without_values() -> None:
    model, x = calibrated(), blobs()[0][:9]
    model.compile(backend="eager")
    with torch.no_grad(), pytest.raises(ValueError, match="the input is on meta"):
        model.score(x.to("meta"))


def test_models_that_were_pickled_before_there_were_compiled_scores() -> None:
    model, x = calibrated(), blobs()[0]
    state = model.__getstate__()
    del state["_compiled"]
    other = rgpr.RGPR.__new__(rgpr.RGPR)
    other.__setstate__(state)
    assert torch.equal(other.score(x), model.score(x))


class Shifted(nn.Module):
    """Holds nothing, until somebody gives it a shift."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift if "shift" in self._buffers else x


def test_compiled_calls_notice_buffers_and_hooks_that_come_later() -> None:
    x, shifted = blobs()[0], Shifted()
    network = nn.Sequential(shifted, mlp())
    model = rgpr.RGPR(network).fit([x]).requires_grad_(False)
    model.compile(backend="eager")
    before = model(x)
    shifted.register_buffer("shift", torch.full((4,), 0.5))
    assert (model(x) - before).abs().max() > 1e-3
    torch.testing.assert_close(model(x), model.forward(x), rtol=1e-5, atol=1e-6)
    seen: list[Tensor] = []
    handle = model.posterior.network[1].register_forward_hook(lambda *_: seen.append(x))
    model(x), model(x)
    assert len(seen) == 2
    handle.remove()
    model(x)
    assert len(seen) == 2


def test_hooks_that_come_later_are_no_part_of_a_graph() -> None:
    """Neither where they come before the first call, nor where one takes the place of another."""
    x, network = blobs()[0], mlp()
    model = rgpr.RGPR(network).fit([x]).requires_grad_(False)
    expected = model(x)
    model.compile(backend="eager")
    silent = network[0].register_forward_hook(lambda *_: 0 * _[2])
    assert not torch.allclose(model(x), expected)
    silent.remove()
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)

    kept = network[0].register_forward_hook(lambda *_: 2 * _[2])
    model.compile(backend="eager")
    twice = model(x)
    assert not torch.allclose(twice, expected)
    kept.remove()
    other = network[0].register_forward_hook(lambda *_: 3 * _[2])
    torch.testing.assert_close(model(x), model.forward(x), rtol=1e-5, atol=1e-6)
    other.remove()
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)

    # A copy of a module has hooks of the same numbers.
    twin = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    twin[1].register_forward_hook(lambda *_: 2 * _[2])
    both = nn.Sequential(twin, copy.deepcopy(twin), nn.Linear(4, 3)).requires_grad_(False)
    hooked = rgpr.RGPR(both).fit([x])
    hooked.compile(backend="eager")
    hooked(x)
    both[1][1]._forward_hooks.clear()
    torch.testing.assert_close(hooked(x), hooked.forward(x), rtol=1e-5, atol=1e-6)

    everywhere = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: 2 * output if module is network[0] else None
    )
    try:
        torch.testing.assert_close(model(x), twice, rtol=1e-5, atol=1e-6)
    finally:
        everywhere.remove()
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)


def test_no_size_compiles_again() -> None:
    """One graph for the first size, one for a single row, and one for all other sizes."""
    model = rgpr.RGPR(mlp()).fit([blobs()[0]]).requires_grad_(False)
    x, compiled = blobs()[0], []

    def backend(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    expected = model(x)
    model.compile(backend=backend)
    counts = []
    for size in (60, 5, 7, 20, 1, 2, 60, 1, 33):
        torch.testing.assert_close(model(x[:size]), expected[:size], rtol=1e-5, atol=1e-6)
        counts.append(len(compiled))
    assert counts == [1, 2, 2, 2, 3, 3, 3, 3, 3]


@pytest.mark.slow
def test_compiled_calls_from_several_threads() -> None:
    model = rgpr.RGPR(mlp()).fit([blobs()[0]]).requires_grad_(False)
    model.posterior.network.train()
    x = blobs()[0]
    expected = model(x)
    model.compile(backend="aot_eager")
    model(x), model(x[:5])  # made before the threads begin
    with ThreadPoolExecutor(4) as pool:
        for size, p in zip(
            [60, 7, 60, 20] * 5, pool.map(lambda n: model(x[:n]), [60, 7, 60, 20] * 5), strict=True
        ):
            torch.testing.assert_close(p, expected[:size], rtol=1e-5, atol=1e-6)
    assert model.posterior.network.training


def test_a_hook_on_the_compiled_model_still_runs() -> None:
    model = rgpr.RGPR(mlp()).fit([blobs()[0]])
    model.compile(backend="aot_eager")
    seen = []
    model.register_forward_hook(lambda *arguments: seen.append(1))
    model(blobs()[0])
    assert seen


def test_compiled_calls_still_have_gradients() -> None:
    model = rgpr.RGPR(mlp()).fit([blobs()[0]])
    model.compile(backend="aot_eager")
    x = blobs()[0][:3].requires_grad_()
    model(x).amax(1).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_what_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(RuntimeError, match="not fitted"):
        rgpr.RGPR(mlp()).compile()
    with pytest.raises(TypeError, match="nan='raise'"):
        rgpr.RGPR(mlp(), nan="raise").fit([blobs()[0]]).compile()


class Widened(rgpr.Posterior):
    """What a user may write: the network's output with the same variance everywhere."""

    def forward(self, x: Tensor) -> rgpr.posteriors.Gaussian:
        mean = self.point(x)
        return rgpr.posteriors.DiagonalGaussian(mean, torch.full_like(mean, 0.5).double())

    def mean_parts(self) -> list[tuple[nn.Module, float]]:
        return [(self.network, 1.0)]


def test_a_posterior_of_ones_own_is_exported_compiled_and_certified(tmp_path: Path) -> None:
    x = torch.randn(60, 4)
    model = rgpr.RGPR(Widened(mlp())).fit([x], progress=False)
    with torch.no_grad():
        torch.testing.assert_close(export.program(model, x).module()(3 * x), model(3 * x))
        compiled = copy.deepcopy(model)
        compiled.compile(backend="aot_eager")
        torch.testing.assert_close(compiled(3 * x), model(3 * x))
    assert model.certify(0.1).by == "head"
    with pytest.raises(TypeError, match="its class has no kind"):
        model.save(tmp_path / "m")


def test_numbers_beyond_float32_are_finite_in_a_graph(tmp_path: Path) -> None:
    x = torch.randn(100, 6)
    model = rgpr.RGPR(mlp(6, 1), likelihood="regression").fit([x], progress=False)
    path = export.onnx(model, tmp_path / "m.onnx", x[:2])
    for size in (1e13, 1e20):
        far = size * x[:3]
        found = answers(path, far)
        with torch.no_grad():
            mean, covariance = model(far)
            np.testing.assert_allclose(found["mean"], mean.numpy(), rtol=1e-4)
            np.testing.assert_allclose(found["covariance"], covariance.numpy(), rtol=1e-4)
            np.testing.assert_allclose(found["score"], model.score(far).numpy(), rtol=1e-6)


@pytest.mark.parametrize("residual", ["onset", "paper"])
def test_generated_code_answers_in_the_dtype_of_the_input(residual: str) -> None:
    """The compiler of torch must not lose the cast of the answer."""
    x, _ = blobs()
    model = rgpr.RGPR(mlp(), residual=residual).fit([x], progress=False)
    with torch.no_grad():
        expected = model(3 * x)
        model.compile()
        found = model(3 * x)
    assert found.dtype == expected.dtype == x.dtype
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_sets_do_not_pack_layers_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets are of other scales than answers, but read by the same residual."""
    model, (x, _) = calibrated(), blobs()
    read: list[object] = []
    measured = type(model.residual).packed
    monkeypatch.setitem(FASTER, "cpu", {"pooled": torch.ones_like})  # so that packing is asked for

    def packed(residual: object, x: Tensor) -> object:
        read.append(residual)
        return measured(residual, x)  # type: ignore[arg-type]

    monkeypatch.setattr(type(model.residual), "packed", packed)
    with torch.no_grad():
        model.predict_set(x)
        model(x)
    assert [residual is model.residual for residual in read] == [True, True]
