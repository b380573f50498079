r"""Detectors of strange inputs, to compare with: one score per input, higher is stranger.

With logits :math:`f(x)`, penultimate features :math:`h(x)` (the input of the last linear layer)
and the nearest of the class means :math:`\mu_c`:

- :class:`MaxSoftmax`: :math:`1 - \max_c \text{softmax}(f)_c`
- :class:`Energy`: :math:`-T \log \sum_c \exp(f_c / T)`
- :class:`Mahalanobis`: :math:`\min_c (h - \mu_c)^\top \Sigma^{-1} (h - \mu_c)`, summed over layers
- :class:`KNN`: distance of :math:`h/\|h\|` to the :math:`k`-th nearest in the training data
- :class:`ViM`: :math:`\alpha \|P^\perp (h - o)\| - \log \sum_c \exp f_c`

Each reads what it needs in the one forward pass that makes the logits. pytorch-ood's detectors
take a network that the user has cut in two and put into evaluation mode; where its arithmetic is
what we want, it is used underneath (ViM), and each of the others says why not.

:data:`DETECTORS` has all of them by name. A new one is a file in this folder with a subclass of
:class:`Detector` below ``@register_detector("its-name")``; every file of the folder is imported
here, so no list needs to know of it. In code of your own the same decorator does the same.
"""

from __future__ import annotations

from ..._discovery import import_files
from .base import DETECTORS, Detector, register_detector
from .energy import Energy
from .knn import KNN
from .mahalanobis import Mahalanobis
from .max_softmax import MaxSoftmax
from .vim import ViM

__all__ = [
    "DETECTORS",
    "KNN",
    "Detector",
    "Energy",
    "Mahalanobis",
    "MaxSoftmax",
    "ViM",
    "register_detector",
]

import_files(__name__, __path__)
