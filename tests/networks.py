"""Networks and data that several tests share."""

from __future__ import annotations

import itertools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def noise(n: int, seed: int, scale: float = 1.0) -> Tensor:
    """Inputs ``(n, 4)`` for :func:`mlp`, the same for the same seed."""
    return scale * torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))


def mlp(inputs: int = 4, outputs: int = 3, width: int = 16, hidden: int = 2) -> nn.Sequential:
    sizes = [inputs] + [width] * hidden
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))


def convolutional(outputs: int = 3, size: int = 8, channels: int = 2) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, outputs),
    )


class LeNet(nn.Module):
    """With modules for everything, in containers, with BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 5, padding=2),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 8, 5, padding=2),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


class Functional(nn.Module):
    """Activations as functions, which no hook can see."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.second(F.relu(self.first(x)))))


class Reused(nn.Module):
    """One in-place ReLU, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.relu(self.second(self.relu(self.first(x)))))


class Recurrent(nn.Module):
    """A layer whose output is a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.last = nn.Linear(4, 5), nn.LSTM(5, 6, batch_first=True), None
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.lstm(self.embed(x))[0][:, -1])


class Shared(nn.Module):
    """One module under two names, run under both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.again(F.relu(self.first(x)))))


class Wrapper(nn.Module):
    """A network inside a module inside a module."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.inner = network

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class NamedInput(nn.Module):
    """A submodule that is called like the input."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.hidden, self.last = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.hidden(F.relu(self.input(x)))))


class InPlace(nn.Sequential):
    """Changes its input, by its first module and by hand."""

    def __init__(self) -> None:
        super().__init__(nn.ReLU(inplace=True), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        x += 0.5
        return super().forward(x)


def parametrised() -> nn.Sequential:
    norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(
        norm(nn.Linear(4, 8)), nn.ReLU(), norm(nn.Linear(8, 8)), nn.ReLU(), norm(nn.Linear(8, 3))
    )


@dataclass(frozen=True)
class Task:
    network: nn.Module
    train: TensorDataset
    x: Tensor
    y: Tensor

    def loader(self, batch_size: int = 256) -> DataLoader:
        return DataLoader(self.train, batch_size=batch_size)


def train_digits() -> Task:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(images), generator=generator)
    x = (torch.tensor(images, dtype=torch.float32) / 16)[order]
    y = torch.tensor(labels)[order]
    train = TensorDataset(x[:1300], y[:1300])
    torch.manual_seed(0)
    network = mlp(64, 10, width=64)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3, weight_decay=5e-4)
    shuffle = torch.Generator().manual_seed(0)
    for _ in range(30):
        for batch, labels in DataLoader(train, batch_size=64, shuffle=True, generator=shuffle):
            optimizer.zero_grad()
            F.cross_entropy(network(batch), labels).backward()
            optimizer.step()
    return Task(network.eval(), train, x[1300:], y[1300:])


def blobs(classes: int = 3, inputs: int = 4, n: int = 120) -> tuple[Tensor, Tensor]:
    """Well separated clusters."""
    centers = 3 * torch.randn(classes, inputs)
    y = torch.arange(n) % classes
    return centers[y] + torch.randn(n, inputs), y


def far_from_zero(seed: int, width: int = 48, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Activations whose mean is a thousand times their spread, with the class of each."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu")

    y = torch.arange(60 * classes, device="cpu") % classes
    mix = drawn(width, width)
    own = drawn(classes, width)[y]
    return 1000 + own + drawn(len(y), width) @ (mix / mix.norm(dim=0)), y


def laplace_over_blobs(likelihood: str, structure: str) -> tuple[Any, Tensor, Tensor]:
    """A fitted last-layer Laplace of an untrained network, and its data."""
    x, y = blobs()
    if likelihood == "regression":
        y = torch.randn(len(x), 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from laplace import Laplace

        la = Laplace(mlp(), likelihood, "last_layer", structure)
        la.fit(DataLoader(TensorDataset(x, y), batch_size=40))
    return la, x, y


EVERY_NETWORK = {
    "mlp": (mlp, (4,)),
    "convolutional": (convolutional, (2, 8, 8)),
    "lenet": (LeNet, (1, 8, 8)),
    "functional": (Functional, (4,)),
    "reused": (Reused, (4,)),
    "recurrent": (Recurrent, (5, 4)),
    "shared": (Shared, (4,)),
    "wrapper": (lambda: Wrapper(Wrapper(mlp())), (4,)),
    "parametrised": (parametrised, (4,)),
    "named input": (NamedInput, (4,)),
    "in place": (InPlace, (4,)),
}
