"""Image classifiers of torchvision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ..entry import Entry, register
from ..samples import images


def _add(
    name: str, size: int, small: bool = False, excuses: dict[str, str] | None = None, **options: Any
) -> None:
    """Register a model of torchvision by the name of the function that makes it.

    Args:
        name: The name.
        size: Height and width of the images.
        small: See :class:`Entry`.
        excuses: See :class:`Entry`.
        **options: Options of that function.
    """
    build = partial(_by_name, name, options)
    register(Entry("torchvision", name, build, images(size), excuses=excuses or {}, small=small))


def _by_name(name: str, options: dict[str, Any], classes: int) -> nn.Module:
    from torchvision import models

    network: nn.Module = models.get_model(name, weights=None, num_classes=classes, **options)
    return network


_add("resnet18", 32)
_add("resnet50", 32)
_add("mobilenet_v2", 32)
_add("mobilenet_v3_small", 32)
_add("mobilenet_v3_large", 32)
_add("efficientnet_b0", 32)
_add("regnet_y_400mf", 32)
_add("shufflenet_v2_x0_5", 32, small=True)
_add(
    "squeezenet1_1",
    32,
    excuses={"certificate": "a convolution makes the outputs, and no linear layer"},
)
_add("densenet121", 32)
_add("googlenet", 32, aux_logits=False, init_weights=False)
_add(
    "inception_v3",
    80,
    excuses={"scaled": "one held-out digit of 60 is so far out in its pixels that it ranks first"},
    aux_logits=False,
    init_weights=False,
)
_add(
    "mnasnet0_5",
    32,
    excuses={"onnx": "the network alone differs by as much, and float32 from float64 by 1e-4"},
)


def _narrow(name: str, classes: int) -> nn.Module:
    """A network whose two hidden layers of 4096 units are one of 64, so that its file is small."""
    network = _by_name(name, {}, classes)
    layers = network.get_submodule("classifier").modules()
    first = next(part for part in layers if isinstance(part, nn.Linear))
    network.classifier = nn.Sequential(
        nn.Linear(first.in_features, 64),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(64, classes),
    )
    return network


for _name, _size in {"vgg11": 32, "vgg11_bn": 32, "alexnet": 64}.items():
    register(Entry("torchvision", _name, partial(_narrow, _name), images(_size)))


def _own(name: str, size: int, build: Callable[[Any, int], nn.Module]) -> None:
    """Register a class of torchvision with a small configuration of our own."""

    def make(classes: int) -> nn.Module:
        from torchvision import models

        return build(models, classes)

    register(Entry("torchvision", name, make, images(size)))


_own(
    "VisionTransformer",
    32,
    lambda models, classes: models.VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=4,
        num_heads=3,
        hidden_dim=48,
        mlp_dim=96,
        num_classes=classes,
    ),
)
_own(
    "MaxVit",
    64,
    lambda models, classes: models.MaxVit(
        input_size=(64, 64),
        stem_channels=16,
        partition_size=4,
        block_channels=[16, 32],
        block_layers=[1, 1],
        head_dim=8,
        stochastic_depth_prob=0.0,
        num_classes=classes,
    ),
)


def _swin(models: Any, classes: int, **options: Any) -> nn.Module:
    network: nn.Module = models.SwinTransformer(
        patch_size=[2, 2],
        embed_dim=24,
        depths=[1, 1, 2, 1],
        num_heads=[2, 2, 4, 4],
        window_size=[4, 4],
        stochastic_depth_prob=0.0,
        num_classes=classes,
        **options,
    )
    return network


_own("SwinTransformer", 32, _swin)
_own(
    "SwinTransformer-v2",
    32,
    lambda models, classes: _swin(
        models,
        classes,
        block=models.swin_transformer.SwinTransformerBlockV2,
        downsample_layer=models.swin_transformer.PatchMergingV2,
    ),
)
_own(
    "ConvNeXt",
    32,
    lambda models, classes: models.ConvNeXt(
        [
            models.convnext.CNBlockConfig(channels, following, depth)
            for channels, following, depth in (
                (24, 48, 1),
                (48, 96, 1),
                (96, 192, 2),
                (192, None, 1),
            )
        ],
        num_classes=classes,
    ),
)
