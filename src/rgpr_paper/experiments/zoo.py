"""The zoo: what the library does with architectures it was not made for.

Not in the paper. Networks of torchvision, timm and transformers, recurrent, sequence, tabular and
quantised ones, small and with random weights, are trained for a few steps on scikit-learn's digits,
wine or breast cancer (nothing is downloaded), wrapped with the default options, and checked. The
architectures are in `rgpr_paper/zoo/families`, the checks in `rgpr_paper/zoo/checks.py`. A row that
fails a check says why.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ..context import Context
from ..data import MissingDataError
from ..experiment import Experiment, register
from ..section import Claim, Section, Table, Text, provenance
from ..units import Result, Unit, read_units, run_units
from ..zoo import Entry, all_entries
from ..zoo.checks import CHECKS
from ..zoo.measure import BATCH, STEPS, measure

__all__ = ["render", "run", "tables"]

NAME = "zoo"
# Exporting takes longer than everything else together, and the tests of the export do it too.
_NOT_IN_SMALL = ("onnx",)
_PACKAGES = ("timm", "torchvision", "transformers")


def run(context: Context) -> None:
    """A unit for each architecture."""
    units = {
        name: partial(_unit, entry, context.small)
        for name, entry in all_entries().items()
        if entry.small or not context.small
    }
    run_units(context, NAME, units, steps=STEPS, batch=BATCH)


def _unit(entry: Entry, small: bool) -> Result:
    try:
        return measure(entry, but=_NOT_IN_SMALL if small else ())
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        what, remedy = f"the package {error.name}", "Install it: pip install '.[zoo]'"
        raise MissingDataError(what, "it in this environment", remedy) from error


# -- what it shows -------------------------------------------------------------------------------


def render(folder: Path) -> Section:
    """A table for each family, and a claim for each check."""
    units = read_units(folder)
    text = (
        "One row for each architecture. `layers`: how many representations are read, the input "
        "included, and the widths of the others. `1e6 x`: the largest confidence above 1/C of "
        "held-out inputs a million times their size. `10 x` and `scrambled`: AUROC of the score, "
        "in per cent, held-out inputs against the same scaled by ten, and with pixels or columns "
        "in another order or with other words. `certificate`: the radius beyond which every input "
        "is below 1/C + 0.05, in standard deviations of the training data. `ONNX`: the largest "
        "difference of a probability. A dash: the check does not apply. What fails is named in the "
        "last column, with the reason."
    )
    section = Section([Text(text)])
    section.add(*tables(units))
    section.claims += [_claim(name, units) for name in CHECKS if _applied(name, units)]
    section.add(*provenance(units))
    return section


def tables(units: list[Unit]) -> list[Table]:
    """A table for each family."""
    head = ["architecture", "data", "layers", "1e6 x", "10 x", "scrambled", "certificate", "ONNX"]
    families = sorted({unit.result["family"] for unit in units})
    return [
        Table(
            [*head, "fails"],
            [_row(unit.result) for unit in units if unit.result["family"] == family],
            family,
        )
        for family in families
    ]


def _row(row: Result) -> list[str]:
    if "error" in row:
        return [f"`{row['name']}`", row["data"], *["-"] * 6, _named(row, "fit", row["error"])]
    widths = row["checks"]["widths"]["value"]
    read = f"{len(row['layers'])}"
    if widths:
        read += f": {', '.join(str(width) for *_, width in widths)}"
    failures = [
        _named(row, name, found["why"] or f"{found['value']}")
        for name, found in row["checks"].items()
        if found["holds"] is False
    ]
    return [
        f"`{row['name']}`",
        row["data"],
        read,
        *(
            _cell(row["checks"].get(name), how)
            for name, how in (
                ("far", "{:.3f}"),
                ("scaled", "{:.1%}"),
                ("scrambled", "{:.1%}"),
                ("certificate", "{0[0]:.1e}"),
                ("onnx", "{:.0e}"),
            )
        ),
        "; ".join(failures),
    ]


def _cell(found: dict[str, Any] | None, how: str) -> str:
    if found is None or found["value"] is None:
        return "-"
    return how.format(found["value"]).removesuffix("%")


def _named(row: Result, check: str, reason: str) -> str:
    """The check that failed, and why: the entry's own words before those of the error."""
    return f"{check}: {row['excuses'].get(check, reason)}"


def _applied(name: str, units: list[Unit]) -> bool:
    return any(unit.result["checks"].get(name, {}).get("holds") is not None for unit in units)


def _claim(name: str, units: list[Unit]) -> Claim:
    """How many architectures pass a check, and which do not."""
    outcomes = {
        unit.name: False if "error" in unit.result else unit.result["checks"][name]["holds"]
        for unit in units
    }
    failing = [unit for unit, holds in outcomes.items() if holds is False]
    counted = sum(holds is not None for holds in outcomes.values())
    statement = (CHECKS[name].__doc__ or name).strip().splitlines()[0].removesuffix(".")
    measured = f"{counted - len(failing)} of {counted}"
    measured += f"; not {', '.join(failing)}" if failing else ""
    unexplained = [
        unit.name
        for unit in units
        if unit.name in failing and not {name, "fit"} & set(unit.result["excuses"])
    ]
    discussion = "The table says why." if failing else ""
    if unexplained:
        discussion = f"Not explained yet: {', '.join(unexplained)}."
    return Claim(f"{statement} ({name})", measured, not failing, discussion, ours=True)


register(
    Experiment(
        name=NAME,
        title="The zoo: architectures of other libraries",
        paper="ours",
        place=170,
        run=run,
        render=render,
    )
)
