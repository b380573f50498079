"""Networks on tables: their inputs are columns, not pixels."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..entry import Entry, register
from ..samples import table


def mlp(columns: int, classes: int, hidden: tuple[int, ...] = (64, 64)) -> nn.Module:
    """Linear layers and ReLUs."""
    widths = (columns, *hidden)
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


class FunctionalMLP(nn.Module):
    """An MLP whose activations are function calls, which no hook sees."""

    def __init__(self, columns: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(columns, 64), nn.Linear(64, 64)
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(F.silu(self.second(F.silu(self.first(x)))))
        return logits


class _Residual(nn.Module):
    """A block of the tabular ResNet of Gorishniy and others (2021)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.second(F.relu(self.first(self.norm(x))))
        return out


class TabularResNet(nn.Module):
    """Residual blocks on a linear map of the columns."""

    def __init__(self, columns: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Linear(columns, 32)
        self.blocks = nn.Sequential(*(_Residual(32) for _ in range(3)))
        self.head = nn.Sequential(nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(x)))
        return logits


class FTTransformer(nn.Module):
    """Every column becomes a token; the class token's features are classified."""

    def __init__(self, columns: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns, 24) / 5)
        self.bias = nn.Parameter(torch.zeros(columns, 24))
        self.token = nn.Parameter(torch.zeros(1, 1, 24))
        layer = nn.TransformerEncoderLayer(
            24, 4, 48, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, classes)

    def forward(self, x: Tensor) -> Tensor:
        columns = x[:, :, None] * self.weight + self.bias
        h = self.encoder(torch.cat([self.token.expand(len(x), -1, -1), columns], 1))
        logits: Tensor = self.head(F.relu(self.norm(h[:, 0])))
        return logits


class Gated(nn.Module):
    """Linear layers whose outputs are gated by a sigmoid of another linear layer."""

    def __init__(self, columns: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(columns, 64), nn.GLU())
        self.second = nn.Sequential(nn.Linear(32, 64), nn.GLU())
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.second(self.first(x)))
        return logits


# Columns are standardised, so what stands in another column is within its usual range.
COLUMNS = {"scrambled": "shuffled columns stay within the range of each, and are told less well"}
_COLUMNS = {"wine": 13, "breast_cancer": 30, "digits": 64}


def _add(name: str, kind: Any, data: str, **options: Any) -> None:
    """Register a network for a table; ``kind`` takes the numbers of columns and of classes."""
    columns = _COLUMNS[data]
    register(Entry("tabular", name, lambda classes: kind(columns, classes), table(data), **options))


_add("mlp-wine", mlp, "wine", small=True, excuses=COLUMNS)
_add("mlp-breast-cancer", mlp, "breast_cancer", excuses=COLUMNS)
_add("mlp-digits", mlp, "digits", excuses=COLUMNS)
_add("mlp-functional", FunctionalMLP, "breast_cancer", excuses=COLUMNS)
_add(
    "logistic-regression",
    nn.Linear,
    "breast_cancer",
    excuses={
        "count": "there is no layer between the input and the outputs",
        **COLUMNS,
    },
)
_add("resnet", TabularResNet, "wine", excuses=COLUMNS)
_add(
    "ft-transformer",
    FTTransformer,
    "breast_cancer",
    small=True,
    excuses={
        **COLUMNS,
        "onnx": "`len(x)` makes the number of rows a constant, which `x.shape[0]` does not",
    },
)
_add("gated", Gated, "digits")
_add(
    "self-normalising",
    lambda columns, classes: nn.Sequential(
        nn.Linear(columns, 48),
        nn.SELU(),
        nn.AlphaDropout(0.05),
        nn.Linear(48, 48),
        nn.SELU(),
        nn.Linear(48, classes),
    ),
    "wine",
)
