"""The results as Markdown."""

from __future__ import annotations

from typing import Any

# Keys of results that are no benchmarks: where they were made, and by which commits.
_ABOUT = ("machine", "made")


def markdown(results: dict[str, Any]) -> str:
    """All tables: what was measured, on what, and when."""
    machine = results["machine"]
    parts = [
        f"Measured on {machine['date']}: {machine['device']}, {machine['cores']} cores, "
        f"{machine['threads']} threads, torch {machine['torch']}, Python {machine['python']}. "
        "Medians of alternating rounds; after ± the interquartile range over the median."
    ]
    if any("ready" in r for r in _rows(results)):
        parts[0] += (
            " Calls follow each other without waiting; until ready: each waits for the answer of "
            "the one before."
        )
    for name, cases in results.items():
        if name == "growth":
            parts.append(_growth(cases))
        elif name not in _ABOUT:
            parts.append(_cases(name, cases))
    return "\n\n".join(parts) + "\n"


def _rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What was measured of every contestant of every case."""
    found = []
    for name, cases in results.items():
        if name not in ("growth", *_ABOUT):
            found += [r for case in cases.values() for r in case.values()]
    return found


def _cases(name: str, cases: dict[str, Any]) -> str:
    memory = any("memory" in r for case in cases.values() for r in case.values())
    ready = any("ready" in r for case in cases.values() for r in case.values())
    head = [name, "", "ms", "x"] + (["ms until ready", "x"] if ready else [])
    head += ["MiB"] if memory else []
    lines = [_row(head), "|---" * len(head) + "|"]
    for case, contestants in cases.items():
        for number, (contestant, r) in enumerate(contestants.items()):
            time = f"{short(r['seconds'] * 1e3)} ± {r['spread']:.0%}"
            cells = ["" if number else case, contestant, time, f"{r['ratio']:.3f}"]
            if ready:
                known = "ready" in r
                cells.append(short(r["ready"] * 1e3) if known else "")
                cells.append(f"{r['ready ratio']:.3f}" if known else "")
            if memory:
                cells.append(f"{r['memory'] / 2**20:.0f}" if "memory" in r else "")
            if "floor" in r:
                cells[3] += f" (floor {1 + r['floor'] / r['seconds']:.3f})"
            lines.append(_row(cells))
    return "\n".join(lines)


def _growth(axes: dict[str, Any]) -> str:
    lines = [_row(["growth with", "of", "exponent", "ms", "of memory", "MiB"]), "|---" * 6 + "|"]
    for axis, content in axes.items():
        for name, exponent in content["exponents"].items():
            points = {size: r[name] for size, r in content["sizes"].items() if name in r}
            times = [f"{size}: {short(r['seconds'] * 1e3)}" for size, r in points.items()]
            memory = [
                f"{size}: {short(r['memory'] / 2**20)}"
                for size, r in points.items()
                if "memory" in r
            ]
            grows = content.get("memory exponents", {}).get(name)
            shown = "" if grows is None else f"{grows:.2f}"
            lines.append(
                _row([axis, name, f"{exponent:.2f}", ", ".join(times), shown, ", ".join(memory)])
            )
    return "\n".join(lines)


def short(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
