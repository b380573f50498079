"""Tuning from loaders to a result; see :meth:`rgpr.RGPR.tune`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from typing import Any

from .._network.checks import one_of
from ..answers.examples import Parameters
from ..extension import Extension
from .budget import search_within_budget
from .objectives import OBJECTIVES, Data
from .options import Options
from .report import report
from .result import TuningResult
from .search import search
from .space import search_space

__all__ = ["tune"]


def tune(
    extension: Extension, val_loader: Iterable[Any], options: Options
) -> tuple[Parameters, TuningResult]:
    """The best parameters, and what the search for them did; nothing is changed.

    Args:
        extension: The base and its residual.
        val_loader: Validation data.
        options: What the user asked for.
    """
    started = time.perf_counter()
    options.check(extension)
    kind = OBJECTIVES[one_of("objective", options.objective, tuple(OBJECTIVES))]
    kind.check(options)
    objective = kind(extension, val_loader, options)
    if not isinstance(getattr(objective, "data", None), Data):
        raise TypeError(
            f"objective='{kind.name}' did not set self.data, a rgpr.tuning.Data of what it read; "
            "the search takes its units from it"
        )
    sigma2 = extension.residual.sigma2
    now = Parameters(sigma2, extension.temperature, sigma2.new_tensor(options.noise or 0.0))
    space, now = search_space(objective.data, now, extension.likelihood, options)
    if options.budgets:
        found = search_within_budget(objective, space, now, options)
    else:
        found = search(objective, space, now, options.weight)
    result = report(extension, objective, found, time.perf_counter() - started)
    for note in result.warnings:
        warnings.warn(note, stacklevel=5)  # through the decorators of RGPR.tune
    return found.tuned, result
