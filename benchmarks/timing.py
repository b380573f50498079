"""Measure several things in turn, so that whatever disturbs the machine disturbs all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def race(contestants: Mapping[str, Callable[[], Any]], *, rounds: int = 15) -> dict[str, Any]:
    """Median seconds and spread of each, in alternating rounds after one to warm up.

    Returns:
        For each name ``seconds``, ``spread`` (interquartile range over the median) and ``ratio``
        to the first contestant.
    """
    for run in contestants.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    first = statistics.median(times[next(iter(times))])
    results = {}
    for name, seconds in times.items():
        median = statistics.median(seconds)
        low, _, high = statistics.quantiles(seconds, n=4)
        results[name] = {
            "seconds": median,
            "spread": (high - low) / median,
            "ratio": median / first,
        }
    return results
