"""Small batches: ``python -m benchmarks.small_batches`` fills this part of docs/speed.md.

What was measured by ``python -m benchmarks latency`` lies in ``results/benchmarks``.
"""

from __future__ import annotations

from rgpr_paper.report import block_markdown
from rgpr_paper.section import Table

from .latency import PREDICT
from .pages import devices, fill, made, measured

__all__ = ["BENCHMARK", "PAGE", "section"]

BENCHMARK, PAGE = "latency", "speed.md"
_ALL = "all answers, by `predict`"


def section(device: str) -> str:
    """What was measured on a device, as the page shows it."""
    found = measured(device, BENCHMARK)
    # On a CPU nothing is recorded, so calls by default are the very same.
    usual = {} if device == "cpu" else measured(device, "prediction")
    rows: list[dict[str, str]] = []
    for case, row in found[BENCHMARK].items():
        network, ours = row["network"], row["LLL + RGPR"]
        ready = f"{ours['ready ratio']:.2f} x" if "ready ratio" in ours else "the same"
        missed = "" if ours["ratio"] <= ours["target"] else ", missed"
        cells = {
            "network, batch": case,
            "the network alone": f"{network['seconds'] * 1e3:.3g} ms",
            "one call after the other": f"{ours['ratio']:.2f} x ± {ours['spread']:.0%}",
            "until the answer is ready": ready,
            "goal for one after the other": f"{ours['target']:g} x{missed}",
        }
        if PREDICT in row:
            cells[_ALL] = f"{row[PREDICT]['ratio']:.2f} x"
        elif any(PREDICT in other for other in found[BENCHMARK].values()):
            cells[_ALL] = "the same"  # a file for ONNX Runtime always gives all answers
        if usual:
            name, mode = case.rsplit(", ", 1)
            by_default = usual["prediction"][f"{name.replace(',', ', float32,')}, {mode}"]
            heading = f"by default, on {usual['machine']['date']}"
            alone = by_default["network"]["seconds"] * 1e3
            cells[heading] = f"{by_default['LLL + RGPR']['ratio']:.2f} x of {alone:.3g} ms"
        rows.append(cells)
    table = Table(list(rows[0]), [list(row.values()) for row in rows])
    return "\n\n".join([f"{made(found, BENCHMARK)}.", *block_markdown(table, "")]) + "\n"


if __name__ == "__main__":
    for device in devices(BENCHMARK):
        fill(PAGE, f"small batches {device}", section(device))
