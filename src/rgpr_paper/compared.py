"""All measures of several methods on one network: what the experiments on detection keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rgpr._progress import bar

from .context import Context
from .data import notes_of, read_outliers
from .measures import measure, shortened
from .methods import contestants
from .units import Result

__all__ = ["compared"]


def compared(context: Context, name: str, seed: int, methods: Sequence[str]) -> Result:
    """A unit's result: every method over the network of a set and a seed, measured.

    Args:
        context: How to run; its recipe says how the network is trained.
        name: The in-distribution set.
        seed: The network's seed.
        methods: Names of :mod:`rgpr_paper.methods`.

    Raises:
        MissingDataError: The set itself is not there; outliers that are not are noted.
    """
    outliers, missing = read_outliers(context.data, name, context.device, context.download)
    competing = contestants(context, name, seed)
    measured: dict[str, Any] = {}
    tuning: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    for asked in bar(methods, "methods", True):
        method = competing.method(asked)
        measured[method.name] = measure(method.predict, competing.test, outliers)
        seconds |= {f"{method.name}, {part}": value for part, value in method.seconds.items()}
        if method.tuning is not None:
            tuning[method.name] = shortened(method.tuning)
    return {
        "set": name,
        "seed": seed,
        "notes": competing.notes | notes_of(outliers),
        "missing": missing,
        "sizes": {
            "train": len(competing.train.x),
            "validation": len(competing.validation.x),
            "test": len(competing.test.x),
            "outliers": {kind: len(images.x) for kind, images in outliers.items()},
        },
        "methods": measured,
        "tuning": tuning,
        "seconds": competing.seconds | seconds,
        "choices": [competing.choices],
    }
