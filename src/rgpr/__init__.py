"""Honest confidence far from the training data, for PyTorch models that are already trained."""

from .model import RGPR, check, load
from .posteriors import Posterior, as_posterior, register_posterior
from .residual.recipes import ResidualRecipe, Strategy
from .saving import export

__all__ = [
    "RGPR",
    "Posterior",
    "ResidualRecipe",
    "Strategy",
    "as_posterior",
    "check",
    "export",
    "load",
    "register_posterior",
]
__version__ = "0.2.0"
