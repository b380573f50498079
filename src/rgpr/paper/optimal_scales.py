"""Table "opt_hyperparams": sigma2 of each layer after tuning.

By the validation likelihood, with smoothed noise as outliers, and with natural images. The values
belong to the scale by which representations are standardised, which is not the same in the paper's
released code (means) and here (standard deviations), so only their pattern can be compared.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from .comparison import PAPER_NAMES, by_set, over_seeds, remarks, stand_ins
from .data import MissingDataError
from .detection import shortened
from .experiment import Context, Result, Unit, read_units, run_seeds
from .methods import contestants
from .section import Check, Section, Table, Text, beside, printed, provenance

__all__ = ["render", "run"]

NAME = "optimal-scales"
# Our names, and the paper's.
METHODS = {
    "LLL-RGPR-LL": "LLL-RGPR-LL",
    "LLL-RGPR-OOD": "LLL-RGPR-OOD",
    "LLL-RGPR-OOD-natural": "LLL-RGPR-OOD ImageNet",
}
LAYERS = ("Input", "Layer 1", "Layer 2", "Layer 3", "Layer 4")
# The least that is more than nothing, times the largest of a tuning's scales.
TRIVIAL = 1e-6


def run(context: Context) -> None:
    """A unit for each set and seed."""
    run_seeds(context, NAME, context.image_sets(*PAPER_NAMES), _unit)


def _unit(context: Context, name: str, seed: int) -> Result:
    competing = contestants(context, name, seed)
    tunings: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for method in METHODS:
        try:
            found = competing.method(method).tuning
        except MissingDataError as gap:
            missing[method] = gap.remedy
            continue
        assert found is not None
        tunings[method] = shortened(found)
    return {
        "set": name,
        "seed": seed,
        "notes": competing.notes,
        "missing": missing,
        "tuning": tunings,
    }


# -- what it shows -------------------------------------------------------------------------------


def render(folder: Path) -> Section:
    """The paper's table: medians over seeds."""
    units = read_units(folder)
    sets = by_set(units)
    seeds = max(len(found) for found in sets.values())
    section = Section(
        [
            Text(
                f"sigma2 after tuning, the median of {seeds} seeds. Layers are the stages of LeNet "
                "and ResNet. 0 stands for scales that ran to zero."
            )
        ]
    )
    section.add(*stand_ins(units))
    rows = []
    for method in METHODS:
        for name, found in sets.items():
            if over_seeds(found, "tuning", method):
                title = f"{method}, {PAPER_NAMES.get(name, name)}"
                rows.append([title, *_cells(name, found, method)])
    section.add(Table(["tuned by", *LAYERS], rows))
    section.add(*remarks("opt_hyperparams"), *provenance(units))
    section.checks = [_claim(name, found) for name, found in sets.items()]
    return section


def _scales(units: list[Unit], method: str) -> list[list[float]]:
    """For each layer, those of all seeds."""
    found = [list(unit.result["tuning"][method]["sigma2"].values()) for unit in units]
    return [list(column) for column in zip(*found, strict=True)]


def _cells(name: str, units: list[Unit], method: str) -> list[str]:
    columns = _scales(units, method)
    largest = max(median(column) for column in columns)
    cells = []
    for number, layer in enumerate(LAYERS):
        if number >= len(columns):
            cells.append("-")
            continue
        value = median(columns[number])
        place = {"in": PAPER_NAMES.get(name, name), "layer": layer, "method": METHODS[method]}
        paper = printed("opt_hyperparams", **place)
        ours = f"{value:.2g}" if value > TRIVIAL * largest else "0"
        cells.append(beside(ours, None if paper is None else f"{paper:.2g}"))
    return cells


def _claim(name: str, units: list[Unit]) -> Check:
    used = {}
    layers = 0
    for method in METHODS:
        if not over_seeds(units, "tuning", method):
            continue
        columns = _scales(units, method)
        largest = max(median(column) for column in columns)
        used[method] = sum(median(column) > TRIVIAL * largest for column in columns)
        layers = len(columns)
    passed = all(count == layers for count in used.values())
    return Check(
        f"{PAPER_NAMES.get(name, name)}: scales are not trivial on any layer",
        ", ".join(f"{method}: {count} of {layers} layers" for method, count in used.items()),
        passed,
        "" if passed else _DISCUSSION,
    )


_DISCUSSION = (
    "Our tuning goes to the optimum, from several starts. Where one layer tells the outliers from "
    "the data the others are not needed, and their scales run to zero. The paper does not say from "
    "where its own starts, nor when it ends."
)
