"""What a billion images take: ``python -m benchmarks.billion`` fills this part of docs/speed.md.

The rates are those in ``results/benchmarks``. Prices, networks and storage are assumptions that a
reader replaces by their own.
"""

from __future__ import annotations

from dataclasses import replace

from rgpr_paper.report import block_markdown
from rgpr_paper.section import Table

from .cluster import Cluster, least_nodes, plan, simulate
from .pages import fill, made, measured

# Assumptions: 32 x 32 x 3 bytes in 20 000 files, nodes with 25 Gbit/s, storage with 5 GB/s, and a
# worker that is lost in a hundred hours and takes a minute to start.
ASSUMED = Cluster(
    images=10**9,
    files=20_000,
    size=32 * 32 * 3,
    rate=1.0,
    workers=8,
    nodes=1,
    network=25e9 / 8,
    storage=5e9,
    price=30.0,
    start=60.0,
    spread=0.1,
    failures=0.01,
)
# Assumed too: cores of a node without GPUs, and what it costs an hour.
CORES, CORES_PRICE = 32, 1.5


def clusters() -> dict[str, Cluster]:
    """The examples, by their names."""
    gpu = measured("cuda", "prediction")["prediction"]
    times = {
        mode: gpu[f"ResNet-18, bfloat16, batch 512, {mode}"]["LLL + RGPR"]["seconds"]
        for mode in ("eager", "compiled")
    }
    eager = replace(ASSUMED, rate=512 / times["eager"])
    compiled = replace(ASSUMED, rate=512 / times["compiled"])
    one = measured("cpu", "scaling")["scaling"]
    (parquet,) = [case for name, case in one.items() if "parquet" in name]
    core = replace(
        ASSUMED,
        rate=parquet["Ray, 1 actor"]["images a second"],
        spread=parquet["Ray, 1 actor"]["file spread"],
        workers=CORES,
        price=CORES_PRICE,
    )
    return {
        "one H200, eager": replace(eager, workers=1, price=ASSUMED.price / 8),
        "a node with eight, eager": eager,
        "a node with eight, compiled": compiled,
        "four nodes with eight, compiled": replace(compiled, nodes=4),
        f"a node with {CORES} cores": core,
        f"64 nodes with {CORES} cores": replace(core, nodes=64),
    }


def section() -> str:
    """The part of the page: what was measured, the plans, and the simulation beside them."""
    return "\n\n".join([*_measured(), *_plans()]) + "\n"


def _measured() -> list[str]:
    found, rows = measured("cpu", "scaling"), []
    for name, case in found["scaling"].items():
        loop, one, two = (case[key] for key in ("loop", "Ray, 1 actor", "Ray, 2 actors"))
        rows.append(
            [
                name.rpartition(", ")[2],
                f"{loop['images a second']:.0f}",
                f"{1 / one['ratio']:.2f} x",
                f"{two['throughput over one']:.2f} x",
                f"{one['total']:.1f} s",
                f"{two['total']:.1f} s ({two['simulated']:.1f} s)",
            ]
        )
    head = [
        "input",
        "a loop, images a second",
        "one actor over it",
        "two actors over one",
        "one actor in all",
        "two actors in all (simulated)",
    ]
    said = f"{made(found, 'scaling')}: ResNet-18 in float32, one thread for each worker."
    return [said, *block_markdown(Table(head, rows), "")]


def _plans() -> list[str]:
    rows = []
    for name, cluster in clusters().items():
        found = plan(cluster)
        busy = found.busy
        rows.append(
            [
                name,
                f"{_short(cluster.rate * cluster.workers * cluster.nodes)}",
                *(
                    f"**{_time(busy[limit])}**" if limit == found.limit else _time(busy[limit])
                    for limit in ("compute", "node network", "storage")
                ),
                _time(found.hours),
                _time(simulate(cluster)),
                f"{found.cost:.0f}",
            ]
        )
    head = [
        "a billion images",
        "images a second",
        "computing",
        "network of a node",
        "storage",
        "in all",
        "simulated",
        "cost",
    ]
    a, core = ASSUMED, [*clusters().values()][-1]
    assumed = (
        f"Assumed, for you to replace: images of {a.size:.0f} bytes in {_short(a.files)} files; "
        f"{a.network / 1e9:.3f} GB/s for a node and {a.storage / 1e9:.0f} GB/s of storage for all; "
        f"a worker starts in {a.start:.0f} s and is lost once in {1 / a.failures:.0f} hours; an "
        f"hour costs {a.price:.0f} for a node with eight H200s and {CORES_PRICE} for one with "
        f"{CORES} cores, in whatever currency. The rates of H200s are those of a ResNet-18 in "
        "bfloat16 at batch 512; one H200 costs an eighth of its node."
    )
    deadline = least_nodes(core, 1.0)
    needed = (
        f"To be done in an hour, `least_nodes` says, takes {deadline.nodes} of the nodes with "
        f"{CORES} cores; they cost {deadline.cost:.0f}."
    )
    return [assumed, *block_markdown(Table(head, rows), ""), needed]


def _time(hours: float) -> str:
    if hours < 1.5:
        return f"{60 * hours:.3g} min"
    return f"{hours:.3g} h"


def _short(number: float) -> str:
    """Three digits, with spaces between thousands."""
    digits = max(0, len(str(round(number))) - 3)
    return f"{round(number, -digits):,.0f}".replace(",", " ")


if __name__ == "__main__":
    fill("speed.md", "billion", section())
