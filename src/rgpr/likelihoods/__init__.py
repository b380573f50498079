r"""Likelihoods: what a network's outputs stand for, and what its targets are, one file each.

| name | outputs ``(B, C)`` | targets | answer |
|---|---|---|---|
| ``"classification"`` | logits; one is that of class 1 | class indices | probabilities |
| ``"multilabel"`` | one logit for each label | zeros and ones ``(B, C)`` | probabilities |
| ``"regression"`` | numbers | numbers ``(B, C)`` | mean and covariance |

A file of this folder holds a subclass of :class:`Likelihood` with a ``name``, which registers it.
Names of likelihoods that the residual has no formula for are answered with words, see
:mod:`rgpr.likelihoods.refused`.
"""

from .._discovery import import_files
from .base import LIKELIHOODS, Likelihood
from .labels import LabelLikelihood
from .refused import likelihood_named

__all__ = ["LIKELIHOODS", "LabelLikelihood", "Likelihood", "likelihood_named"]

import_files(__name__, __path__)
