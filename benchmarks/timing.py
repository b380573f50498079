"""Measure several things in turn, so that whatever disturbs the machine disturbs all of them."""

from __future__ import annotations

import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Collection, Mapping
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

# One measurement repeats a short call until it takes so long.
_LEAST = 0.03
# What takes longer than this is measured once a round, without a call before it.
_SLOW = 1.0


def race(
    contestants: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 11,
    device: str = "cpu",
    seconds: float = 20.0,
    memory: bool = True,
    long: Collection[str] = (),
    latency: bool = False,
) -> dict[str, Any]:
    """Medians of each in alternating rounds; where calls are short, one more before each.

    Calls follow each other without waiting, as in a loop over batches: on a GPU what Python does
    for one hides behind the kernels of the one before, if they take longer.

    Args:
        contestants: What to call; the first is what the others are compared with.
        rounds: At most so many.
        device: Whose work to wait for, and whose memory to watch.
        seconds: No new round begins after so long.
        memory: Whether to watch it; CUDA graphs have theirs from before.
        long: Names of what takes minutes, and is called once before the rounds.
        latency: Whether to measure on a GPU the time until an answer is ready, too: then every
            call waits for the one before to end, as a service with one request at a time does.

    Returns:
        For each name ``seconds``, ``spread`` (interquartile range over the median), ``ratio`` (the
        median, over the rounds, of its time over the first contestant's) and on a GPU ``memory``,
        the bytes that one call takes at most beyond what was there, and ``host``, the seconds until
        the call returns: where these are as many, the GPU waits for Python. With ``latency``
        also ``ready`` and ``ready ratio``, the time until an answer is ready.
    """
    cuda = torch.device(device).type == "cuda"

    def measure(run: Callable[[], Any], times: int, warm: bool = False) -> tuple[float, float]:
        if cuda:
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if warm:  # caches hold what another one left, and a GPU would wait for the first kernel
            run()
        if cuda:
            begin.record()
        started = time.perf_counter()
        for _ in range(times):
            run()
        host = total = time.perf_counter() - started
        if cuda:
            end.record()
            end.synchronize()
            total = begin.elapsed_time(end) / 1e3
        return total / times, host / times

    def waited(run: Callable[[], Any], times: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(times):
            run()
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / times

    repeats, peaks, slow = {}, {}, set()
    for name, run in contestants.items():
        # The first call may wait for compilers: another one tells how long it takes.
        peaks[name] = _memory(run) if cuda else run()
        if name in long or measure(run, 1)[0] > _SLOW:
            repeats[name] = 1
            slow.add(name)
            continue
        peaks[name] = _memory(run) if cuda else None
        # The shortest of three: one that is interrupted would look slow, and be called once.
        shortest = min(measure(run, 1)[0] for _ in range(3))
        repeats[name] = max(1, math.ceil(_LEAST / max(shortest, 1e-7)))
    warm = max(repeats.values()) > 1
    times: dict[str, list[float]] = {name: [] for name in contestants}
    hosts: dict[str, list[float]] = {name: [] for name in contestants}
    ready: dict[str, list[float]] = {name: [] for name in contestants}
    began = time.perf_counter()
    for number in range(rounds):
        if number >= 1 and time.perf_counter() - began > seconds:
            break
        for name, run in contestants.items():
            total, host = measure(run, repeats[name], warm and name not in slow)
            times[name].append(total)
            hosts[name].append(host)
            if cuda and latency:
                ready[name].append(waited(run, repeats[name]))
    first = times[next(iter(times))]
    results = {}
    for name, taken in times.items():
        median = statistics.median(taken)
        low, _, high = statistics.quantiles(taken, n=4) if len(taken) > 1 else [median] * 3
        results[name] = {
            "seconds": median,
            "spread": (high - low) / median,
            "ratio": statistics.median(t / f for t, f in zip(taken, first, strict=True)),
        }
        if cuda:
            results[name]["host"] = statistics.median(hosts[name])
        if ready[name]:
            alone = ready[next(iter(ready))]
            results[name]["ready"] = statistics.median(ready[name])
            results[name]["ready ratio"] = statistics.median(
                t / f for t, f in zip(ready[name], alone, strict=True)
            )
        if cuda and memory:
            results[name]["memory"] = peaks[name]
    return results


def _memory(run: Callable[[], Any]) -> int:
    """Bytes that a call takes at most, beyond those taken before it."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def tensor_memory(run: Callable[[], Any]) -> int:
    """The most bytes that tensors on a CPU take at a time during a call, by torch's profiler.

    What other libraries allocate by themselves, such as scikit-learn's trees, is not seen.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with TemporaryDirectory() as folder:
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            kept = run()
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [(each["ts"], each["args"]["Bytes"]) for each in events if each["name"] == "[memory]"]
    del kept
    return max(accumulate(size for _, size in sorted(changes, key=itemgetter(0))), default=0)


def slope(sizes: list[int], seconds: list[float]) -> float:
    """The exponent of growth: the slope of the logarithms, by least squares."""
    x, y = [math.log(s) for s in sizes], [math.log(max(s, 1e-9)) for s in seconds]
    return statistics.linear_regression(x, y).slope
