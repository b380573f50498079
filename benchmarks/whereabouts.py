"""Where time goes: ``python -m benchmarks.whereabouts`` fills this part of docs/speed.md.

What was measured by ``python -m benchmarks profile`` lies in ``results/benchmarks``.
"""

from __future__ import annotations

from rgpr_paper.report import block_markdown
from rgpr_paper.section import Table

from .pages import devices, fill, made, measured

__all__ = ["BENCHMARK", "PAGE", "section"]

BENCHMARK, PAGE = "profile", "speed.md"
# Rows that are no parts of a call.
_WHOLE = ("the bare network", "model(x)")


def section(device: str) -> str:
    """What was measured on a device, as the page shows it: microseconds of each part."""
    found = measured(device, BENCHMARK)
    cases = found[BENCHMARK]
    parts: dict[str, float] = {}
    for case in cases.values():
        for name, row in case.items():
            parts[name] = parts.get(name, 0.0) + row["ratio"]
    order = [*_WHOLE, *sorted(parts.keys() - set(_WHOLE), key=lambda name: -parts[name])]
    rows = [[name, *(_micro(case.get(name)) for case in cases.values())] for name in order]
    return (
        "\n\n".join(
            [
                f"{made(found, BENCHMARK)}; microseconds.",
                *block_markdown(Table(["", *cases], rows), ""),
            ]
        )
        + "\n"
    )


def _micro(row: dict[str, float] | None) -> str:
    return "-" if row is None else f"{row['seconds'] * 1e6:.0f}"


if __name__ == "__main__":
    for device in devices(BENCHMARK):
        fill(PAGE, f"profile {device}", section(device))
