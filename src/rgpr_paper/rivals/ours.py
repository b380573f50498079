"""This library's answers: the residual's score and confidence over last-layer Laplace."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rgpr.metrics import confidence

from .base import Bench, Fitted, Rival, register_rival

_BASE = "LLL"


def _score(bench: Bench) -> Fitted:
    competing = bench.competing
    predict = competing.method(f"{_BASE}-RGPR-score").predict
    seconds = competing.method(f"{_BASE}-RGPR-onset").seconds["fit"]
    return Fitted(
        lambda x: -predict(x),
        "this library's defaults",
        seconds + competing.seconds[f"{_BASE}, fit"],
    )


def _confidence(name: str) -> Callable[[Bench], Fitted]:
    def fit(bench: Bench) -> Fitted:
        competing = bench.competing
        method = competing.method(name)
        seconds = sum(method.seconds.values()) + competing.seconds[f"{_BASE}, fit"]
        return Fitted(lambda x: -_surest(method.predict(x)), "this library's defaults", seconds)

    return fit


def _surest(p: Tensor) -> Tensor:
    return confidence(p).double()


_WORK = "this library"
register_rival(
    Rival(
        "LLL-RGPR-score",
        _WORK,
        "rgpr",
        "images",
        trains=True,
        fit=_score,
        source=_WORK,
        ours=True,
    )
)
register_rival(
    Rival(
        "LLL-RGPR-onset",
        _WORK,
        "rgpr",
        "images",
        trains=True,
        fit=_confidence(f"{_BASE}-RGPR-onset"),
        source=_WORK,
        ours=True,
    )
)
register_rival(
    Rival(
        "LLL",
        "Kristiadi et al. 2020",
        "rgpr, laplace-torch",
        "images",
        trains=True,
        fit=_confidence(_BASE),
        source=_WORK,
    )
)
