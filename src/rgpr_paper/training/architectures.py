"""The networks of the paper's experiments, as plain modules with a module for every activation.

``layers="auto"`` reads both poolings and the last ReLU of the LeNet, the four residual stages of
the ResNet and the one ReLU of the regression network. Networks of other families are in
:mod:`rgpr_paper.training.families`.
"""

from __future__ import annotations

from collections import OrderedDict
from importlib import import_module
from typing import Any

from torch import nn

__all__ = ["lenet", "regression_net", "resnet18", "torchvision_models"]


def lenet(channels: int = 1, classes: int = 10, size: int = 28) -> nn.Module:
    """Two 5 x 5 convolutions with batch normalisation and pooling, then 1024 hidden units.

    Args:
        channels: Channels of the images.
        classes: Number of logits.
        size: Height and width of the images.

    Raises:
        ValueError: The images are too small for two convolutions and two poolings.
    """
    pooled = ((size - 4) // 2 - 4) // 2
    if pooled < 1:
        raise ValueError(f"size = {size}; nothing is left of images smaller than 16: pad them")
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 32, 5),
            norm1=nn.BatchNorm2d(32),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, 5),
            norm2=nn.BatchNorm2d(64),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            hidden=nn.Linear(64 * pooled**2, 1024),
            relu3=nn.ReLU(),
            last=nn.Linear(1024, classes),
        )
    )


def torchvision_models(builder: str) -> Any:
    """``torchvision.models``, for a function that builds a network of its blocks.

    Args:
        builder: Name of that function, for the error.

    Raises:
        ImportError: torchvision is not installed.
    """
    try:
        return import_module("torchvision.models")
    except ImportError as error:
        raise ImportError(
            f"{builder} is built of torchvision's blocks: pip install torchvision"
        ) from error


def resnet18(classes: int = 10) -> nn.Module:
    """torchvision's ResNet-18 for 32 x 32 images: a 3 x 3 stem of stride one, no max-pooling.

    Args:
        classes: Number of logits.

    Raises:
        ImportError: torchvision is not installed.
    """
    network: nn.Module = torchvision_models("resnet18").resnet18(num_classes=classes)
    network.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    # As torchvision starts all of its convolutions.
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    network.maxpool = nn.Identity()
    return network


def regression_net(inputs: int, outputs: int = 1, hidden: int = 50) -> nn.Module:
    """A two-layer ReLU network, 50 hidden units in the paper's UCI experiments.

    Args:
        inputs: Number of inputs.
        outputs: Number of outputs.
        hidden: Number of hidden units.
    """
    return nn.Sequential(
        OrderedDict(
            hidden=nn.Linear(inputs, hidden), relu=nn.ReLU(), last=nn.Linear(hidden, outputs)
        )
    )
