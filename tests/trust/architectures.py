"""Random networks: the same for the same seed, of every kind that people wrap.

:func:`architecture` draws a kind, sizes, activations, normalisations, dropout and residual
connections from a seed. Every network takes ``(B, ...)`` and returns ``(B, outputs)``; its outputs
grow at most linearly with its inputs, so the theorem of docs/theory.md holds for all of them.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "ReLU": nn.ReLU,
    "ReLU in place": lambda: nn.ReLU(inplace=True),
    "GELU": nn.GELU,
    "Tanh": nn.Tanh,
    "SiLU": nn.SiLU,
    "LeakyReLU": lambda: nn.LeakyReLU(0.2),
    "ELU": nn.ELU,
    "Softplus": nn.Softplus,
    "Hardswish": nn.Hardswish,
    "Mish": nn.Mish,
}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "silu": F.silu,
    "leaky_relu": F.leaky_relu,
    "elu": F.elu,
    "softplus": F.softplus,
}


@dataclass(frozen=True)
class Architecture:
    """A network, the shape of one of its inputs, and what it is in words."""

    network: nn.Module
    shape: tuple[int, ...]
    words: str


# -- parts -----------------------------------------------------------------------------------------


class Residual(nn.Module):
    """``x + part(x)``."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.part(x)
        return out


class Functional(nn.Module):
    """Linear layers with an activation that is a function, which no hook can see."""

    def __init__(self, sizes: list[int], function: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(nn.Linear, sizes, sizes[1:]))
        self.function = FUNCTIONS[function]

    def forward(self, x: Tensor) -> Tensor:
        *hidden, last = self.layers
        for layer in hidden:
            x = self.function(layer(x))
        out: Tensor = last(x)
        return out


class Reused(nn.Module):
    """Linear layers with one activation in place, which runs after each of them."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(nn.Linear, sizes, sizes[1:]))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        *hidden, last = self.layers
        for layer in hidden:
            x = self.relu(layer(x))
        out: Tensor = last(x)
        return out


class Recurrent(nn.Module):
    """An LSTM or GRU whose last state goes into a linear head."""

    def __init__(self, kind: str, sizes: tuple[int, int, int], layers: int) -> None:
        super().__init__()
        inputs, width, outputs = sizes
        cell = {"LSTM": nn.LSTM, "GRU": nn.GRU}[kind]
        self.cell = cell(inputs, width, layers, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cell(x)[0][:, -1])
        return out


class Attending(nn.Module):
    """Self-attention over positions, with a residual connection, a norm, and a mean or a token."""

    def __init__(self, inputs: int, width: int, outputs: int, mean: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm, self.head, self.mean = nn.LayerNorm(width), nn.Linear(width, outputs), mean

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = self.norm(h + self.attention(h, h, h, need_weights=False)[0])
        out: Tensor = self.head(h.mean(1) if self.mean else h[:, 0])
        return out


class Transformer(nn.Module):
    """Torch's own encoder between two linear layers."""

    def __init__(self, inputs: int, width: int, outputs: int, rng: random.Random) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width,
            2,
            2 * width,
            dropout=0.1,
            activation=rng.choice(["relu", "gelu"]),
            batch_first=True,
            norm_first=rng.random() < 0.5,
        )
        self.embed = nn.Linear(inputs, width)
        self.encoder = nn.TransformerEncoder(layer, rng.randint(1, 2), enable_nested_tensor=False)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.embed(x)).mean(1))
        return out


# -- kinds -----------------------------------------------------------------------------------------

Made = tuple[nn.Module, tuple[int, ...], str]


def _sizes(rng: random.Random, outputs: int) -> list[int]:
    depth = rng.randint(1, 4)
    return [rng.randint(1, 12), *(rng.choice([1, 3, 8, 16, 33, 64]) for _ in range(depth)), outputs]


def _norm(rng: random.Random, width: int, dims: int) -> list[nn.Module]:
    groups = math.gcd(width, 4)
    batch = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d}[dims]
    choices = [None, None, batch(width)]
    if width > 1:  # torch itself refuses to normalise a single number
        choices.append(nn.GroupNorm(groups, width))
    if dims == 0 and width > 1:
        choices.append(nn.LayerNorm(width))
    chosen = rng.choice(choices)
    return [] if chosen is None else [chosen]


def mlp(rng: random.Random, outputs: int) -> Made:
    sizes, name = _sizes(rng, outputs), rng.choice(list(ACTIVATIONS))
    dropout, residual = rng.random() < 0.4, rng.random() < 0.4
    layers: list[nn.Module] = []
    for before, width in itertools.pairwise(sizes[:-1]):
        layers += [nn.Linear(before, width), *_norm(rng, width, 0), ACTIVATIONS[name]()]
        if residual:
            inner = [nn.Linear(width, width), ACTIVATIONS[name](), nn.Linear(width, width)]
            layers.append(Residual(nn.Sequential(*inner)))
        if dropout:
            layers.append(nn.Dropout(rng.choice([0.1, 0.5])))
    network = nn.Sequential(*layers, nn.Linear(sizes[-2], outputs))
    return network, (sizes[0],), f"mlp {sizes} {name} residual={residual} dropout={dropout}"


def functional(rng: random.Random, outputs: int) -> Made:
    sizes, name = _sizes(rng, outputs), rng.choice(list(FUNCTIONS))
    return Functional(sizes, name), (sizes[0],), f"functional {sizes} {name}"


def reused(rng: random.Random, outputs: int) -> Made:
    sizes = _sizes(rng, outputs)
    return Reused(sizes), (sizes[0],), f"reused in-place ReLU {sizes}"


def linear(rng: random.Random, outputs: int) -> Made:
    inputs = rng.randint(1, 20)
    return nn.Linear(inputs, outputs), (inputs,), f"linear {inputs}"


def convolutional(rng: random.Random, outputs: int) -> Made:
    dims = rng.choice([1, 2])
    convolution = {1: nn.Conv1d, 2: nn.Conv2d}[dims]
    pools: list[Callable[[], nn.Module]]
    if dims == 1:
        pools = [lambda: nn.MaxPool1d(2), lambda: nn.AvgPool1d(2), nn.Identity]
    else:
        pools = [lambda: nn.MaxPool2d(2), lambda: nn.AvgPool2d(2), nn.Identity]
    channels, size = rng.choice([1, 2, 3]), rng.choice([8, 9, 12])
    name = rng.choice(list(ACTIVATIONS))
    layers: list[nn.Module] = []
    width = channels
    for _ in range(rng.randint(1, 3)):
        new = rng.choice([2, 4, 8])
        layers += [convolution(width, new, 3, padding=1), *_norm(rng, new, dims)]
        layers += [ACTIVATIONS[name](), rng.choice(pools)()]
        if rng.random() < 0.4:
            layers.append(Residual(convolution(new, new, 3, padding=1)))
        width = new
    over = rng.choice([1, 2])
    layers.append({1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d}[dims](over))
    layers += [nn.Flatten(), nn.Linear(width * over**dims, outputs)]
    shape = (channels, *[size] * dims)
    return nn.Sequential(*layers), shape, f"conv{dims}d {shape} {name}, {len(layers)} modules"


def recurrent(rng: random.Random, outputs: int) -> Made:
    kind, inputs, width = rng.choice(["LSTM", "GRU"]), rng.randint(1, 5), rng.choice([3, 8, 16])
    network = Recurrent(kind, (inputs, width, outputs), rng.randint(1, 2))
    return network, (rng.randint(2, 6), inputs), f"{kind} {inputs} -> {width}"


def attending(rng: random.Random, outputs: int) -> Made:
    inputs, width, positions = rng.randint(1, 5), rng.choice([4, 8, 16]), rng.randint(2, 6)
    if rng.random() < 0.5:
        network: nn.Module = Attending(inputs, width, outputs, rng.random() < 0.5)
    else:
        network = Transformer(inputs, width, outputs, rng)
    return network, (positions, inputs), f"{type(network).__name__} {inputs} -> {width}"


KINDS = {
    kind.__name__: kind
    for kind in (mlp, functional, reused, linear, convolutional, recurrent, attending)
}
_WEIGHTS = (8, 3, 2, 1, 4, 2, 2)


def architecture(seed: int, outputs: int, kind: str | None = None) -> Architecture:
    """The network of a seed, in training or evaluation mode, with running statistics of its own.

    Args:
        seed: Decides everything.
        outputs: The number of outputs.
        kind: One of :data:`KINDS`; by default the seed decides.
    """
    rng = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        kind = kind or rng.choices(list(KINDS), _WEIGHTS)[0]
        network, shape, words = KINDS[kind](rng, outputs)
        scale = rng.choice([1.0, 1.0, 5.0, 30.0])
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if scale > 1 and name.endswith("weight") and parameter.shape[0] == outputs:
                    parameter *= scale  # a head that is sure of itself
            network.train()
            network(torch.randn(32, *shape))  # moves the running statistics
    network.train(rng.random() < 0.3)
    return Architecture(network, shape, f"seed {seed}: {words}, head x {scale:g}")
