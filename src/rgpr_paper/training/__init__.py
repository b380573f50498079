"""Training the networks of the experiments: architectures, recipes, one resumable loop.

The library itself wraps networks that are already trained; nothing outside the experiments needs
this package.
"""

from __future__ import annotations

from .architectures import lenet, regression_net, resnet18
from .recipe import Recipe
from .train import History, train

__all__ = ["History", "Recipe", "lenet", "regression_net", "resnet18", "train"]
