r"""Links: from Gaussian outputs to probabilities, one file each.

The outputs are :math:`N(m, V)`, the base posterior's mean and covariance. A link turns them and an
extra variance ``v`` into logits, whose softmax is the answer (:mod:`rgpr.likelihoods`); one output
means two classes, with the logits 0 and f. There are two ways in which a residual comes in:

- the paper's adds to the covariance, :math:`N(m, V + v I)`: the link gets ``v``;
- the default's is averaged over after the base's: the link gets ``v = 0``, and its logits are
  divided by :math:`\sqrt{1 + \frac\pi8 v}`. Dividing all of the base's logits by one number keeps
  the order of the classes and their ties.

A link of your own is registered by :func:`register_link` and can then be named as ``link_approx``.
Monte Carlo (``"mc"``) is not one of them: it averages over samples, see
:func:`rgpr.answers.probabilities.monte_carlo`.
"""

from ..._discovery import import_files
from .base import LINKS, Link, register_link
from .bridge import bridge, bridge_logits
from .probit import probit, probit_logits

__all__ = [
    "LINKS",
    "Link",
    "bridge",
    "bridge_logits",
    "probit",
    "probit_logits",
    "register_link",
]

import_files(__name__, __path__)
