"""Honest confidence far from the training data, for PyTorch models that are already trained."""

from .assumptions import check
from .coordinates import ResidualRecipe, Strategy
from .files import load
from .model import RGPR
from .posteriors import Posterior, as_posterior, register_posterior

__all__ = [
    "RGPR",
    "Posterior",
    "ResidualRecipe",
    "Strategy",
    "as_posterior",
    "check",
    "load",
    "register_posterior",
]
__version__ = "0.2.0"
