"""Honest confidence far from the training data, for PyTorch models that are already trained.

``__all__`` holds what a user may import. A module in it is public with the names of its own
``__all__``; every other file is internal and may change. The API page lists the same names.
"""

from . import (
    answers,
    audit,
    baselines,
    guarantee,
    integrations,
    kernels,
    metrics,
    noise,
    posteriors,
    residual,
    saving,
    tuning,
)
from ._network.pickers import register_layer_picker
from .audit import Monitor, evaluate
from .model import RGPR, check, layers, load
from .posteriors import Posterior, as_posterior, register_posterior
from .residual.recipes import ResidualRecipe, Strategy
from .saving import export
from .states import CalibrationState, FitState

__all__ = [
    "RGPR",
    "CalibrationState",
    "FitState",
    "Monitor",
    "Posterior",
    "ResidualRecipe",
    "Strategy",
    "answers",
    "as_posterior",
    "audit",
    "baselines",
    "check",
    "evaluate",
    "export",
    "guarantee",
    "integrations",
    "kernels",
    "layers",
    "load",
    "metrics",
    "noise",
    "posteriors",
    "register_layer_picker",
    "register_posterior",
    "residual",
    "saving",
    "tuning",
]
__version__ = "0.2.0"


def __dir__() -> list[str]:
    """Names that a user may use, for completion: internal modules are attributes too."""
    return [*__all__, "__version__"]
