"""Networks, data and last-layer Laplace that several benchmarks share."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rgpr.posteriors import fit_laplace
from rgpr_paper.training import lenet, resnet18


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


NETWORKS = {
    "MLP 784-256-256": (mlp, (784,)),
    "LeNet": (lenet, (1, 28, 28)),
    "ResNet-18": (resnet18, (3, 32, 32)),
}


def head(features: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, features), nn.ReLU(), nn.Linear(features, classes))


def made(name: str, device: str) -> tuple[nn.Module, tuple[int, ...]]:
    """A network with random weights, in evaluation mode, and the shape of its inputs."""
    build, shape = NETWORKS[name]
    torch.manual_seed(0)
    network = build()
    # Statistics of some data, or activations would explode.
    with torch.no_grad():
        network.train()(torch.randn(64, *shape))
    return network.eval().to(device), shape


def laplace(network: nn.Module, x: Tensor, classes: int = 10) -> Any:
    """laplace-torch's last-layer Laplace, fitted to a copy."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice about its own defaults
        y = torch.arange(len(x), device=x.device) % classes
        loader = DataLoader(TensorDataset(x, y), batch_size=64)
        with torch.enable_grad():
            return fit_laplace(network, loader, subset="last_layer")
