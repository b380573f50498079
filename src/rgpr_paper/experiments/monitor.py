r"""Ours: false alarms of a monitor over long streams, and how soon it sees a shift.

Scores are normal, as are those of the validation data. Each of 10 000 streams has validation data
of its own and 10 000 inputs like them, and a martingale bets on three kinds of p-values: ranks
among the validation scores and all earlier inputs, exactly and in the bins of
:class:`rgpr.Monitor`, and ranks among the validation scores alone. The share of streams that ever
alarm is to be at most ``alpha``. With 2000 validation inputs there are also 500 streams of 100 000.

For delays the mean of the scores moves, after 1000 quiet inputs or from the first input on. Beside
the monitor are CUSUM, made for a shift of one standard deviation upwards, and a sliding
Kolmogorov-Smirnov test on the last 100 inputs, looked at after every tenth. These two promise
nothing by themselves: their limits are set by simulation such that 1 % of the quiet streams of
10 000 alarm. The monitor's limit is 1 / ``alpha``, and is set by nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..context import Context
from ..experiment import Experiment, register
from ..figures import COLORS, drawing
from ..section import Claim, Figure, Section, Table, Text, provenance
from ..streams import (
    Array,
    Integers,
    capital,
    cusum,
    first_above,
    p_values,
    scores,
    sliding_ks,
)
from ..units import Result, Unit, read_units, run_units

__all__ = ["delays_table", "false_alarms_table", "render", "run"]

NAME = "monitor"
KINDS = {
    "exact": "online ranks, exact",
    "binned": "online ranks, binned: the monitor",
    "fixed": "validation data alone",
}
VALIDATION = (200, 2000)
LONG = 2000
ALPHAS = (0.01, 0.05, 0.1)
ALPHA = 0.01
SHIFTS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
QUIET = (0, 1000)
WINDOW, STEP = 100, 10
METHODS = ("monitor", "CUSUM", "sliding KS")
# Streams that are simulated at a time, so that memory stays small.
_AT_A_TIME = 250


def run(context: Context) -> None:
    """A unit for each kind of p-value and size of validation data, and one for delays of each."""
    streams, length = (100, 1000) if context.small else (10_000, 10_000)
    after = (50, 500) if context.small else (1000, 4000)
    seed = context.seeds[0]
    units = {
        f"false-{kind}-{m}": partial(_false_alarms, (seed, m), kind, streams, length)
        for kind in KINDS
        for m in VALIDATION
    }
    units |= {
        f"delay-{m}": partial(_delays, (seed, m, 1), (streams, length), after) for m in VALIDATION
    }
    run_units(context, NAME, units, seed=seed, streams=streams, length=length, after=list(after))
    streams, length = (20, 2000) if context.small else (500, 100_000)
    units = {
        f"long-{kind}-{LONG}": partial(_false_alarms, (seed, LONG), kind, streams, length)
        for kind in ("fixed", "binned")
    }
    run_units(context, NAME, units, seed=seed, streams=streams, length=length)


def _parts(streams: int, length: int = 0) -> Iterator[int]:
    most = _AT_A_TIME if length <= 10_000 else 100
    for begin in range(0, streams, most):
        yield min(most, streams - begin)


def _false_alarms(seed: tuple[int, ...], kind: str, streams: int, length: int) -> Result:
    """Which streams without any change raise an alarm, and when."""
    generator = np.random.default_rng(seed)
    when: dict[float, list[Integers]] = {alpha: [] for alpha in ALPHAS}
    for part in _parts(streams, length):
        references = generator.standard_normal((part, seed[1]))
        stream = scores(generator, (part, length), 0, 0.0)
        path = capital(p_values(generator, references, stream, kind))
        for alpha in ALPHAS:
            when[alpha].append(first_above(path, math.log(1 / alpha)))
    points = np.unique(np.geomspace(10, length, 60).round().astype(int))
    shares = {}
    for alpha, found in when.items():
        alarms = np.concatenate(found)
        shares[str(alpha)] = [float(((alarms > 0) & (alarms <= n)).mean()) for n in points]
    return {"kind": kind, "validation": seed[1], "inputs": points.tolist(), "shares": shares}


def _delays(seed: tuple[int, ...], null: tuple[int, int], after: tuple[int, int]) -> Result:
    """Limits of the other tests from quiet streams, then delays of all for every shift."""
    generator = np.random.default_rng(seed)
    streams, length = null
    peaks: dict[str, list[Array]] = {"CUSUM": [], "sliding KS": []}
    for part in _parts(streams):
        references = generator.standard_normal((part, seed[1]))
        stream = scores(generator, (part, length), 0, 0.0)
        peaks["CUSUM"].append(cusum(references, stream).max(1))
        peaks["sliding KS"].append(sliding_ks(references, stream, WINDOW, STEP).max(1))
    limits = {
        name: float(np.quantile(np.concatenate(found), 1 - ALPHA, method="higher"))
        for name, found in peaks.items()
    }
    limits["monitor"] = math.log(1 / ALPHA)
    rows: list[dict[str, Any]] = []
    for quiet in QUIET:
        quiet = min(quiet, length // 2)
        for shift in SHIFTS:
            numbers = _alarms(
                generator, (after[0], quiet + after[1]), (seed[1], quiet, shift), limits
            )
            rows += [_summary(name, quiet, shift, numbers[name]) for name in METHODS]
    return {"validation": seed[1], "limits": limits, "delays": rows}


def _alarms(
    generator: np.random.Generator,
    shape: tuple[int, int],
    case: tuple[int, int, float],
    limits: dict[str, float],
) -> dict[str, Integers]:
    """Number of the first input of each stream that raises an alarm, zero for none, by method."""
    found: dict[str, list[Integers]] = {name: [] for name in METHODS}
    for part in _parts(shape[0]):
        references = generator.standard_normal((part, case[0]))
        stream = scores(generator, (part, shape[1]), *case[1:])
        path = capital(p_values(generator, references, stream, "binned"))
        found["monitor"].append(first_above(path, limits["monitor"]))
        found["CUSUM"].append(first_above(cusum(references, stream), limits["CUSUM"]))
        distance = sliding_ks(references, stream, WINDOW, STEP)
        looks = first_above(distance, limits["sliding KS"])
        found["sliding KS"].append(np.where(looks, WINDOW + (looks - 1) * STEP, 0))
    return {name: np.concatenate(numbers) for name, numbers in found.items()}


def _summary(name: str, quiet: int, shift: float, numbers: Integers) -> dict[str, Any]:
    early = (numbers > 0) & (numbers <= quiet)
    rest = numbers[~early]
    delays = np.where(rest > 0, rest - quiet, np.inf)
    return {
        "method": name,
        "quiet": quiet,
        "shift": shift,
        "median": float(np.median(delays)),
        "seen": float((rest > 0).mean()),
        "early": float(early.mean()),
    }


# -- what it shows -------------------------------------------------------------------------------


def render(folder: Path) -> Section:
    """Both tables, the picture and the claims."""
    units = read_units(folder)
    false = [unit for unit in units if unit.name.startswith("false")]
    long = [unit for unit in units if unit.name.startswith("long")]
    delays = [unit for unit in units if unit.name.startswith("delay")]
    section = Section([_figure(folder, false, delays), false_alarms_table(false)])
    section.add(false_alarms_table(long))
    section.add(*(delays_table(unit) for unit in delays))
    section.add(
        Text(
            "A cell is the median number of inputs from the change to the alarm; in parentheses is "
            "the share of streams that alarmed at all within the inputs that were simulated after "
            "it. Streams that alarmed before the change are left out."
        ),
        *provenance(units),
    )
    section.claims = _claims(false, long, delays)
    return section


def _ever(unit: Unit, alpha: float = ALPHA) -> float:
    return float(unit.result["shares"][str(alpha)][-1])


def false_alarms_table(units: list[Unit]) -> Table:
    """The share of quiet streams that ever raised an alarm."""
    length = units[0].settings["length"]
    head = ["p-values from", "validation inputs", *(f"alpha = {alpha:.0%}" for alpha in ALPHAS)]
    rows = [
        [KINDS[kind], str(m), *(f"{_ever(unit, alpha):.2%}" for alpha in ALPHAS)]
        for kind in KINDS
        for m in VALIDATION
        for unit in units
        if (unit.result["kind"], unit.result["validation"]) == (kind, m)
    ]
    streams = units[0].settings["streams"]
    caption = f"False alarms: the share of {streams:,} streams of {length:,} that ever alarmed."
    return Table(head, rows, caption.replace(",", " "))


def delays_table(unit: Unit) -> Table:
    """Delays of all methods, for one size of validation data."""
    rows = unit.result["delays"]
    quiets = sorted({row["quiet"] for row in rows})
    head = ["shift", *(f"{name}, {quiet} quiet" for quiet in quiets for name in METHODS)]
    cells = {(row["quiet"], row["method"], row["shift"]): _cell(row) for row in rows}
    table = [
        [f"{shift:g}", *(cells[quiet, name, shift] for quiet in quiets for name in METHODS)]
        for shift in SHIFTS
    ]
    m = unit.result["validation"]
    caption = (
        f"Delay against the shift in standard deviations, {m} validation inputs, after 0 or "
        f"{quiets[-1]} quiet inputs."
    )
    return Table(head, table, caption)


def _cell(row: dict[str, Any]) -> str:
    median = "-" if row["median"] is None else f"{row['median']:.0f}"
    return f"{median} ({row['seen']:.0%})"


def _claims(false: list[Unit], long: list[Unit], delays: list[Unit]) -> list[Claim]:
    online = [unit for unit in (*false, *long) if unit.result["kind"] != "fixed"]
    fixed = [unit for unit in (*false, *long) if unit.result["kind"] == "fixed"]
    shown = [f"{u.result['kind']}, {_sizes(u)}: {_ever(u):.2%}" for u in online]
    lost = [f"{_sizes(unit)}: {_ever(unit):.2%}" for unit in fixed]
    far = [u for u in fixed if u.settings["length"] >= 50 * u.result["validation"]]
    seen = {unit.result["validation"]: _strong(unit) for unit in delays}
    return [
        Claim(
            "the chance of ever raising a false alarm is at most alpha",
            "; ".join(shown),
            all(_ever(unit, alpha) <= alpha for unit in online for alpha in ALPHAS),
            ours=True,
        ),
        Claim(
            "against the validation data alone the bound is lost on streams 50 times as long",
            "; ".join(lost),
            bool(far) and all(_ever(unit) - 2 * _error(unit) > ALPHA for unit in far),
            "Lost means beyond two standard errors. With 200 validation inputs it is lost after "
            "little more than a hundred inputs. With 2000 there is no promise either, but the "
            "excess is small, probably because a bias of that size wins less at each input than "
            "the bets lose by jumping at a rate of 0.001.",
            ours=True,
        ),
        Claim(
            "a shift of two standard deviations after quiet inputs is seen in every stream",
            "; ".join(f"{m} validation inputs: {share:.1%}" for m, share in seen.items()),
            all(share == 1 for share in seen.values()),
            ours=True,
        ),
    ]


def _error(unit: Unit) -> float:
    """The standard error of the share of streams with an alarm."""
    return math.sqrt(_ever(unit) * (1 - _ever(unit)) / float(unit.settings["streams"]))


def _sizes(unit: Unit) -> str:
    return f"{unit.result['validation']} and {unit.settings['length']} inputs"


def _strong(unit: Unit) -> float:
    """The share of streams in which the monitor saw a shift of two after quiet inputs."""
    rows = [r for r in unit.result["delays"] if r["method"] == "monitor" and r["shift"] == 2]
    return float(max(rows, key=lambda row: row["quiet"])["seen"])


def _figure(folder: Path, false: list[Unit], delays: list[Unit]) -> Figure:
    caption = (
        "Left: the share of quiet streams that have alarmed so far, for alpha = 1 % (dotted line). "
        "Right: the median delay after 1000 quiet inputs against the shift of the scores, where at "
        "least half of the streams alarmed."
    )
    styles = {200: "--", 2000: "-"}
    with drawing(folder, NAME, caption, ncols=2, figsize=(7.6, 3.0)) as (_, axes, block):
        left, right = axes
        colors = dict(zip(KINDS, COLORS, strict=False))
        for unit in false:
            kind, m = unit.result["kind"], unit.result["validation"]
            share = np.maximum(unit.result["shares"][str(ALPHA)], 1e-5)
            label = f"{KINDS[kind].partition(':')[0]}, {m}"
            left.plot(unit.result["inputs"], share, styles[m], color=colors[kind], label=label)
        left.axhline(ALPHA, color="0.4", ls=":", lw=1)
        left.set(xscale="log", yscale="log", xlabel="inputs", ylabel="streams with an alarm")
        left.set_ylim(5e-5, 1.5)
        left.legend(fontsize=7)
        for unit in delays:
            m = unit.result["validation"]
            quiet = max(row["quiet"] for row in unit.result["delays"])
            for name, color in zip(METHODS, COLORS[1:], strict=False):
                rows = [
                    (row["shift"], row["median"])
                    for row in unit.result["delays"]
                    if (row["method"], row["quiet"]) == (name, quiet) and row["median"] is not None
                ]
                if rows:
                    right.plot(*zip(*rows, strict=True), styles[m], marker="o", ms=3, color=color,
                               label=f"{name}, {m}")  # fmt: skip
        right.set(yscale="log", xlabel="shift in standard deviations", ylabel="median delay")
        right.legend(fontsize=7)
    return block


register(
    Experiment(
        name=NAME,
        title="A monitor's false alarms and delays",
        place=180,
        run=run,
        render=render,
    )
)
