"""The ReLU-GP residual: from representations to a variance.

``coordinates`` and ``prototypes`` are the maps in which a representation's distance from the data
is measured, ``collecting`` learns them from one pass, ``recipes`` says which map goes where, and
``variance`` turns the distances of all layers into one number. ``exact`` holds the exact Gaussian
process for small data, to compare with. The kernel itself is :mod:`rgpr.kernels`.
"""

from . import exact
from .recipes import ResidualRecipe, Strategy

__all__ = ["ResidualRecipe", "Strategy", "exact"]
