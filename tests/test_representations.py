from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import rgpr
from networks import EVERY_NETWORK, Functional, LeNet, Reused, Shared, Wrapper, mlp
from rgpr import RGPR
from rgpr._network.guards import evaluating
from rgpr._network.layers import check_layers, choose_layers
from rgpr._network.representation import Representation, names_of
from rgpr._network.running import capture, plain_module, watching
from rgpr._network.trace import linear_head, trace


def torchvision_resnet18(classes: int = 10) -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=classes)


EXPECTED_AUTO = {
    "mlp": ["1", "3"],
    "convolutional": ["2", "5", "7:input"],
    "lenet": ["features.3", "features.7", "classifier.2"],
    "functional": ["first", "last:input"],
    "reused": ["relu#0", "relu#1"],
    "recurrent": ["embed", "last:input"],
    "shared": ["first#0", "last:input"],
    "wrapper": ["inner.inner.1", "inner.inner.3"],
    "parametrised": ["1", "3"],
    "named input": ["./input", "last:input"],
    "in place": ["2"],
}


clone = torch.clone


def chosen(network: nn.Module, choice: Any, x: Tensor) -> list[str]:
    return names_of(choose_layers(network, choice, x))


def read(network: nn.Module, layers: list[str], x: Tensor) -> dict[str, Tensor]:
    """What `capture` hands over, cloned."""
    plain = [Representation(layer) for layer in layers]
    reading = capture(network, plain, [torch.clone] * len(layers), x)
    with torch.no_grad(), evaluating(network) as modes, modes, reading, reading:
        network(x.clone())
    return dict(zip(layers[1:], reading.found[1:], strict=True))


@pytest.mark.parametrize("name", EVERY_NETWORK)
def test_auto(name: str) -> None:
    build, shape = EVERY_NETWORK[name]
    assert chosen(build(), "auto", torch.randn(5, *shape)) == [
        "input",
        *EXPECTED_AUTO[name],
    ]


def test_auto_on_resnet18_is_the_papers_choice() -> None:
    """With the pooled output of the last stage, which is what goes into the head."""
    network = torchvision_resnet18()
    layers = chosen(network, "auto", torch.randn(2, 3, 64, 64))
    assert layers == ["input", "layer1", "layer2", "layer3", "fc:input"]
    # Of images this small the last stage leaves one position: pooling changes no number, but the
    # certificate needs the very memory that goes into the head.
    layers = chosen(network, "auto", torch.randn(2, 3, 32, 32))
    assert layers == ["input", "layer1", "layer2", "layer3", "fc:input"]


def test_auto_looks_inside_a_backbone_below_a_head() -> None:
    backbone = torchvision_resnet18()
    backbone.fc = nn.Identity()
    network = nn.Sequential(backbone, nn.Linear(512, 3))
    layers = chosen(network, "auto", torch.randn(2, 3, 64, 64))
    assert layers == ["input", "0.layer1", "0.layer2", "0.layer3", "1:input"]


class Blocks(nn.Module):
    """Residual blocks with functions between modules, pooling as a function, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.block1, self.block2 = Block(4), Block(4)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.block2(self.block1(F.relu(self.stem(x))))
        return self.fc(F.adaptive_avg_pool2d(h, 1).flatten(1))


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(F.relu(self.first(x))))


def vision_transformer() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=8,
        patch_size=4,
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        mlp_dim=16,
        num_classes=3,
    )


class Answers(nn.Module):
    """Puts the logits into something else: a dict, or an object."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.first, self.head, self.wrap = nn.Linear(4, 8), nn.Linear(8, 3), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(logits=self.head(F.relu(self.first(x))))


class Tied(nn.Module):
    """The head's weights are used before, too."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.fc(x)))


class Apart(nn.Module):
    """A head whose features are no module's output: some of each of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.left(x)[:, :5], self.right(x)[:, :4].tanh()], 1)
        return self.head(h)


HEADS: dict[str, tuple[Any, tuple[int, ...], str, list[str]]] = {
    "functional": (Functional, (4,), "last", ["first", "last:input"]),
    "blocks": (Blocks, (2, 6, 6), "fc", ["block1", "fc:input"]),
    "resnet": (
        lambda: torchvision_resnet18(3),
        (3, 64, 64),
        "fc",
        ["layer1", "layer2", "layer3", "fc:input"],
    ),
    "class token": (
        vision_transformer,
        (3, 8, 8),
        "heads.head",
        ["encoder.layers.encoder_layer_0", "heads.head:input"],
    ),
    "dict": (lambda: Answers(dict), (4,), "head", ["head:input"]),
    "object": (lambda: Answers(SimpleNamespace), (4,), "head", ["head:input"]),
    "tied": (Tied, (4,), "fc", ["fc#1:input"]),
    "another width": (Apart, (4,), "head", ["left", "right", "head:input"]),
    "one output": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Hardtanh(), nn.Linear(6, 1), nn.Flatten(0)),
        (4,),
        "2",
        ["1"],
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_auto_reads_what_goes_into_the_head(name: str) -> None:
    """So its weights and the last representation alone give the outputs."""
    build, shape, head, expected = HEADS[name]
    network, x = build().eval(), torch.randn(5, *shape)
    assert linear_head(network, x) == head
    layers = chosen(network, "auto", x)
    assert layers == ["input", *expected]
    last = read(network, layers, x)[layers[-1]]
    with torch.no_grad():
        output = network(x)
        made = network.get_submodule(head)(last)
    if not isinstance(output, Tensor):
        output = output["logits"] if isinstance(output, dict) else output.logits
    assert torch.equal(made.reshape(output.shape), output)


class Cosine(nn.Linear):
    """Called linear, and is not."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(x), F.normalize(self.weight), self.bias)


class Ends(nn.Module):
    """A network that does something to what its last linear layer made."""

    def __init__(self, end: Any) -> None:
        super().__init__()
        self.first, self.fc, self.end = nn.Linear(4, 6), nn.Linear(6, 3), end

    def forward(self, x: Tensor) -> Any:
        return self.end(self.fc(F.relu(self.first(x))))


ENDS = {
    "a softmax": lambda: Ends(lambda z: z.softmax(-1)),
    "a temperature": lambda: Ends(lambda z: z / 2),
    "something in place": lambda: Ends(lambda z: z.mul_(2)),
    "something in place that changes nothing here": lambda: Ends(lambda z: z.clamp_(min=-1e9)),
    "an activation in place": lambda: nn.Sequential(*mlp(), nn.ReLU(inplace=True)),
    "some of the outputs": lambda: Ends(lambda z: z[:, :2]),
    "outputs turned around": lambda: Ends(lambda z: z.T),
    "something else": lambda: Ends(lambda z: {"probabilities": z}),
    "a sum of two heads": lambda: _TwoHeads(),
    "cosines": lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), Cosine(6, 3)),
    "a bilinear layer": lambda: _Products(),
}


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        return self.one(h) + self.other(h)


class _Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Bilinear(6, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        return self.last(h, h)


@pytest.mark.parametrize("build", ENDS.values(), ids=ENDS)
def test_outputs_that_are_not_those_of_a_linear_layer_have_no_head(build: Any) -> None:
    network, x = build(), torch.randn(5, 4)
    assert linear_head(network, x) is None
    # What the last layer reads is read all the same: all that the network knows passes there.
    last = [call for call in trace(network, x).every if call.layers][-1]
    taken = read(network, names := chosen(network, "auto", x), x)[names[-1]]
    seen: list[Tensor] = []
    handle = last.module.register_forward_pre_hook(lambda _, given: seen.append(given[0].clone()))
    network(x)
    handle.remove()
    torch.testing.assert_close(taken, seen[-1])


def test_a_head_behind_a_layer_that_changes_the_input_in_place() -> None:
    """The input itself is read as it came, so what goes into the head is something else."""
    network, x = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3)), torch.randn(5, 4)
    before = x.clone()
    assert chosen(network, "auto", x) == ["input", "1:input"]
    assert torch.equal(x, before)
    torch.testing.assert_close(read(network, ["input", "1:input"], x)["1:input"], x.relu())


@pytest.mark.parametrize("size", [1, 8, 128])
def test_a_stage_of_any_size_is_not_read_twice(size: int) -> None:
    """Flattened it goes into the head: it is known by its entries, or by some of them."""
    network = nn.Sequential(
        nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * size**2, 3, bias=False)
    )
    x = torch.randn(2, 1, size, size)
    # The means over its positions are something else than all of them.
    expected = ["input", "3:input"] if size == 1 else ["input", "1", "3:input"]
    assert chosen(network, "auto", x) == expected


def test_inputs_of_layers_by_name(tmp_path: Path) -> None:
    x = torch.rand(40, 2, 6, 6)
    network = Blocks()
    wanted = ["block2:input", "fc:input", "block1.first"]
    model = RGPR(network, layers=wanted).fit([x])
    # In the order in which they are computed: a block's input before what its parts make.
    assert model.layers == ["input", "block1.first", "block2:input", "fc:input"]
    assert chosen(network, "block?:input", x) == [
        "input",
        "block1:input",
        "block2:input",
    ]
    assert chosen(network, ["block1", "block1:input", "block1.first"], x) == [
        "input",
        "block1:input",
        "block1.first",
        "block1",
    ]
    seen = read(network, model.layers, x)
    torch.testing.assert_close(seen["block2:input"], network.block1(network.stem(x).relu()))
    last = network.block2(seen["block2:input"]).mean((2, 3))
    torch.testing.assert_close(seen["fc:input"], last)
    model.save(tmp_path / "model.safetensors")
    again = rgpr.load(tmp_path / "model.safetensors", Blocks())
    assert again.layers == model.layers
    assert torch.equal(again.variance(30 * x), model.variance(30 * x))
    assert bool((model.variance(30 * x) > 0).all())
    other = RGPR(network, layers=again.layers).fit([x])
    assert torch.equal(other.variance(30 * x), model.variance(30 * x))


def test_an_automatic_choice_of_the_heads_input_is_saved(tmp_path: Path) -> None:
    x = torch.randn(40, 4)
    for number, build in enumerate((Functional, Tied)):
        model = RGPR(build()).fit([x])
        assert model.layers[-1].endswith(":input")
        model.save(tmp_path / f"{number}.safetensors")
        again = rgpr.load(tmp_path / f"{number}.safetensors", build())
        assert again.layers == model.layers
        assert bool((model.variance(9 * x) > 0).any())
        assert torch.equal(again(9 * x), model(9 * x))


def test_inputs_that_are_no_representation_are_refused() -> None:
    x = torch.randn(6, 4)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
            self.table, self.turned = nn.Embedding(9, 4), nn.Linear(2, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x) + self.table(x[:, 0].long().clamp(0, 8))
            self.turned(h.new_zeros(5, 2))
            return self.last(input=h)

    network = Named()
    for layer, message in {
        "table": "torch.int64, not real numbers",
        "turned": r"its input has shape \(5, 2\) for a batch of 6",
    }.items():
        with pytest.raises(ValueError, match=f"'{layer}:input' cannot be a repr.*{message}"):
            chosen(network, [f"{layer}:input"], x)
    # The head gets its input by keyword, and it is read all the same.
    assert chosen(network, "auto", x)[-1] == "last:input"
    model = RGPR(network).fit([x], progress=False)
    assert "last:input" in model.layers
    assert model.score(x).isfinite().all()
    with pytest.raises(ValueError, match="no layer 'lost:input' runs"):
        chosen(network, ["lost:input"], x)
    with pytest.raises(ValueError, match="no layer 'lost:input' runs"):
        RGPR(network, layers=["lost:input"])


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sigmoid()


def test_auto_takes_a_users_own_activation() -> None:
    network = nn.Sequential(nn.Linear(4, 5), Swish(), nn.Dropout(), nn.Linear(5, 3))
    assert chosen(network, "auto", torch.randn(2, 4)) == ["input", "1"]


def test_a_norm_after_a_block_belongs_to_the_next_stage() -> None:
    """How large a block's output is says much about an input, and a norm takes it away."""
    stages = OrderedDict[str, nn.Module]()
    for number in range(3):
        stages[f"block{number}"] = Block(6)
        stages[f"norm{number}"] = nn.GroupNorm(1, 6)
        stages[f"smaller{number}"] = nn.Conv2d(6, 6, 1)
        stages[f"last_norm{number}"] = nn.GroupNorm(1, 6)
    last = OrderedDict(pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), head=nn.Linear(6, 3))
    found = chosen(nn.Sequential(stages | last), "auto", torch.randn(8, 6, 8, 8))
    assert found[1:] == [
        *("block0", "last_norm0", "block1", "last_norm1", "block2"),
        "head:input",
    ]
    curve = OrderedDict(one=Block(6), curve=nn.PReLU(), two=Block(6))
    found = chosen(nn.Sequential(curve | last), "auto", torch.randn(8, 6, 8, 8))
    assert found[1:] == ["curve", "head:input"]


def test_auto_of_a_linear_model_is_the_input_alone() -> None:
    assert chosen(nn.Linear(4, 3), "auto", torch.randn(2, 4)) == ["input"]
    flat = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Softmax(-1))
    assert chosen(flat, "auto", torch.randn(2, 4)) == ["input"]


def test_names_globs_and_functions() -> None:
    network, x = LeNet(), torch.randn(2, 1, 8, 8)
    assert chosen(network, "input", x) == ["input"]
    assert chosen(network, [], x) == ["input"]
    # Always in the order of computation, the input first.
    assert chosen(network, ["classifier.1", "input", "features.0"], x) == [
        "input",
        "features.0",
        "classifier.1",
    ]
    assert chosen(network, "features.[37]", x) == [
        "input",
        "features.3",
        "features.7",
    ]
    assert chosen(network, lambda name, module: isinstance(module, nn.Linear), x) == [
        "input",
        "classifier.1",
        "classifier.4",
    ]
    assert chosen(network, ["features"], x) == ["input", "features"]


def test_reused_and_shared_modules_are_numbered() -> None:
    x = torch.randn(2, 4)
    assert chosen(Reused(), "relu", x) == ["input", "relu#0", "relu#1"]
    assert chosen(Reused(), ["relu#1"], x) == ["input", "relu#1"]
    # The second name of a shared module finds it too.
    assert chosen(Shared(), ["again"], x) == ["input", "first#0", "first#1"]


@pytest.mark.parametrize("name", EVERY_NETWORK)
def test_capture_hands_over_what_the_layers_computed(name: str) -> None:
    """Against a second, independent way: cutting the network by hand or hooking it plainly."""
    build, shape = EVERY_NETWORK[name]
    network, x = build().eval(), torch.randn(5, *shape)
    layers = chosen(network, "auto", x)
    seen = read(network, layers, x)
    by_hand: dict[str, list[Tensor]] = {}
    handles = []
    for module_name, module in network.named_modules():

        def keep(m: nn.Module, a: Any, out: object, name: str = module_name) -> None:
            tensor = out[0] if isinstance(out, tuple) else out
            by_hand.setdefault(name, []).append(tensor.detach().clone())

        def keep_input(m: nn.Module, a: Any, name: str = module_name) -> None:
            if a:  # what makes the weights of a parametrised layer gets nothing
                by_hand.setdefault(f"{name}:input", []).append(a[0].detach().clone())

        handles.append(module.register_forward_hook(keep))
        handles.append(module.register_forward_pre_hook(keep_input))
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
    layers = [Representation("input"), Representation("1")]
    reading = capture(network, layers, [len, seen.append], x)
    with torch.no_grad(), reading, reading:
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
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"note": "no tensor", "h": x.relu()}


class _Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.T


class _Whole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.long()


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ("table", "returned str, not a tensor"),
        ("turned", r"shape \(4, 6\) for a batch of 6"),
        ("whole", "torch.int64, not real numbers"),
    ],
)
def test_outputs_that_are_no_representation_are_refused(layer: str, message: str) -> None:
    x = torch.randn(6, 4)
    with pytest.raises(ValueError, match=f"layer '{layer}' cannot be a representation.*{message}"):
        RGPR(Odd(), layers=[layer]).fit([x])
    assert RGPR(Odd()).fit([x]).layers == ["input", "last:input"]


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
    assert chosen(network, "input", x) == ["input"]
    assert chosen(network, ["./input"], x) == ["input", "./input"]
    seen = read(network, ["input", "./input"], x)
    torch.testing.assert_close(seen["./input"], network.input(x).detach())


def test_names_with_characters_of_globs() -> None:
    network = nn.Sequential(OrderedDict({"l[0]": nn.Linear(4, 5), "l0": nn.Linear(5, 3)}))
    x = torch.randn(6, 4)
    assert chosen(network, ["l[0]"], x) == ["input", "l[0]"]
    assert chosen(network, ["l[0-9]"], x) == ["input", "l0"]
    check_layers(network, ["l[0]"])


class TimeFirst(nn.Module):
    """An LSTM with the time first."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(x.transpose(0, 1))[0][-1])


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 13, 40])
@pytest.mark.parametrize("length", [2, 3, 6, 13])
def test_a_batch_that_is_not_first_is_found(rows: int, length: int) -> None:
    """Also where the sequence is as long as there are rows."""
    network, x = TimeFirst().eval(), torch.randn(rows, length, 4)
    [_, layer] = choose_layers(network, {"lstm": "mean"}, x)
    assert (layer.batch, layer.channel) == (1, -1)
    reading = capture(network, [Representation("input"), layer], [len, clone], x)
    with torch.no_grad(), reading, reading:
        network(x)
    expected = network.lstm(x.transpose(0, 1))[0].permute(1, 2, 0)
    torch.testing.assert_close(reading.found[1], expected.detach())


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
    hooks = watching(
        network,
        {inner: lambda m, a, o: events.append(("after", o.shape))},
        {inner: lambda m, a: events.append(("before", a[0].shape))},
    )
    with hooks, hooks:
        network(x)
        network(x)  # a second pass inside the block goes unseen, and so does one after it
    network(x)
    assert events == [("before", (2, 4)), ("after", (2, 3))]


@pytest.mark.parametrize("source", [None, "0"])
def test_a_table_of_layers_takes_one_run(source: str | None) -> None:
    runs = []
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    network.register_forward_pre_hook(lambda *_: runs.append(1))
    table = rgpr.layers(network, torch.randn(5, 4), input=source)
    assert "1" in {row.name for row in table.rows if row.taken}
    assert len(runs) == 1
