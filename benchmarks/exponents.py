"""Exponents of growth: ``python -m benchmarks.exponents`` fills docs/growth.md from the results.

For each device whose results are in ``results/benchmarks`` there is a table of what was measured.
"""

from __future__ import annotations

from rgpr_paper.report import block_markdown
from rgpr_paper.section import Table

from .growth import exponents, larger_half
from .pages import devices, fill, made, measured
from .table import short

BENCHMARK, PAGE = "growth", "growth.md"


def section(device: str) -> str:
    """What was measured on a device, as the page shows it."""
    found = measured(device, BENCHMARK)
    rows = []
    for axis, content in found[BENCHMARK].items():
        points = {int(size): point for size, point in content["sizes"].items()}
        time, memory = (exponents(points, what) for what in ("seconds", "memory"))
        for name, exponent in time.items():
            sizes = [size for size, point in points.items() if name in point]
            half = larger_half(sizes)
            rows.append(
                [
                    axis,
                    name,
                    _exponent(exponent),
                    _exponent(memory[name]) if name in memory else "",
                    f"{_spaced(half[0])} to {_spaced(half[-1])}",
                    _point(points[sizes[-1]][name]),
                ]
            )
    head = ["against", "of", "exponent of time", "of memory", "over", "at the largest"]
    said = f"{made(found, BENCHMARK)}."
    return "\n\n".join([said, *block_markdown(Table(head, rows), "")]) + "\n"


def _point(point: dict[str, float]) -> str:
    memory = f", {short(point['memory'] / 2**20)} MiB" if "memory" in point else ""
    return f"{short(point['seconds'] * 1e3)} ms{memory}"


def _exponent(value: float) -> str:
    return f"{round(value, 2) + 0.0:.2f}"  # no minus before a zero


def _spaced(size: int) -> str:
    return f"{size:,}".replace(",", " ")


if __name__ == "__main__":
    for device in devices(BENCHMARK):
        fill(PAGE, f"growth {device}", section(device))
