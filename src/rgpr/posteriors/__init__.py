"""Base posteriors: what the residual is added to, one file each behind the contract of ``base``.

A posterior gives a Gaussian over a network's outputs (``gaussian``), and a link makes probabilities
of it (``links/``). A new posterior is a file here with a subclass of :class:`Posterior`; every file
of the folder is imported below. To have it in the table of all posteriors and in the tests that
each of them passes, add it to ``rgpr_paper/posterior_table.py``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .._discovery import import_files
from .base import Closed, Posterior, as_posterior, register_posterior
from .dropout import MCDropout
from .ensemble import Ensemble
from .function import FunctionPosterior
from .gaussian import DenseGaussian, DiagonalGaussian, Gaussian
from .laplace_torch import LaplacePosterior
from .last_layer_laplace import LastLayerLaplace
from .links import Link, register_link
from .map import MAP
from .prior_precision import choose_prior_precision
from .sampled import SampledPosterior, WeightPosterior
from .swag import SWAG, SWAGCollector
from .temperature import Temperature
from .weight_laplace import KFL, DiagonalLaplace, fit_laplace

if TYPE_CHECKING:
    from .svdkl import SVDKL
    from .svgp import SVGP

__all__ = [
    "KFL",
    "MAP",
    "SVDKL",
    "SVGP",
    "SWAG",
    "Closed",
    "DenseGaussian",
    "DiagonalGaussian",
    "DiagonalLaplace",
    "Ensemble",
    "FunctionPosterior",
    "Gaussian",
    "LaplacePosterior",
    "LastLayerLaplace",
    "Link",
    "MCDropout",
    "Posterior",
    "SWAGCollector",
    "SampledPosterior",
    "Temperature",
    "WeightPosterior",
    "as_posterior",
    "choose_prior_precision",
    "fit_laplace",
    "register_link",
    "register_posterior",
]

# These need gpytorch, which is an extra: imported when first asked for.
_LAZY = {"SVGP": ".svgp", "SVDKL": ".svdkl"}
import_files(__name__, __path__, but=("svgp", "svdkl", "gaussian_processes"))


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _from_gpytorch(model: Any) -> Posterior:
    from .svgp import SVGP

    return SVGP(model)


register_posterior("gpytorch.models.gp.GP", _from_gpytorch)
