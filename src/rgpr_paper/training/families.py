"""Networks of families beside the paper's, for images of 32 x 32 and for sequences.

They differ in what a hidden representation looks like: channels before positions, channels after
positions inside a block, tokens with a class token, channels along time, states along time. Each
builder takes a ``scale``, by which widths shrink in the small versions of experiments.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from .architectures import torchvision_models

__all__ = ["ConvSequence", "LSTMSequence", "convnext", "mobilenet", "tiny_resnet", "vit"]


def tiny_resnet(classes: int = 10) -> nn.Module:
    """torchvision's ResNet with one block in each stage, for small versions of experiments.

    Args:
        classes: Number of logits.

    Raises:
        ImportError: torchvision is not installed.
    """
    resnet = torchvision_models("tiny_resnet").resnet
    network: nn.Module = resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=classes)
    return network


def mobilenet(classes: int = 10, *, scale: float = 1.0) -> nn.Module:
    """torchvision's MobileNetV3-small for 32 x 32 images: its first two strides are one.

    Args:
        classes: Number of logits.
        scale: Factor on the number of channels.

    Raises:
        ImportError: torchvision is not installed.
    """
    models = torchvision_models("mobilenet")
    network: nn.Module = models.mobilenet_v3_small(
        num_classes=classes,
        width_mult=scale,
        # Its own norm averages over thousands of steps, more than a short training has.
        norm_layer=partial(nn.BatchNorm2d, eps=1e-3, momentum=0.1),
    )
    strided = [
        module
        for module in network.modules()
        if isinstance(module, nn.Conv2d) and module.stride == (2, 2)
    ]
    for convolution in strided[:2]:
        convolution.stride = (1, 1)
    return network


def convnext(classes: int = 10, *, scale: float = 1.0) -> nn.Module:
    """torchvision's ConvNeXt with ten blocks in four stages, for 32 x 32 images: patches of 2 x 2.

    Args:
        classes: Number of logits.
        scale: Factor on the number of channels, which are 64, 128, 256 and 512.

    Raises:
        ImportError: torchvision is not installed.
    """
    models = torchvision_models("convnext")
    widths = [int(scale * width) for width in (64, 128, 256, 512)]
    stages = [
        models.convnext.CNBlockConfig(width, wider, depth)
        for width, wider, depth in zip(widths, [*widths[1:], None], (2, 2, 4, 2), strict=True)
    ]
    # A layer scale of 1e-6 is for trainings of hundreds of epochs.
    network: nn.Module = models.ConvNeXt(
        stages, stochastic_depth_prob=0.1, layer_scale=0.1, num_classes=classes
    )
    patches = nn.Conv2d(3, widths[0], 2, stride=2)
    nn.init.trunc_normal_(patches.weight, std=0.02)
    assert patches.bias is not None
    nn.init.zeros_(patches.bias)
    network.get_submodule("features.0").register_module("0", patches)
    return network


def vit(classes: int = 10, *, scale: float = 1.0, size: int = 32) -> nn.Module:
    """torchvision's vision transformer with seven blocks of width 256, on patches of 4 x 4.

    Args:
        classes: Number of logits.
        scale: Factor on the widths and on the number of blocks.
        size: Height and width of the images.

    Raises:
        ImportError: torchvision is not installed.
    """
    network: nn.Module = torchvision_models("vit").VisionTransformer(
        image_size=size,
        patch_size=4,
        num_layers=max(2, int(7 * scale)),
        num_heads=4,
        hidden_dim=int(256 * scale),
        mlp_dim=int(512 * scale),
        num_classes=classes,
    )
    return network


class _ResidualBlock(nn.Module):
    """Two convolutions along time beside a shortcut, as in a ResNet."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(channels, out, 5, stride, padding=2, bias=False)
        self.norm1 = nn.BatchNorm1d(out)
        self.conv2 = nn.Conv1d(out, out, 5, padding=2, bias=False)
        self.norm2 = nn.BatchNorm1d(out)
        self.shortcut = nn.Conv1d(channels, out, 1, stride, bias=False)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        output: Tensor = self.relu(hidden + self.shortcut(x))
        return output


class ConvSequence(nn.Module):
    """Six residual blocks along time, in three stages, for sequences ``(B, C, T)``.

    Args:
        channels: Channels of the sequences.
        classes: Number of logits.
        scale: Factor on the widths, which are 32, 64 and 128.
    """

    def __init__(self, channels: int, classes: int = 10, *, scale: float = 1.0) -> None:
        super().__init__()
        widths = [int(scale * width) for width in (32, 32, 64, 64, 128, 128)]
        self.blocks = nn.Sequential(
            *(
                _ResidualBlock(before, after, 1 + number % 2)
                for number, (before, after) in enumerate(pairwise([channels, *widths]))
            )
        )
        self.pool = nn.AdaptiveAvgPool1d(1)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.pool(self.blocks(x)).flatten(1))
        return logits


class LSTMSequence(nn.Module):
    """Two recurrent layers, whose states are averaged over time, for sequences ``(B, C, T)``.

    Args:
        channels: Channels of the sequences.
        classes: Number of logits.
        scale: Factor on the width, which is 128.
    """

    def __init__(self, channels: int, classes: int = 10, *, scale: float = 1.0) -> None:
        super().__init__()
        width = int(128 * scale)
        self.first = nn.LSTM(channels, width, batch_first=True)
        self.second = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.first(x.transpose(1, 2))
        states, _ = self.second(states)
        logits: Tensor = self.head(torch.mean(states, 1))
        return logits
