"""``python -m benchmarks``: run all or some, print ratios, write JSON, tables and a picture."""

from __future__ import annotations

import argparse
import json
import os
import platform
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from rgpr._atomic import replacing
from rgpr_paper.hardware import processor
from rgpr_paper.units import made_with

from .picture import draw
from .table import markdown

NAMES = (
    "prediction",
    "latency",
    "profile",
    "fitting",
    "growth",
    "scaling",
    "gram",
    "startup",
    "bases",
    "tuning",
)
CPU_ONLY = ("scaling", "bases", "tuning")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"), help="a folder")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.device}.json"
    # What other runs on this machine measured stays, unless it is measured again.
    results = json.loads(path.read_text()) if path.exists() else {}
    if results.get("machine", {}) | {"date": None} != machine(options.device) | {"date": None}:
        results = {}
    results["machine"] = machine(options.device)
    for name in options.names or NAMES:
        if options.device != "cpu" and name in CPU_ONLY:
            continue
        benchmark = import_module(f".{name}", __package__)
        print(f"\n{benchmark.__doc__.strip()}", flush=True)
        results[name] = {}
        results.setdefault("made", {})[name] = made_with(options.device)
        for case, result in benchmark.run(options.device):
            results[name][case] = result
            show(case, result)
            with replacing(path) as temporary:
                temporary.write_text(json.dumps(results, indent=1) + "\n")
    with replacing(path.with_suffix(".md")) as temporary:
        temporary.write_text(markdown(results))
    drawn = draw(results, path.with_suffix(".png"))
    beside = "tables (.md) and a picture (.png)" if drawn else "tables (.md)"
    print(f"\nwritten to {path.resolve()}, with {beside} beside it")


def machine(device: str) -> dict[str, Any]:
    """What it was measured on."""
    cuda = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }


def show(case: str, result: dict[str, Any]) -> None:
    """Print one case: its contestants, or exponents of growth."""
    print(f"  {case}")
    if "exponents" in result:
        for name, exponent in result["exponents"].items():
            times = [r[name]["seconds"] * 1e3 for r in result["sizes"].values() if name in r]
            shown = "  ".join(f"{t:.2f}" for t in times)
            print(f"    {name:15}exponent {exponent:.2f}   ms: {shown}", flush=True)
        return
    for name, r in result.items():
        memory = f"   {r['memory'] / 2**20:>8.0f} MiB" if "memory" in r else ""
        host = f"   host {r['host'] * 1e3:>8.3f} ms" if "host" in r else ""
        ready = (
            f"   ready {r['ready'] * 1e3:.3f} ms {r['ready ratio']:.3f} x" if "ready" in r else ""
        )
        target = ""
        if "target" in r:
            target = (
                f"   target {r['target']} x: {'met' if r['ratio'] <= r['target'] else 'MISSED'}"
            )
        floor = f"   floor {1 + r['floor'] / r['seconds']:.3f} x" if "floor" in r else ""
        print(
            f"    {name:36}{r['seconds'] * 1e3:>11.3f} ms   {r['ratio']:>8.3f} x   "
            f"spread {r['spread']:>4.0%}{host}{ready}{memory}{floor}{target}",
            flush=True,
        )


if __name__ == "__main__":
    main()
