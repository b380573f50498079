r"""Residuals modelled by Gaussian processes that are fitted, unlike ours.

.. math:: \tilde f(x) = f_\mu(x) + \hat f(x), \quad \hat f \sim GP(0, k)
          \;\Longrightarrow\; \tilde f(x) \mid D \sim N(f_\mu(x) + m(x),\, v(x)),

with the posterior mean :math:`m` and variance :math:`v` of the GP given the residuals
:math:`y - f_\mu(x)`; for classification, given labels behind a softmax of :math:`\tilde f`. Each
output has its own GP. The versions differ in :math:`f_\mu` and :math:`k`:

- **GP-DSCS**: a network; DSCS kernels on inputs and on the network's outputs, added.
- **RIO** (Qiu et al., 2020): a network; RBF kernels on inputs and outputs, added.
- **Blight and Ott** (1975): a polynomial; an RBF kernel on inputs.

Each version is a file. ``base.py`` has their contract and fit, ``training_set.py`` what they are
fitted to, and ``exact.py`` exact inference.

Regression with few rows is exact: :math:`L L^\top = K + \sigma^2 I`, :math:`A = L^{-1} k(X, x)`,
:math:`m = A^\top L^{-1} (y - f_\mu)`, :math:`v = k(x, x) - \|A\|^2`. All else has inducing points.
"""

from __future__ import annotations

from .base import FitOptions, GPResidual
from .blight_ott import BlightOtt
from .dscs import GPDSCS
from .rio import RIO

__all__ = ["GPDSCS", "RIO", "BlightOtt", "FitOptions", "GPResidual"]
