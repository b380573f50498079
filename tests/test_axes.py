"""Channels are found where the modules put them, whatever the number of dimensions."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import rgpr
from rgpr import RGPR
from rgpr._network.layers import choose_layers
from rgpr._network.representation import Representation
from rgpr._network.running import capture
from rgpr.baselines.detectors import Mahalanobis


class ChannelsFirstNorm(nn.LayerNorm):
    """A layer normalisation over the second axis, as image networks have it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Lambda(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def turn(*axes: int) -> Lambda:
    return Lambda(lambda x: x.permute(*axes))


class Residual(nn.Module):
    """A sum, which no module makes."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class LastOf(nn.Module):
    """A recurrent or attentive layer whose tuple is opened, with the time first if wanted."""

    def __init__(self, layer: nn.Module, *, time_first: bool = False) -> None:
        super().__init__()
        self.layer, self.time_first = layer, time_first

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.time_first else x
        h = (
            self.layer(x, x, x)[0]
            if isinstance(self.layer, nn.MultiheadAttention)
            else self.layer(x)
        )
        h = h[0] if isinstance(h, tuple) else h
        return h.transpose(0, 1) if self.time_first else h


def ending(width: int) -> list[nn.Module]:
    return [nn.Linear(width, 3)]


# A layer, the shape of an input, which layer is looked at, and (batch, channels, width) of it.
CASES: dict[str, tuple[Any, tuple[int, ...], str, tuple[int, int]]] = {
    "Conv1d": (lambda: [nn.Conv1d(2, 5, 3)], (2, 9), "0", (0, 5)),
    "Conv1d, BatchNorm1d, ReLU": (
        lambda: [nn.Conv1d(2, 5, 3), nn.BatchNorm1d(5), nn.ReLU()],
        (2, 9),
        "2",
        (0, 5),
    ),
    "AdaptiveAvgPool1d": (
        lambda: [nn.Conv1d(2, 5, 3), nn.AdaptiveAvgPool1d(1)],
        (2, 9),
        "1",
        (0, 5),
    ),
    "Conv2d as long as wide": (lambda: [nn.Conv2d(2, 6, 3, padding=1)], (2, 6, 6), "0", (0, 6)),
    "Conv3d": (lambda: [nn.Conv3d(1, 4, 3)], (1, 5, 5, 5), "0", (0, 4)),
    "GroupNorm of a sequence": (
        lambda: [nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4)],
        (2, 9),
        "1",
        (0, 4),
    ),
    "Linear on a sequence": (lambda: [nn.Linear(4, 5)], (7, 4), "0", (0, 5)),
    "LayerNorm, channels last image": (
        lambda: [nn.Conv2d(2, 6, 1), turn(0, 2, 3, 1), nn.LayerNorm(6), nn.GELU()],
        (2, 4, 4),
        "3",
        (0, 6),
    ),
    "LayerNorm over the second axis": (
        lambda: [nn.Conv2d(2, 6, 1), ChannelsFirstNorm(6)],
        (2, 4, 4),
        "1",
        (0, 6),
    ),
    "the same, as long as wide, by who reads it": (
        lambda: [turn(0, 1, 2, 3), ChannelsFirstNorm(4), nn.Conv2d(4, 5, 1)],
        (4, 4, 4),
        "1",
        (0, 4),
    ),
    "a sum after convolutions": (
        lambda: [nn.Conv1d(2, 5, 3, padding=1), Residual(nn.Conv1d(5, 5, 3, padding=1))],
        (2, 9),
        "1",
        (0, 5),
    ),
    "a sum after linear layers, images with channels last": (
        lambda: [nn.Linear(2, 8), Residual(nn.Linear(8, 8))],
        (4, 4, 2),
        "1",
        (0, 8),
    ),
    "axes turned inside a block, images with channels last": (
        lambda: [nn.Sequential(nn.Sequential(nn.Conv2d(2, 6, 1)), turn(0, 2, 3, 1)), nn.Identity()],
        (2, 4, 4),
        "0",
        (0, 6),
    ),
    "a function's output, by who reads it": (
        lambda: [Lambda(lambda x: x.sin()), nn.Conv1d(4, 5, 3)],
        (4, 9),
        "0",
        (0, 4),
    ),
    "LSTM": (lambda: [LastOf(nn.LSTM(4, 6, batch_first=True))], (7, 4), "0.layer", (0, 6)),
    "LSTM, time first": (
        lambda: [LastOf(nn.LSTM(4, 6), time_first=True)],
        (7, 4),
        "0.layer",
        (1, 6),
    ),
    "GRU in both directions, time first": (
        lambda: [LastOf(nn.GRU(4, 3, bidirectional=True), time_first=True)],
        (7, 4),
        "0.layer",
        (1, 6),
    ),
    "attention, time first": (
        lambda: [LastOf(nn.MultiheadAttention(4, 2), time_first=True)],
        (7, 4),
        "0.layer",
        (1, 4),
    ),
    "transformer": (
        lambda: [nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)],
        (7, 4),
        "0",
        (0, 4),
    ),
    "transformer, time first": (
        lambda: [LastOf(nn.TransformerEncoderLayer(4, 2, 8), time_first=True)],
        (7, 4),
        "0.layer",
        (1, 4),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [2, 5, 13, 30])
def test_channels_are_on_the_axis_of_the_module(name: str, rows: int) -> None:
    """Against the mean over positions of what the module made, taken by a plain hook."""
    build, shape, layer, (batch, width) = CASES[name]
    body = build()
    network = nn.Sequential(*body, Lambda(lambda h: h.flatten(1)), nn.LazyLinear(3)).eval()
    x = torch.randn(rows, *shape)
    network(x)
    representation = choose_layers(network, {layer: None}, x)[1]
    assert representation.batch == batch
    seen: list[Tensor] = []
    handle = network.get_submodule(layer).register_forward_hook(
        lambda _, __, made: seen.append(made[0] if isinstance(made, tuple) else made)
    )
    both = [Representation("input"), representation]
    with torch.no_grad(), capture(network, both, [len, torch.clone], x) as found:
        network(x)
    handle.remove()
    assert found[1].shape[:2] == (rows, width)
    made = seen[0].movedim(batch, 0)
    [channel] = [
        axis
        for axis in range(1, made.dim())
        if made.shape[axis] == width and torch.equal(made.movedim(axis, 1), found[1])
    ] or [None]
    assert channel is not None
    first = any(word in name for word in ("Conv", "Pool", "Group", "second", "convolutions", "who"))
    assert channel == (1 if first else made.dim() - 1)


def test_the_residual_keeps_channels_of_a_pooled_sequence() -> None:
    """One number a channel, not one in all."""
    network = nn.Sequential(
        nn.Conv1d(2, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 3)
    )
    model = RGPR(network).fit([torch.randn(60, 2, 12)], progress=False)
    assert model.residual is not None
    assert len(model.residual.at(1).origin) == 32  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["Conv1d", "LayerNorm, channels last image", "LSTM, time first"])
def test_the_detectors_have_the_same_rule(name: str) -> None:
    build, shape, layer, (_, width) = CASES[name]
    network = nn.Sequential(*build(), Lambda(lambda h: h.flatten(1)), nn.LazyLinear(2)).eval()
    x, y = torch.randn(40, *shape), torch.arange(40) % 2
    network(x)
    detector = Mahalanobis(network, [layer]).fit([(x, y)], progress=False)
    assert detector.means[0].shape == (2, width)
    assert detector.layers == [layer]


def test_a_user_says_the_axis(tmp_path: Path) -> None:
    network = nn.Sequential(
        nn.Conv1d(2, 5, 3), nn.ReLU(), Lambda(lambda h: h.flatten(1)), nn.Linear(35, 3)
    )
    x = torch.randn(40, 2, 9)
    model = RGPR(network, layers={"1": -1, "0": None}).fit([x], progress=False)
    widths = [len(model.residual.at(i).origin) for i in (1, 2)]  # type: ignore[union-attr,arg-type]
    assert model.layers == ["input", "0", "1"]
    assert widths == [5, 7]
    model.save(tmp_path / "m.safetensors")
    again = rgpr.load(tmp_path / "m.safetensors", network)
    assert torch.equal(again.variance(9 * x), model.variance(9 * x))
    with pytest.raises(ValueError, match=r"'1': 3.*shape \(13, 5, 7\).*batch is axis 0"):
        RGPR(network, layers={"1": 3}).fit([x], progress=False)
    with pytest.raises(ValueError, match="whose batch is axis 0"):
        RGPR(network, layers={"1": 0}).fit([x], progress=False)
    with pytest.raises(TypeError, match="'first', 'last' or 'mean'"):
        RGPR(network, layers={"1": "middle"})
    with pytest.raises(ValueError, match=r"'3' is to be read at its first position.*no sequence"):
        RGPR(network, layers={"3": "first"}).fit([x], progress=False)


class Tokens(nn.Module):
    """Blocks on a sequence, and a head that reads one position of it, or the mean."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Residual(nn.LayerNorm(6), nn.Linear(6, 6)) for _ in range(3))
        self.norm, self.head, self.read = nn.LayerNorm(6), nn.Linear(6, 3), read

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.read(self.norm(h)))


READS = {
    "first": (lambda h: h[:, 0], 0),
    "last": (lambda h: h[:, -1], -1),
    "mean": (lambda h: h.mean(1), None),
}


@pytest.mark.parametrize("name", READS)
def test_positions_of_sequences(name: str) -> None:
    """The head's input is what the head reads; blocks are means unless the user says otherwise."""
    read, token = READS[name]
    network, x = Tokens(read).eval(), torch.randn(20, 7, 4)
    assert [each.name for each in choose_layers(network, "auto", x)][-1] == "head:input"
    forced = choose_layers(network, {"blocks.*": name, "head:input": None}, x)
    assert [each.name for each in forced[1:]] == ["blocks.0", "blocks.1", "blocks.2", "head:input"]
    assert {each.token for each in forced[1:-1]} == {token}
    takes = [lambda h: h.flatten(2).mean(2) if h.dim() > 2 else h.clone()] * 5
    with torch.no_grad(), capture(network, forced, takes, x) as found:
        network(x)
    # What the head reads is this position of the last block, after the normalisation.
    rows = found[3] if name != "mean" else None
    if rows is not None:
        torch.testing.assert_close(network.norm(rows).detach(), found[4])


@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(0, 1),
    channel=st.integers(-1, 2),
    sizes=st.tuples(*[st.integers(1, 4)] * 3),
)
def test_arranging_is_a_permutation(batch: int, channel: int, sizes: tuple[int, ...]) -> None:
    h = torch.randn(sizes)
    channel = channel or 1
    arranged = Representation("h", batch, channel).arrange(h)
    first = h.movedim(batch, 0)
    assert arranged.shape[:2] == (first.shape[0], first.shape[channel])
    torch.testing.assert_close(arranged.sum(2), first.sum(3 - channel % 3))


# -- automatic layers ----------------------------------------------------------------------------


class Deep(nn.Module):
    """A trunk inside a wrapper inside a wrapper, whose modules return dicts."""

    class Trunk(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.embedder = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU())
            self.stages = nn.ModuleList(
                Residual(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(depth)
            )

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.embedder(x)
            for stage in self.stages:
                h = stage(h)
            return {"last_hidden_state": h, "pooled": h.mean((2, 3))}

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.trunk, self.classifier = self.Trunk(depth), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.trunk(x)["pooled"])


@pytest.mark.parametrize("depth", [1, 2, 4, 9, 10, 11, 12, 30])
def test_auto_reads_three_to_twelve_over_the_depth(depth: int) -> None:
    network, x = Deep(depth), torch.randn(4, 1, 6, 6)
    names = [each.name for each in choose_layers(network, "auto", x)]
    assert 3 <= len(names) <= 12
    assert (names[0], names[-1]) == ("input", "classifier:input")
    stages = [int(name.rpartition(".")[2]) for name in names if ".stages." in name]
    # No gap is longer than an even spread makes necessary.
    gaps = [b - a for a, b in zip([-1, *stages], [*stages, depth - 1], strict=True)]
    assert max(gaps) <= -(-depth // 10) + 1


def test_globs_do_not_cross_dots() -> None:
    network, x = Deep(2), torch.randn(4, 1, 6, 6)
    names = [each.name for each in choose_layers(network, "trunk.stages.*", x)]
    assert names == ["input", "trunk.stages.0", "trunk.stages.1"]
    every = [each.name for each in choose_layers(network, "trunk.stages.**", x)]
    assert "trunk.stages.0.layers.0" in every
    assert set(names) < set(every)
    with pytest.raises(ValueError, match=r"A \* does not cross dots, and \*\* does"):
        RGPR(network, layers="*.0.layers.?")


class Windows(nn.Module):
    """A network whose hidden tensors mix rows and positions: nothing in it can be read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(x.reshape(-1, 2)))
        return self.last(h).reshape(len(x), -1, 3).mean(1)


def test_the_input_alone_is_said_with_candidates() -> None:
    x = torch.randn(20, 6)
    with pytest.warns(UserWarning, match=r"the input alone \('first': its output has shape"):
        assert RGPR(Windows()).fit([x], progress=False).layers == ["input"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert RGPR(nn.Linear(6, 3)).fit([x], progress=False).layers == ["input"]
        assert RGPR(Windows(), layers="input").fit([x], progress=False).layers == ["input"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantised_layers_are_read() -> None:
    from torch.ao import quantization

    network = nn.Sequential(
        quantization.QuantStub(),
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.ReLU(),
        nn.Linear(8, 3),
        quantization.DeQuantStub(),
    ).eval()
    network.qconfig = quantization.get_default_qconfig("fbgemm")  # type: ignore[assignment]
    x = torch.randn(60, 1, 6, 6)
    quantization.prepare(network, inplace=True)(x)
    quantization.convert(network, inplace=True)
    model = RGPR(network).fit([x], progress=False)
    assert model.layers == ["input", "2", "5"]
    assert bool((model.variance(100 * x) > 0).all())


# -- the table -----------------------------------------------------------------------------------


def test_the_table_says_what_is_read_and_why() -> None:
    network, x = Tokens(lambda h: h[:, 0]), torch.randn(5, 7, 4)
    before = [module.training for module in network.modules()]
    table = rgpr.layers(network, x)
    model = RGPR(network).fit([torch.randn(40, 7, 4)], progress=False)
    assert table.taken == model.layers
    rows = {row.name: row for row in table.rows}
    assert rows["input"].axis == 2
    assert rows["blocks.0"].shape == ("B", 7, 6)
    assert (rows["blocks.0"].axis, rows["blocks.0"].width) == (2, 6)
    assert rows["blocks.0"].why == "read"
    assert rows["blocks.0.layers.1"].why == "inside 'blocks.0'"
    assert rows["head"].why == "makes the outputs"
    text = str(table)
    assert all(name in text for name in rows)
    assert f"* read: {len(table.taken)} of {len(table.rows)}" in text
    assert [module.training for module in network.modules()] == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())
    by_hand = rgpr.layers(network, x, {"blocks.1": 1, "blocks.2": "first"})
    taken = [row for row in by_hand.rows if row.taken]
    assert (taken[1].name, taken[1].axis) == ("blocks.1", 1)
    assert taken[2].why == "read, its first position"


def test_the_table_counts_axes_of_the_tensor_as_it_is() -> None:
    network = nn.Sequential(
        LastOf(nn.LSTM(4, 6), time_first=True), Lambda(lambda h: h[:, -1]), nn.Linear(6, 3)
    )
    rows = {row.name: row for row in rgpr.layers(network, torch.randn(5, 7, 4), "0.layer").rows}
    assert (rows["0.layer"].shape, rows["0.layer"].axis) == ((7, "B", 6), 2)
