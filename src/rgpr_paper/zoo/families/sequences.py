"""Recurrent, convolutional and attention networks on sequences, signals and volumes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..entry import Entry, register
from ..samples import rows, signals, volumes


class Recurrent(nn.Module):
    """A recurrent layer over the rows of a digit, and a linear head on its last step.

    Args:
        kind: ``nn.RNN``, ``nn.LSTM`` or ``nn.GRU``.
        classes: Number of classes.
        batch_first: Whether the layer is given ``(B, T, D)``, or ``(T, B, D)``.
        **options: More options of the layer.
    """

    def __init__(self, kind: Any, classes: int, batch_first: bool = True, **options: Any) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.layer = kind(8, 24, batch_first=batch_first, **options)
        self.head = nn.Linear(48 if options.get("bidirectional") else 24, classes)

    def forward(self, x: Tensor) -> Tensor:
        given = x if self.batch_first else x.transpose(0, 1)
        out, _ = self.layer(given)
        last = out[:, -1] if self.batch_first else out[-1]
        logits: Tensor = self.head(last)
        return logits


class Attending(nn.Module):
    """PyTorch's own transformer encoder over the rows of a digit, and the mean over time.

    Args:
        classes: Number of classes.
        batch_first: Whether the encoder is given ``(B, T, D)``, or ``(T, B, D)``.
    """

    def __init__(self, classes: int, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Linear(8, 24)
        self.place = nn.Parameter(0.02 * torch.randn(8, 24))
        layer = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(24, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place
        h = self.encoder(h) if self.batch_first else self.encoder(h.transpose(0, 1)).transpose(0, 1)
        logits: Tensor = self.head(h.mean(1))
        return logits


class _Temporal(nn.Module):
    """A residual block of dilated causal convolutions, with functional activations."""

    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.reach = 2 * dilation
        self.first = nn.Conv1d(channels, channels, 3, dilation=dilation)
        self.second = nn.Conv1d(channels, channels, 3, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.first(F.pad(x, (self.reach, 0))))
        return F.relu(x + self.second(F.pad(h, (self.reach, 0))))


class TemporalConvolutions(nn.Module):
    """A temporal convolutional network (TCN) over a signal with one channel."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 16, 3, padding=1)
        self.blocks = nn.Sequential(*(_Temporal(16, 2**depth) for depth in range(4)))
        self.head = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(x))[:, :, -1])
        return logits


def _plain_convolutions(classes: int) -> nn.Module:
    """Convolutions over a signal, as a plain sequence of layers."""
    return nn.Sequential(
        nn.Conv1d(1, 8, 5, stride=2),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Conv1d(8, 16, 5, stride=2),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(16, classes),
    )


def _volume_convolutions(classes: int) -> nn.Module:
    """Convolutions in three dimensions."""
    return nn.Sequential(
        nn.Conv3d(1, 8, 3, padding=1),
        nn.BatchNorm3d(8),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.Conv3d(8, 16, 3, padding=1),
        nn.BatchNorm3d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(16, classes),
    )


class _Mix(nn.Module):
    """A block of an MLP-Mixer: one MLP over the steps, one over the features."""

    def __init__(self, time: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_time = nn.Sequential(nn.Linear(time, 32), nn.GELU(), nn.Linear(32, time))
        self.over_width = nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_time(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        mixed: Tensor = x + self.over_width(self.norm2(x))
        return mixed


class Mixer(nn.Module):
    """An MLP-Mixer over the rows of a digit."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 24)
        self.blocks = nn.ModuleList(_Mix(8, 24) for _ in range(3))
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(self.norm(h).mean(1))
        return logits


ONE_LAYER = {"count": "one recurrent module and a head: what goes into the head is all there is"}


def _add(name: str, build: Any, data: Any = rows, **options: Any) -> None:
    register(Entry("sequences", name, build, data() if data is rows else data, **options))


_add("rnn", lambda classes: Recurrent(nn.RNN, classes), excuses=ONE_LAYER)
_add("lstm", lambda classes: Recurrent(nn.LSTM, classes), small=True, excuses=ONE_LAYER)
_add(
    "lstm-sequence-first",
    lambda classes: Recurrent(nn.LSTM, classes, False),
    small=True,
    excuses=ONE_LAYER,
)
_add("gru", lambda classes: Recurrent(nn.GRU, classes), excuses=ONE_LAYER)
_add("gru-sequence-first", lambda classes: Recurrent(nn.GRU, classes, False), excuses=ONE_LAYER)
_add(
    "lstm-bidirectional",
    lambda classes: Recurrent(nn.LSTM, classes, bidirectional=True),
    excuses=ONE_LAYER,
)
_add("gru-two-layers", lambda classes: Recurrent(nn.GRU, classes, num_layers=2), excuses=ONE_LAYER)
_add("transformer-encoder", lambda classes: Attending(classes, True), small=True)
_add("transformer-encoder-sequence-first", lambda classes: Attending(classes, False), small=True)
_add("mlp-mixer", Mixer)
_add("tcn", TemporalConvolutions, signals(64, 1), small=True)
_add("conv1d", _plain_convolutions, signals(64, 1))
_add("conv3d", _volume_convolutions, volumes(4, 8))
