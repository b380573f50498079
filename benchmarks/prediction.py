"""What the residual costs on top of the network, and the closed form against Jacobians."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rgpr import RGPR
from rgpr.training import lenet

from .timing import race


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


NETWORKS = {
    "MLP 784-256-256, batch 256": (mlp, (784,), 256),
    "LeNet, batch 256": (lenet, (1, 28, 28), 256),
    "ResNet-18 32x32, batch 32": (
        lambda: torchvision.models.resnet18(num_classes=10),
        (3, 32, 32),
        32,
    ),
}


@torch.no_grad()
def run() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, (build, shape, batch) in NETWORKS.items():
        torch.manual_seed(0)
        network = build().eval()
        x = torch.randn(batch, *shape)
        model = RGPR(network).fit([x, x])
        results[name] = race(
            {"network": lambda n=network, x=x: n(x), "RGPR": lambda m=model, x=x: m(x)}
        )
    results["last-layer Laplace, C = 100, D = 512, batch 32"] = closed_form()
    return results


def closed_form() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from laplace import Laplace

        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 100))
        x = torch.randn(32, 64)
        la = Laplace(network, "classification", "last_layer", "kron")
        with torch.enable_grad():
            la.fit(DataLoader(TensorDataset(x, torch.arange(32)), batch_size=32))
    model = RGPR(la).fit([x])
    return race({"RGPR": lambda: model(x), "laplace-torch": lambda: la(x)}, rounds=2)
