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
_HEAD = [
    "network, batch",
    "the network alone",
    "with LLL and RGPR, one call after the other",
    "until the answer is ready",
    "goal for one after the other",
    "all answers, by `predict`",
]


def section(device: str) -> str:
    """What was measured on a device, as the page shows it."""
    found = measured(device, BENCHMARK)
    # The stored run of an H200 is from before `predict` was timed, too.
    head = _HEAD if any(PREDICT in row for row in found[BENCHMARK].values()) else _HEAD[:-1]
    rows = []
    for case, row in found[BENCHMARK].items():
        network, ours = row["network"], row["LLL + RGPR"]
        ready = f"{ours['ready ratio']:.2f} x" if "ready ratio" in ours else "the same"
        # A file for ONNX Runtime always gives all answers.
        everything = f"{row[PREDICT]['ratio']:.2f} x" if PREDICT in row else "the same"
        missed = "" if ours["ratio"] <= ours["target"] else ", missed"
        rows.append(
            [
                case,
                f"{network['seconds'] * 1e3:.3g} ms",
                f"{ours['ratio']:.2f} x",
                ready,
                f"{ours['target']:g} x{missed}",
                everything,
            ][: len(head)]
        )
    return (
        "\n\n".join([f"{made(found, BENCHMARK)}.", *block_markdown(Table(head, rows), "")]) + "\n"
    )


if __name__ == "__main__":
    for device in devices(BENCHMARK):
        fill(PAGE, f"small batches {device}", section(device))
