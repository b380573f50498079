"""Table "opt_hyperparams": sigma2 of each layer after tuning.

By the validation likelihood, with smoothed noise as outliers, and with natural images. The values
belong to the scale by which representations are standardised, which is not the same in the paper's
released code (means) and here (standard deviations), so only their pattern can be compared.
"""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from rgpr._network.representation import INPUT

from ..comparison import PAPER_NAMES, TUNINGS, by_set, equal_to_map, over_seeds, remarks, stand_ins
from ..context import Context
from ..data import MissingDataError
from ..experiment import Experiment, register
from ..measures import shortened
from ..methods import contestants
from ..section import Claim, Section, Table, Text, beside, printed, provenance
from ..units import Result, Unit, read_units, run_seeds

__all__ = ["render", "run"]

NAME = "optimal-scales"
LAYERS = ("Input", "Layer 1", "Layer 2", "Layer 3", "Layer 4")


def run(context: Context) -> None:
    """A unit for each set and seed."""
    run_seeds(context, NAME, context.image_sets(*PAPER_NAMES), _unit)


def _unit(context: Context, name: str, seed: int) -> Result:
    competing = contestants(context, name, seed)
    tunings: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for method in TUNINGS:
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
        "notes": competing.notes | competing.natural_notes,
        "choices": [competing.choices],
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
                "and ResNet. 0 stands for scales that ran to zero in most of them, `held at` for "
                "an input's that would have."
            )
        ]
    )
    section.add(*stand_ins(units), *equal_to_map(units))
    rows = []
    for method in TUNINGS:
        for name, found in sets.items():
            if over_seeds(found, "tuning", method):
                title = f"{method}, {PAPER_NAMES.get(name, name)}"
                rows.append([title, *_cells(name, found, method)])
    section.add(Table(["tuned by", *LAYERS], rows))
    section.add(*remarks("opt_hyperparams"), *provenance(units))
    section.claims = [_claim(name, found) for name, found in sets.items()]
    return section


def _cells(name: str, units: list[Unit], method: str) -> list[str]:
    tunings = over_seeds(units, "tuning", method)
    layers = list(tunings[0]["sigma2"])
    cells = []
    for layer, paper_layer in zip_longest(layers, LAYERS):
        if layer is None:
            cells.append("-")
            continue
        states = [_state(tuning, layer) for tuning in tunings]
        value = f"{median(tuning['sigma2'][layer] for tuning in tunings):.2g}"
        if states.count("zero") > len(states) / 2:
            value = "0"
        elif states.count("held") > len(states) / 2:
            value = f"held at {value}"
        place = {"in": PAPER_NAMES.get(name, name), "layer": paper_layer}
        paper = printed("opt_hyperparams", **place, method=TUNINGS[method])
        cells.append(beside(value, None if paper is None else f"{paper:.2g}"))
    return cells


def _state(tuning: dict[str, Any], layer: str) -> str:
    """Whether a scale ran to zero, was held at its floor, or is the optimum: by the warnings."""
    for warning in tuning["warnings"]:
        if "ran to zero for" in warning and repr(layer) in warning:
            return "zero"
        if "was held at" in warning and layer == INPUT:
            return "held"
    return "found"


def _claim(name: str, units: list[Unit]) -> Claim:
    used = {}
    layers = 0
    for method in TUNINGS:
        tunings = over_seeds(units, "tuning", method)
        if not tunings:
            continue
        layers = len(tunings[0]["sigma2"])
        used[method] = [
            sum(_state(tuning, layer) == "found" for layer in tuning["sigma2"])
            for tuning in tunings
        ]
    passed = all(count == layers for counts in used.values() for count in counts)
    return Claim(
        f"{PAPER_NAMES.get(name, name)}: scales are not trivial on any layer",
        f"layers of {layers} that keep one, by seed: "
        + ", ".join(f"{m} {', '.join(map(str, counts))}" for m, counts in used.items()),
        passed,
        "" if passed else _DISCUSSION,
    )


_DISCUSSION = (
    "Our tuning goes to the optimum, from several starts. Where one layer tells the outliers from "
    "the data the others are not needed, and their scales run to zero; the input's is held above "
    "it, for the theorem's sake. The paper does not say when its own ends."
)


register(
    Experiment(
        name=NAME,
        title="Scales that tuning finds",
        paper="tab:opt_hyperparams",
        place=130,
        run=run,
        render=render,
    )
)
