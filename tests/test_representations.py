from __future__ import annotations

import copy
import threading
from collections import OrderedDict

import pytest
import torch
import torchvision
from torch import Tensor, nn

from networks import EVERY_NETWORK, Functional, LeNet, Reused, Shared, Wrapper, mlp
from rgpr import RGPR
from rgpr.hooks import evaluating, plain_module, watching
from rgpr.representations import capture, check_layers, choose_layers

EXPECTED_AUTO = {
    "mlp": ["1", "3"],
    "convolutional": ["2", "5"],
    "lenet": ["features.3", "features.7", "classifier.2"],
    "functional": ["first", "second"],
    "reused": ["relu#0", "relu#1"],
    "recurrent": ["embed", "lstm"],
    "shared": ["first#0", "first#1"],
    "wrapper": ["inner.inner.1", "inner.inner.3"],
    "parametrised": ["1", "3"],
    "named input": ["./input", "hidden"],
    "in place": ["2"],
}


def read(network: nn.Module, layers: list[str], x: Tensor) -> dict[str, Tensor]:
    """What `capture` hands over, cloned."""
    seen: dict[str, Tensor] = {}
    with (
        torch.no_grad(),
        evaluating(network),
        capture(network, layers, lambda i, h: seen.update({layers[i]: h.clone()})),
    ):
        network(x.clone())
    return seen


@pytest.mark.parametrize("name", EVERY_NETWORK)
def test_auto(name: str) -> None:
    build, shape = EVERY_NETWORK[name]
    assert choose_layers(build(), "auto", torch.randn(5, *shape)) == ["input", *EXPECTED_AUTO[name]]


def test_auto_on_resnet18_is_the_papers_choice() -> None:
    network = torchvision.models.resnet18(num_classes=10)
    layers = choose_layers(network, "auto", torch.randn(2, 3, 32, 32))
    assert layers == ["input", "layer1", "layer2", "layer3", "layer4"]


def test_auto_looks_inside_a_backbone_below_a_head() -> None:
    backbone = torchvision.models.resnet18()
    backbone.fc = nn.Identity()
    network = nn.Sequential(backbone, nn.Linear(512, 3))
    layers = choose_layers(network, "auto", torch.randn(2, 3, 32, 32))
    assert layers == ["input", "0.layer1", "0.layer2", "0.layer3", "0.layer4"]


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sigmoid()


def test_auto_takes_a_users_own_activation() -> None:
    network = nn.Sequential(nn.Linear(4, 5), Swish(), nn.Dropout(), nn.Linear(5, 3))
    assert choose_layers(network, "auto", torch.randn(2, 4)) == ["input", "1"]


def test_auto_of_a_linear_model_is_the_input_alone() -> None:
    assert choose_layers(nn.Linear(4, 3), "auto", torch.randn(2, 4)) == ["input"]
    flat = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Softmax(-1))
    assert choose_layers(flat, "auto", torch.randn(2, 4)) == ["input"]


def test_names_globs_and_functions() -> None:
    network, x = LeNet(), torch.randn(2, 1, 8, 8)
    assert choose_layers(network, "input", x) == ["input"]
    assert choose_layers(network, [], x) == ["input"]
    # Always in the order of computation, the input first.
    assert choose_layers(network, ["classifier.1", "input", "features.0"], x) == [
        "input",
        "features.0",
        "classifier.1",
    ]
    assert choose_layers(network, "features.[37]", x) == ["input", "features.3", "features.7"]
    assert choose_layers(network, lambda name, module: isinstance(module, nn.Linear), x) == [
        "input",
        "classifier.1",
        "classifier.4",
    ]
    assert choose_layers(network, ["features"], x) == ["input", "features"]


def test_reused_and_shared_modules_are_numbered() -> None:
    x = torch.randn(2, 4)
    assert choose_layers(Reused(), "relu", x) == ["input", "relu#0", "relu#1"]
    assert choose_layers(Reused(), ["relu#1"], x) == ["input", "relu#1"]
    # The second name of a shared module finds it too.
    assert choose_layers(Shared(), ["again"], x) == ["input", "first#0", "first#1"]


@pytest.mark.parametrize("name", EVERY_NETWORK)
def test_capture_hands_over_what_the_layers_computed(name: str) -> None:
    """Against a second, independent way: cutting the network by hand or hooking it plainly."""
    build, shape = EVERY_NETWORK[name]
    network, x = build().eval(), torch.randn(5, *shape)
    layers = choose_layers(network, "auto", x)
    seen = read(network, layers, x)
    by_hand: dict[str, list[Tensor]] = {}
    handles = []
    for module_name, module in network.named_modules():

        def keep(m: nn.Module, a: object, out: object, name: str = module_name) -> None:
            tensor = out[0] if isinstance(out, tuple) else out
            by_hand.setdefault(name, []).append(tensor.detach().clone())

        handles.append(module.register_forward_hook(keep))
    network(x.clone())
    for handle in handles:
        handle.remove()
    assert list(seen) == layers[1:]
    for layer, h in seen.items():
        module_name, _, number = layer.removeprefix("./").partition("#")
        torch.testing.assert_close(h, by_hand[module_name][int(number or 0)])


def test_in_place_activation_does_not_reach_the_layer_before_it() -> None:
    network, x = Reused(), torch.randn(5, 4)
    seen = read(network, ["input", "first"], x)
    torch.testing.assert_close(seen["first"], network.first(x).detach())
    assert (seen["first"] < 0).any()


def test_only_the_first_pass_is_read() -> None:
    network, x = mlp(), torch.randn(5, 4)
    seen: list[Tensor] = []
    with torch.no_grad(), capture(network, ["input", "1"], lambda i, h: seen.append(h)):
        network(x)
        network(2 * x)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], network[:2](x).detach())


def hooks(network: nn.Module) -> list[int]:
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in network.modules()]


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if x.abs().max() > 100:
            raise ArithmeticError("too large")
        return self.second(h)


def test_hooks_are_always_removed_and_the_users_own_stay() -> None:
    network = Fragile()
    calls: list[int] = []
    network.first.register_forward_hook(lambda *_: calls.append(1))
    before = hooks(network)
    x = torch.randn(8, 4)
    model = RGPR(network).fit([x])
    model(x)
    assert hooks(network) == before
    network.train()
    with pytest.raises(ArithmeticError):
        model(1000 * x)
    with pytest.raises(ArithmeticError):
        RGPR(network).fit([1000 * x])
    assert hooks(network) == before
    assert all(module.training for module in network.modules())
    assert calls


class Detour(nn.Module):
    """A path that depends on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.extra(h) if x.sum() > 0 else h)


def test_a_layer_that_does_not_run_is_reported() -> None:
    x = torch.rand(4, 4)
    model = RGPR(Detour(), layers=["extra"]).fit([x])
    with pytest.raises(RuntimeError, match=r"\['extra'\] did not run"):
        model(-x)


def test_unknown_layers_are_refused_with_a_hint() -> None:
    network = LeNet()
    with pytest.raises(ValueError, match=r"did you mean 'features\.2'"):
        RGPR(network, layers=["featurs.2"])
    with pytest.raises(ValueError, match=r"Candidates: features, features\.0"):
        RGPR(network, layers="conv*")
    with pytest.raises(TypeError, match="layers holds 3"):
        RGPR(network, layers=[3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="layers=None; expected 'auto'"):
        RGPR(network, layers=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chose none"):
        RGPR(network, layers=lambda name, module: False).fit([torch.randn(4, 1, 8, 8)])
    check_layers(network, "auto")

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 3), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    with pytest.raises(ValueError, match="no layer 'unused' runs"):
        RGPR(Unused(), layers=["unused"]).fit([torch.randn(4, 4)])
    with pytest.raises(ValueError, match="no layer 'relu#2' runs"):
        RGPR(Reused(), layers=["relu#2"]).fit([torch.randn(4, 4)])


class Odd(nn.Module):
    """Submodules whose outputs are no representations."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.turned, self.whole = _Table(), _Turned(), _Whole()
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.turned(x)
        self.whole(x)
        return self.last(self.table(x)["h"])


class _Table(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"h": x.relu()}


class _Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.T


class _Whole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.long()


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ("table", "returned dict, not a tensor"),
        ("turned", r"shape \(4, 2\) for a batch of 2"),
        ("whole", "torch.int64, not real numbers"),
    ],
)
def test_outputs_that_are_no_representation_are_refused(layer: str, message: str) -> None:
    x = torch.randn(6, 4)
    with pytest.raises(ValueError, match=f"layer '{layer}' cannot be a representation.*{message}"):
        RGPR(Odd(), layers=[layer]).fit([x])
    assert RGPR(Odd()).fit([x]).layers == ["input"]


def test_modes_come_back_one_by_one() -> None:
    network = LeNet()
    network.train()
    network.features[1].eval()  # somebody froze this one
    before = [m.training for m in network.modules()]
    statistics = network.features[5].running_mean.clone()
    x = torch.randn(8, 1, 8, 8)
    model = RGPR(network).fit([x])
    assert [m.training for m in network.modules()] == before
    model(x)
    assert [m.training for m in network.modules()] == before
    assert torch.equal(network.features[5].running_mean, statistics)
    # Dropout is off: two calls agree, and with the network in evaluation mode too.
    probabilities = model(x)
    network.eval()
    assert torch.equal(model(x), probabilities)


@pytest.mark.parametrize("training", [False, True])
def test_threads_do_not_disturb_each_other(training: bool) -> None:
    network = LeNet().train(training)
    train = torch.randn(64, 1, 8, 8)
    model = RGPR(network).fit([train])
    batches = [torch.randn(16, 1, 8, 8) * (i + 1) for i in range(8)]
    alone = [(model(x), model.variance(x)) for x in batches]
    together: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def work(i: int) -> None:
        together[i] = [(model(batches[i]), model.variance(batches[i])) for _ in range(10)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (probabilities, variance) in enumerate(alone):
        for p, v in together[i]:
            torch.testing.assert_close(p, probabilities)
            torch.testing.assert_close(v, variance)
    assert all(m.training == training for m in network.modules())
    assert not any(hooks(network))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("build", [Reused, Functional])
def test_the_model_compiles(backend: str, build: type[nn.Module]) -> None:
    torch._dynamo.reset()
    x = torch.randn(32, 4)
    model = RGPR(build()).fit([x]).eval()
    with torch.no_grad():
        expected = model(3 * x)
        compiled = torch.compile(model, backend=backend)
        torch.testing.assert_close(compiled(3 * x), expected)
        torch.testing.assert_close(compiled(x), model(x))


def test_the_model_exports_with_a_dynamic_batch() -> None:
    x = torch.randn(32, 4)
    model = RGPR(Reused()).fit([x])
    with pytest.raises(RuntimeError, match=r"call \.eval\(\)"):
        torch.export.export(model.train(), (x,), strict=False)
    model.eval()
    batch = ({0: torch.export.Dim("batch")},)
    with torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=batch, strict=False)
        torch.testing.assert_close(program.module()(3 * x[:5]), model(3 * x[:5]))


def test_a_compiled_network_is_unwrapped() -> None:
    network, x = Reused(), torch.randn(32, 4)
    model = RGPR(torch.compile(network, backend="eager")).fit([x])
    assert model.posterior.network is network
    torch.testing.assert_close(model(x), RGPR(network).fit([x])(x))


def test_networks_with_compiled_parts_are_refused() -> None:
    part = nn.Sequential(torch.compile(mlp(), backend="eager"), nn.Linear(3, 3))
    with pytest.raises(TypeError, match="the part '0' of the network is compiled"):
        RGPR(part)
    in_place = mlp()
    in_place.compile(backend="eager")
    with pytest.raises(TypeError, match=r"the network is compiled.*copy\.deepcopy"):
        RGPR(in_place)
    RGPR(copy.deepcopy(in_place)).fit([torch.randn(5, 4)])


def test_networks_that_share_parts_do_not_disturb_each_other() -> None:
    body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU())
    networks = [nn.Sequential(body, nn.Linear(8, 3)).train() for _ in range(2)]
    x = torch.randn(32, 4)
    models = [RGPR(network).fit([x]) for network in networks]
    alone = [model(x) for model in models]
    statistics = body[1].running_mean.clone()
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(50):
            if not torch.allclose(models[i](x), alone[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert torch.equal(body[1].running_mean, statistics)
    assert all(module.training for network in networks for module in network.modules())


def test_a_module_called_input_is_not_the_input() -> None:
    build, shape = EVERY_NETWORK["named input"]
    network, x = build(), torch.randn(6, *shape)
    assert choose_layers(network, "input", x) == ["input"]
    assert choose_layers(network, ["./input"], x) == ["input", "./input"]
    seen = read(network, ["input", "./input"], x)
    torch.testing.assert_close(seen["./input"], network.input(x).detach())


def test_names_with_characters_of_globs() -> None:
    network = nn.Sequential(OrderedDict({"l[0]": nn.Linear(4, 5), "l0": nn.Linear(5, 3)}))
    x = torch.randn(6, 4)
    assert choose_layers(network, ["l[0]"], x) == ["input", "l[0]"]
    assert choose_layers(network, ["l[0-9]"], x) == ["input", "l0"]
    check_layers(network, ["l[0]"])


class TimeFirst(nn.Module):
    """An LSTM with the time first: only a batch as long as the sequence looks right."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x.transpose(0, 1))[0][-1])


def test_a_batch_that_is_not_first_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"layer 'lstm' gives shape \(2, 6, 6\) for a batch of 6"):
        RGPR(TimeFirst(), layers=["lstm"]).fit([torch.randn(6, 2, 4)])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_modules_that_cannot_be_hooked_are_refused() -> None:
    with pytest.raises(TypeError, match="TorchScript"):
        RGPR(torch.jit.trace(mlp(), torch.randn(2, 4)))
    with pytest.raises(TypeError, match=r"DataParallel.*network\.module"):
        RGPR(nn.DataParallel(mlp()))
    with pytest.raises(TypeError, match="not str"):
        plain_module("network")  # type: ignore[arg-type]


def test_watching_before_and_after() -> None:
    network, x, events = Wrapper(mlp()), torch.randn(2, 4), []
    inner = network.inner
    with watching(
        network,
        {inner: lambda m, a, o: events.append(("after", o.shape))},
        {inner: lambda m, a: events.append(("before", a[0].shape))},
    ):
        network(x)
        network(x)  # a second pass inside the block goes unseen, and so does one after it
    network(x)
    assert events == [("before", (2, 4)), ("after", (2, 3))]
