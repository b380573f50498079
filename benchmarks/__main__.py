"""``python -m benchmarks``: run all, print the ratios, write JSON."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import torch

from rgpr.storage import replacing

from . import bases, gram, prediction, tuning

OUT = Path("build/benchmarks/results.json")


def main() -> None:
    results = {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
    }
    for benchmark in (prediction, bases, gram, tuning):
        name = benchmark.__name__.rpartition(".")[2]
        results[name] = benchmark.run()
        print(f"\n{benchmark.__doc__.strip()}")
        for case, contestants in results[name].items():
            print(f"  {case}")
            for contestant, r in contestants.items():
                print(
                    f"    {contestant:15}{r['seconds'] * 1e3:>11.2f} ms   "
                    f"{r['ratio']:>8.2f} x   spread {r['spread']:.0%}"
                )
    OUT.parent.mkdir(parents=True, exist_ok=True)
    with replacing(OUT) as temporary:
        temporary.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nwritten to {OUT.resolve()}")


if __name__ == "__main__":
    main()
