"""Channels are found where the modules put them, whatever the number of dimensions."""

from __future__ import annotations

import copy
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
    reading = capture(network, both, [len, torch.clone], x)
    with torch.no_grad(), reading, reading:
        network(x)
    handle.remove()
    found = reading.found
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
    reading = capture(network, forced, takes, x)
    with torch.no_grad(), reading, reading:
        network(x)
    found = reading.found
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


# -- what a first look cannot tell ---------------------------------------------------------------


class Folded(nn.Module):
    """Frames of a video become rows of a batch, and one vector each in the end."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.curve = nn.ReLU()
        self.second = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.head = nn.Linear(2 * channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.curve(self.first(x.flatten(0, 1)))
        h = self.second(h).relu().mean((2, 3))
        return self.head(h.unflatten(0, x.shape[:2]).mean(1))


@pytest.mark.parametrize(("channels", "rows"), [(8, 8), (13, 64), (4, 13), (6, 5)])
def test_channels_that_are_as_many_as_rows_are_no_batch(channels: int, rows: int) -> None:
    """Or else a row's score would depend on the others."""
    x = torch.randn(64, 5, 3, 6, 6)
    model = RGPR(Folded(channels)).fit(list(x.split(rows)), progress=False)
    assert model.layers == ["input", "head:input"]
    changed = x[:8].clone()
    changed[3] *= 50
    moved = (model.score(changed) - model.score(x[:8])).abs() > 1e-4
    assert moved.tolist() == [row == 3 for row in range(8)]
    with pytest.raises(ValueError, match=r"'curve' cannot be .* shape .* for a batch of"):
        RGPR(Folded(channels), layers=["curve"]).fit(list(x.split(rows)), progress=False)


class Pair(nn.Module):
    """A block that hands on two tensors, of which the first has its pixels in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 8)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        pixels = self.inner(pair[0]).relu()
        return pixels, self.outer(pixels.unflatten(0, (-1, 5)).mean(1)) + pair[1]


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        pair = (x.flatten(0, 1), x.new_zeros(len(x), 8))
        for block in self.blocks:
            pair = block(pair)
        return self.head(pair[1])


def test_blocks_that_cannot_be_read_are_opened() -> None:
    x = torch.randn(40, 5, 6)
    model = RGPR(Pairs()).fit([x], progress=False)
    assert model.layers == ["input", "blocks.0.outer", "blocks.1.outer", "head:input"]
    changed = x.clone()
    changed[3] *= 50
    moved = (model.score(changed) - model.score(x)).abs() > 1e-4
    assert moved.nonzero().flatten().tolist() == [3]


class Turned(nn.Module):
    """A convolution over the steps of a sequence whose channels are last."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("length", [12, 16, 20])
def test_a_sequence_as_long_as_it_is_wide(length: int) -> None:
    last = nn.Sequential(
        nn.Linear(6, 16), Residual(Turned(16)), Residual(Turned(16)), Lambda(lambda h: h[:, -1])
    )
    second = nn.Sequential(
        *(nn.Conv1d(6, 16, 1), Residual(nn.Conv1d(16, 16, 1)), Residual(nn.Conv1d(16, 16, 1))),
        Lambda(lambda h: h[:, :, -1]),
    )
    for network, axis, x in ((last, 2, (20, length, 6)), (second, 1, (20, 6, length))):
        network.append(nn.Linear(16, 3))
        rows = {row.name: row for row in rgpr.layers(network, torch.randn(x), ["1", "2"]).rows}
        assert (rows["1"].axis, rows["2"].axis) == (axis, axis)


def test_a_norm_over_positions_leaves_channels_where_they_are() -> None:
    network = nn.Sequential(
        nn.Conv1d(3, 8, 3),
        nn.LayerNorm(18),
        nn.ReLU(),
        nn.Conv1d(8, 8, 3),
        nn.Flatten(),
        *ending(128),
    )
    rows = {row.name: row for row in rgpr.layers(network, torch.randn(20, 3, 20)).rows}
    assert (rows["2"].axis, rows["2"].width) == (1, 8)


def test_a_position_of_a_sequence_with_its_channels_second() -> None:
    network = nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Flatten(), *ending(144))
    x = torch.randn(40, 3, 20)
    model = RGPR(network, layers={"1": "last"}).fit([x], progress=False)
    changed = x.clone()
    changed[:, :, :10] = 100 * torch.randn(40, 3, 10)
    ours, theirs = (model.explain(each).strangeness[:, 1] for each in (x, changed))
    assert torch.equal(ours, theirs)  # the last position is made of the last three steps
    rows = {row.name: row for row in rgpr.layers(network, x, {"1": "last"}).rows}
    assert (rows["1"].axis, rows["1"].width) == (1, 8)


class Padded(nn.Module):
    """Torch's own transformer, which nests sequences that have a mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.first, self.encoder = nn.Linear(4, 16), nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        h = self.encoder(self.first(x), src_key_padding_mask=src_key_padding_mask)
        return self.head(h[:, 0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_sequences_are_read_without_their_padding() -> None:
    x, lengths = torch.randn(60, 9, 4), torch.randint(2, 9, (60, 1))
    padding = torch.arange(9)[None] >= lengths
    batch: dict[str, Tensor] = {"x": x, "src_key_padding_mask": padding}
    model = RGPR(Padded(), layers=["first", "encoder.layers.*", "head:input"])
    model.fit([{**batch, "y": torch.arange(60) % 3}], progress=False)
    other = {**batch, "x": torch.where(padding[..., None], 100 * torch.randn(x.shape), x)}
    torch.testing.assert_close(model.score(other), model.score(batch), rtol=1e-4, atol=1e-4)
    cut = {name: part[:5, : int(lengths[:5].max())] for name, part in batch.items()}
    torch.testing.assert_close(model.score(cut), model.score(batch)[:5], rtol=1e-4, atol=1e-4)


# -- where the outputs are made ------------------------------------------------------------------


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.curve = nn.Linear(4, 16), nn.Linear(16, 16), nn.ReLU()
        self.head, self.decoder, self.other = nn.Linear(16, 3), nn.Linear(16, 40), nn.Linear(40, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.curve(self.second(self.curve(self.first(x))))
        return self.head(h), self.other(self.decoder(h).relu())


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def test_what_runs_behind_the_outputs_is_not_read() -> None:
    x = torch.randn(40, 4)
    model = RGPR(TwoOutputs(), output=0).fit([x], progress=False)
    assert model.layers == ["input", "curve#0", "curve#1"]
    assert rgpr.layers(TwoOutputs(), x, output=0).taken == model.layers
    scaled = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), Scale())
    assert RGPR(scaled).fit([x], progress=False).layers == ["input", "1"]


@pytest.mark.parametrize("choice", ["auto", {"1": "first"}, {"1": 2}, ["3:input"]])
def test_a_loaded_model_reads_the_same_when_it_is_fitted_again(choice: Any, tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))

    x, network = torch.randn(40, 3, 20), build()
    model = RGPR(network, layers=choice).fit([x], progress=False)
    model.save(tmp_path / "model.safetensors")
    loaded = rgpr.load(tmp_path / "model.safetensors", build())
    rebuilt = RGPR(copy.deepcopy(network))
    rebuilt.load_state_dict(model.state_dict())
    for again in (loaded, rebuilt):
        again.fit([x], progress=False)
        assert again._layers == model._layers
        assert torch.equal(again.score(x), model.score(x))


# -- the table -----------------------------------------------------------------------------------


def test_the_table_takes_what_fit_takes() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.randn(9, 4), torch.arange(9) % 3
    for example in (x, x.numpy(), (x, y), [(x, y)], [{"x": x, "y": y}]):
        assert rgpr.layers(network, example).taken == ["input", "1"]
    with pytest.raises(TypeError, match="layers=5; expected"):
        rgpr.layers(network, x, 5)  # type: ignore[arg-type]
    alone = {row.name: row.why for row in rgpr.layers(network, x, "input").rows}
    assert alone["0"] == "not read"


def test_the_table_of_ids() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.unused = nn.Embedding(9, 6), nn.Embedding(9, 6)
            self.inside = nn.Module()
            self.inside.words = self.shared
            self.hidden, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.hidden(self.inside.words(ids)).relu().mean(1))

    ids = torch.randint(0, 9, (30, 5))
    for name in ("shared", "inside.words"):  # a module of two names
        table = rgpr.layers(Tied(), ids, input=name)
        assert table.rows[0].why == f"always read: through '{name}'"
        assert RGPR(Tied(), input=name).fit([ids], progress=False).layers == table.taken
    with pytest.raises(ValueError, match=r"'unused' cannot .* not run; embeddings .* \['shared'\]"):
        rgpr.layers(Tied(), ids, input="unused")


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
