"""What the sections of the image experiments share: sets by name, values over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import mean
from typing import Any

from .published import published
from .section import Block, Text
from .units import Unit

__all__ = [
    "PAPER_NAMES",
    "TUNINGS",
    "by_set",
    "equal_to_map",
    "over_seeds",
    "percent",
    "remarks",
    "stand_ins",
]

# The in-distribution sets, in the paper's order and by the names of its tables.
PAPER_NAMES = {"mnist": "MNIST", "cifar10": "CIFAR10", "svhn": "SVHN", "cifar100": "CIFAR100"}
# Methods that differ in how they were tuned, by our names and by those of its tables.
TUNINGS = {
    "LLL-RGPR-LL": "LLL-RGPR-LL",
    "LLL-RGPR-OOD": "LLL-RGPR-OOD",
    "LLL-RGPR-OOD-natural": "LLL-RGPR-OOD ImageNet",
}


def by_set(units: Iterable[Unit]) -> dict[str, list[Unit]]:
    """The units of each in-distribution set, in the paper's order; others come last."""
    found: dict[str, list[Unit]] = {}
    for unit in units:
        found.setdefault(unit.result["set"], []).append(unit)
    order = [*PAPER_NAMES, *found]
    return {name: found[name] for name in sorted(found, key=order.index)}


def over_seeds(units: Sequence[Unit], *keys: str) -> list[Any]:
    """What each unit has under these keys of its result; nothing if one of them lacks it."""
    values = [unit.result for unit in units]
    for key in keys:
        if not all(key in value for value in values):
            return []
        values = [value[key] for value in values]
    return list(values)


def percent(units: Sequence[Unit], method: str, *keys: str) -> float:
    """A method's metric, the mean over the units, in %."""
    return 100 * float(mean(over_seeds(units, "methods", method, *keys)))


def stand_ins(units: Iterable[Unit]) -> list[Block]:
    """A paragraph for each set that is not what its name says, or that is missing."""
    blocks: list[Block] = []
    for unit in units:
        for name, note in unit.result.get("notes", {}).items():
            blocks.append(Text(f"{PAPER_NAMES.get(name, name)} is a stand-in: {note}."))
        for name, remedy in unit.result.get("missing", {}).items():
            blocks.append(Text(f"Outliers {name} are left out: {remedy}"))
    return list(dict.fromkeys(blocks))


def equal_to_map(units: Iterable[Unit]) -> list[Block]:
    """A paragraph for each set on which LLL has no variance to speak of, and so equals MAP.

    Results of earlier versions do not say which prior precision was chosen; they get no paragraph.
    """
    blocks: list[Block] = []
    for name, found in by_set(units).items():
        # Several units can be about the same network, whose numbers are the same then.
        recorded = {
            tuple(choice["LLL"].items()): choice["LLL"]
            for unit in found
            for choice in unit.result.get("choices", [])
            if "LLL" in choice
        }
        equal = [choice for choice in recorded.values() if choice["equals_map"]]
        if equal:
            precision = min(choice["precision"] for choice in equal)
            variance = max(choice["variance"] for choice in equal)
            blocks.append(
                Text(
                    f"{PAPER_NAMES.get(name, name)}: LLL equals MAP over {len(equal)} of "
                    f"{len(recorded)} networks. The validation images prefer no variance: they "
                    f"choose a prior precision of {precision:.2g} or more, with which no logit of "
                    f"theirs has a variance above {variance:.1g}."
                )
            )
    return blocks


def remarks(*tables: str) -> list[Block]:
    """What is to be known about the numbers that the paper printed."""
    return [
        Text(f"On the paper's {table['label']}: {remark}")
        for table in map(published, tables)
        for remark in table["remarks"]
    ]
