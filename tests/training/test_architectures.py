from __future__ import annotations

import importlib
import sys

import pytest
import torch
from torch import nn

import rgpr
from rgpr_paper.training import lenet, regression_net, resnet18


def parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def test_lenet_has_the_papers_layers() -> None:
    network = lenet()
    convolutions = (25 * 32 + 32) + (25 * 32 * 64 + 64) + 2 * (32 + 64)
    assert parameters(network) == convolutions + (1024 * 1024 + 1024) + (1024 * 10 + 10)
    assert network(torch.rand(2, 1, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize(("channels", "classes", "size"), [(3, 7, 32), (1, 2, 16), (2, 3, 29)])
def test_lenet_takes_other_images(channels: int, classes: int, size: int) -> None:
    network = lenet(channels, classes, size)
    assert network(torch.rand(2, channels, size, size)).shape == (2, classes)


def test_lenet_refuses_images_that_vanish() -> None:
    with pytest.raises(ValueError, match=r"size = 15; .* pad them"):
        lenet(size=15)


def test_resnet18_has_the_usual_size_for_small_images() -> None:
    network = resnet18(100).eval()
    shapes = []
    network.layer1.register_forward_hook(lambda m, a, h: shapes.append(h.shape))
    network.layer4.register_forward_hook(lambda m, a, h: shapes.append(h.shape))
    with torch.no_grad():
        assert network(torch.rand(2, 3, 32, 32)).shape == (2, 100)
    assert shapes == [(2, 64, 32, 32), (2, 512, 4, 4)]  # the stem keeps the resolution
    # The 11.17 million that everybody quotes for ten classes.
    assert parameters(network) == 11_173_962 + 90 * 513


def test_resnet18_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(ImportError, match="pip install torchvision"):
        resnet18()


def test_torchvision_is_not_needed_to_import_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    importlib.reload(sys.modules["rgpr_paper.training.architectures"])


def test_regression_net_has_two_layers() -> None:
    network = regression_net(8)
    assert parameters(network) == 8 * 50 + 50 + 50 + 1
    assert network(torch.rand(3, 8)).shape == (3, 1)


@pytest.mark.parametrize(
    ("network", "shape", "layers"),
    [
        (lenet, (1, 28, 28), ["pool1", "pool2", "relu3"]),
        (resnet18, (3, 32, 32), ["layer1", "layer2", "layer3", "fc:input"]),
        (lambda: regression_net(4), (4,), ["relu"]),
    ],
)
def test_automatic_layers_are_the_hidden_stages(network, shape, layers) -> None:  # type: ignore[no-untyped-def]
    model = rgpr.RGPR(network()).fit([torch.rand(4, *shape)], progress=False)
    assert model.layers == ["input", *layers]
