"""The summary in one picture: what the residual costs, and how it grows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rgpr._atomic import replacing
from rgpr.residual.recipes import RESIDUALS

# Panels of growth in a row.
_PANELS = 3


def draw(results: dict[str, Any], path: Path) -> bool:
    """Bars of ratios to the bare network or pass, and seconds against sizes, if there are any."""
    bars = _ratios(results)
    growth = results.get("growth", {})
    if not bars and not growth:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter

    # Growth has three panels in a row, each with its legend beside it.
    heights = [0.22 * len(bars) + 0.8, 2.4 * math.ceil(len(growth) / _PANELS)]
    figure = plt.figure(figsize=(11, sum(heights)), dpi=150, layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[max(height, 0.01) for height in heights])
    top = above.subplots()
    labels = [name for name, _ in bars][::-1]
    values = [ratio for _, ratio in bars][::-1]
    top.barh(labels, values, color=["C0" if "fit" not in name else "C2" for name in labels])
    top.axvline(1, color="0.3", lw=1)
    for place, value in enumerate(values):
        top.text(value, place, f" {value:.2f}", va="center", fontsize=7)
    top.set_xscale("log")
    top.set_xlim(min(0.9, 0.95 * min(values, default=1)), 1.3 * max(values, default=1))
    ticks = [t for t in (1, 1.15, 1.5, 2, 3, 5, 10, 20) if t < 1.3 * max(values, default=1)]
    top.set_xticks(ticks, [f"{t:g}" for t in ticks])
    top.set_xticks([], minor=True)
    top.margins(y=0.01)
    top.tick_params(labelsize=7)
    machine = results["machine"]
    top.set_title(
        f"time over the bare network (fit: over a bare pass); {machine['device']}, "
        f"{machine['threads']} threads, torch {machine['torch']}, {machine['date']}",
        fontsize=9,
    )
    names = dict.fromkeys(name for content in growth.values() for name in content["exponents"])
    colors = {name: f"C{number % 10}" for number, name in enumerate(names)}
    for number, (axis, content) in enumerate(growth.items(), start=1):
        panel = below.add_subplot(math.ceil(len(growth) / _PANELS), _PANELS, number)
        for name, exponent in content["exponents"].items():
            points = {int(n): r[name] for n, r in content["sizes"].items() if name in r}
            sizes, times = [*points], [r["seconds"] * 1e3 for r in points.values()]
            style = {"ms": 3, "lw": 1, "color": colors[name]}
            panel.loglog(sizes, times, "o-", label=f"{name}: {exponent:.2f}", **style)
        panel.set_xlabel(axis, fontsize=8)
        panel.set_ylabel("ms", fontsize=8)
        panel.tick_params(labelsize=7)
        panel.yaxis.set_minor_formatter(NullFormatter())
        beside = {"loc": "upper left", "bbox_to_anchor": (1, 1), "borderaxespad": 0}
        panel.legend(fontsize=6, frameon=False, title="exponents", title_fontsize=6, **beside)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", bbox_inches="tight")
    plt.close(figure)
    return True


def _ratios(results: dict[str, Any]) -> list[tuple[str, float]]:
    bars = [
        (case, contestants["LLL + RGPR"]["ratio"])
        for case, contestants in results.get("prediction", {}).items()
        if "LLL + RGPR" in contestants
    ]
    for case, contestants in results.get("fitting", {}).items():
        residuals = [name for name in contestants if name in RESIDUALS]
        bars += [(f"fit {name}: {case}", contestants[name]["ratio"]) for name in residuals]
    return bars
