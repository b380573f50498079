"""Words that name a likelihood which the residual has no formula for, and what works instead.

The residual widens a Gaussian over the outputs. A loss that reads its outputs otherwise needs a
formula of its own, and taking such outputs for means or logits would give wrong answers in silence.
"""

from __future__ import annotations

from .base import LIKELIHOODS, Likelihood

__all__ = ["likelihood_named"]

_ONE_HEAD = (
    "wrap the network in a module that returns the {what} alone, e.g. f(x)[:, :1], and use "
    "likelihood='regression': the residual's variance is then that of the {what}"
)
_DENSE = (
    "one answer for every pixel or token is not there. The score of a whole input is: wrap the "
    "network so that it returns one vector for each input, e.g. nn.Sequential(network, "
    "nn.AdaptiveAvgPool2d(1), nn.Flatten()), use likelihood='regression', and fit and calibrate "
    "with inputs alone; then score, p_value and flag work"
)
_INSTEAD = {
    "binary": "use likelihood='classification', which takes one output for the logit of class 1",
    "heteroscedastic": _ONE_HEAD.format(what="mean"),
    "quantile": _ONE_HEAD.format(what="median"),
    "poisson": "likelihood='regression' over the logarithm of the rate gives that its variance, "
    "and score, p_value and flag work; fit and calibrate with inputs alone",
    "segmentation": _DENSE,
    "ordinal": "use likelihood='classification' with one output for each class, which ignores "
    "their order, or likelihood='regression' over the one number behind them",
}
_ALIASES = {
    "bce": "binary",
    "bernoulli": "binary",
    "gaussian_nll": "heteroscedastic",
    "pinball": "quantile",
    "quantiles": "quantile",
    "count": "poisson",
    "dense": "segmentation",
    "token": "segmentation",
}
_OTHERS = "If the outputs are something else, wrap the network so that it returns logits or numbers"


def likelihood_named(name: str) -> Likelihood:
    """The likelihood with this name.

    Raises:
        ValueError: There is none; the message says what to use instead.
    """
    found = LIKELIHOODS.get(name)
    if found is None:
        word = str(name).lower().replace("-", "_")
        remedy = _INSTEAD.get(_ALIASES.get(word, word), _OTHERS)
        known = ", ".join(map(repr, LIKELIHOODS))
        raise ValueError(f"likelihood={name!r} is not one of {known}: {remedy}")
    return found
