"""Networks of several families, their data, and the layers that a hand would choose in each.

They are trained on CIFAR-10, or on the made sequences of :mod:`rgpr_paper.data.sequences`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from rgpr._network.layers import LayerChoice

from .context import Context
from .data import CHANNELS, ImageSet, Loader, made_sequences, notes_of, read_split, some
from .near_far import near_and_far
from .networks import SETTINGS, Setting
from .training import (
    ConvSequence,
    LSTMSequence,
    TrainingPlan,
    convnext,
    mobilenet,
    tiny_resnet,
    vit,
)

__all__ = ["CHOICES", "DATA", "FAMILIES", "Data", "Family"]

CHOICES = ("automatic", "input and head", "every block")
VALIDATION = 2000


@dataclass(frozen=True)
class Family:
    """A network, how it is trained, and which of its modules are blocks.

    Attributes:
        title: The family's name in tables.
        setting: How the network is built and trained.
        tiny: Builds the network of the small version.
        blocks: Pattern of the names of all modules that are blocks.
        head: Name of the last linear layer.
        data: Key of ``DATA``, what the network is trained on.
        extra: More choices of layers to measure, by the name that the tables give them. They have
            no part in the claim.
    """

    title: str
    setting: Setting
    tiny: Callable[[], nn.Module]
    blocks: str
    head: str
    data: str = "cifar10"
    extra: Mapping[str, LayerChoice] = field(default_factory=dict)

    @property
    def small(self) -> Setting:
        """The tiny network, trained for two steps."""
        return _setting(self.tiny, replace(self.setting.plans["fast"], epochs=1, batch_size=50))

    def choices(self, network: nn.Module) -> dict[str, LayerChoice]:
        """What ``layers=`` is given, by the name of the choice."""
        into_head = f"{self.head}:input"
        names = (name for name, _ in network.named_modules())
        blocks = [name for name in names if re.fullmatch(self.blocks, name)]
        ways: tuple[LayerChoice, ...] = ("auto", [into_head], [*blocks, into_head])
        return {**dict(zip(CHOICES, ways, strict=True)), **self.extra}


def _setting(build: Callable[[], nn.Module], plan: TrainingPlan) -> Setting:
    """The same plan for every word that ``--recipe`` takes."""
    return Setting(build, {"fast": plan, "paper": plan})


_SEQUENCES = TrainingPlan.modern(augment="none", lr=2e-3, epochs=30, batch_size=256)

FAMILIES = {
    "resnet18": Family(
        "ResNet-18",
        SETTINGS["cifar10"],
        tiny_resnet,
        r"layer\d\.\d",
        "fc",
        extra={"automatic and the stem": ["relu", "layer1", "layer2", "layer3", "fc:input"]},
    ),
    "mobilenet": Family(
        "MobileNetV3-small",
        _setting(mobilenet, TrainingPlan.fast(epochs=60, batch_size=512)),
        partial(mobilenet, scale=0.25),
        r"features\.\d+",
        "classifier.3",
    ),
    "convnext": Family(
        "ConvNeXt",
        _setting(convnext, TrainingPlan.modern(epochs=60, lr=2e-3)),
        partial(convnext, scale=0.125),
        r"features\.[0246]|features\.[1357]\.\d+",
        "classifier.2",
        extra={"automatic and the stem": ["features.[0-6]", "classifier.2:input"]},
    ),
    "vit": Family(
        "ViT",
        _setting(vit, TrainingPlan.modern(epochs=90)),
        partial(vit, scale=0.125, size=16),
        r"encoder\.layers\.encoder_layer_\d+",
        "heads.head",
        extra={
            "blocks, class token": {"encoder.layers.*": "first", "heads.head:input": None},
            "blocks, mean over tokens": {"encoder.layers.*": "mean", "heads.head:input": None},
        },
    ),
    "conv1d": Family(
        "Conv1d",
        _setting(partial(ConvSequence, CHANNELS), _SEQUENCES),
        partial(ConvSequence, CHANNELS, scale=0.25),
        r"blocks\.\d",
        "head",
        "sequences",
    ),
    "lstm": Family(
        "LSTM",
        _setting(partial(LSTMSequence, CHANNELS), replace(_SEQUENCES, bf16=False)),
        partial(LSTMSequence, CHANNELS, scale=0.125),
        r"first|second",
        "head",
        "sequences",
        extra={
            "blocks, last step": {"first": "last", "second": "last", "head:input": None},
            "blocks, mean over steps": {"first": "mean", "second": "mean", "head:input": None},
        },
    ),
}


@dataclass(frozen=True)
class Data:
    """What a network is trained, fitted and measured on.

    Attributes:
        train: The training data.
        validation: Loader of held-out data, which only the files for offline rules hold.
        test: Loader of the test data.
        outliers: Near and far outliers by name.
        notes: For a stand-in, by its set's name, what it really is.
        missing: For a kind of outliers that is not there, how to get it.
    """

    train: ImageSet
    validation: Loader
    test: Loader
    outliers: dict[str, dict[str, ImageSet]]
    notes: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


def _cifar10(context: Context, seed: int) -> Data:
    """CIFAR-10, or a hundred digits in three channels for the small version."""
    name = "digits" if context.small else "cifar10"
    train, test = read_split(context.data, name, context.device, context.download)
    outliers, missing = near_and_far(context, name)
    notes = notes_of({name: train}) | notes_of(outliers["near"]) | notes_of(outliers["far"])
    if context.small:
        train, test = _in_colour(train, 100), _in_colour(test, 50)
        outliers = {
            where: {kind: _in_colour(found, 25) for kind, found in kinds.items()}
            for where, kinds in outliers.items()
        }
    return Data(train, *_halves(test, seed), outliers, notes, missing)


def _in_colour(images: ImageSet, count: int) -> ImageSet:
    return replace(images, x=images.x[:count].repeat(1, 3, 1, 1), y=images.y[:count])


def _sequences(context: Context, seed: int) -> Data:
    sizes = (100, 50, 25) if context.small else (20_000, 10_000, 5000)
    made = made_sequences(*sizes, context.device)
    outliers = {"near": made.near, "far": made.far}
    return Data(made.train, *_halves(made.test, seed), outliers)


def _halves(test: ImageSet, seed: int) -> tuple[Loader, Loader]:
    """2000 validation examples, or a fifth of a smaller set, and the rest for testing."""
    rows = some(torch.arange(len(test.x), device=test.x.device), len(test.x), seed)
    parts = rows.tensor_split([min(VALIDATION, len(rows) // 5)])
    held_out, tested = (Loader(test.x[part], test.y[part]) for part in parts)
    return held_out, tested


DATA: dict[str, Callable[[Context, int], Data]] = {"cifar10": _cifar10, "sequences": _sequences}
