"""Base posteriors: one file each, behind the protocol of ``base``."""

from .base import Posterior, as_posterior, register_posterior
from .laplace import LaplacePosterior, LastLayerLaplace
from .map import MAP

__all__ = [
    "MAP",
    "LaplacePosterior",
    "LastLayerLaplace",
    "Posterior",
    "as_posterior",
    "register_posterior",
]
