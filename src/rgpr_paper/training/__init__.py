"""Training of the experiments' networks: architectures, plans, and one loop that can be resumed.

A :class:`TrainingPlan` says how to train, :class:`RunOptions` with which seed, on which device and
from which checkpoint. The library itself wraps networks that are already trained; nothing outside
the experiments needs this package.
"""

from __future__ import annotations

from .architectures import lenet, regression_net, resnet18
from .plan import TrainingPlan
from .train import History, RunOptions, train

__all__ = [
    "History",
    "RunOptions",
    "TrainingPlan",
    "lenet",
    "regression_net",
    "resnet18",
    "train",
]
