"""Training of the experiments' networks: architectures, plans, and one loop that can be resumed.

A :class:`TrainingPlan` says how to train, :class:`RunOptions` with which seed, on which device and
from which checkpoint. The library itself wraps networks that are already trained; nothing outside
the experiments needs this package.
"""

from __future__ import annotations

from .architectures import lenet, regression_net, resnet18
from .families import ConvSequence, LSTMSequence, convnext, mobilenet, tiny_resnet, vit
from .plan import TrainingPlan
from .train import History, RunOptions, train

__all__ = [
    "ConvSequence",
    "History",
    "LSTMSequence",
    "RunOptions",
    "TrainingPlan",
    "convnext",
    "lenet",
    "mobilenet",
    "regression_net",
    "resnet18",
    "tiny_resnet",
    "train",
    "vit",
]
