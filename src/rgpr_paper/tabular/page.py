"""What the experiment on small tables shows: two overviews, the details, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from ..comparison import over_seeds
from ..figures import COLORS, drawing
from ..section import Block, Figure, Table, Text, spread
from ..units import Unit
from .classification import HELD_OUT
from .detectors import OURS
from .regression import SHIFTED
from .rows import CLASSES, NUMBERS

__all__ = ["KINDS", "TASKS", "Gap", "Sets", "at_data", "auroc", "behind", "details"]
__all__ += ["false_alarms", "gaps", "intervals", "overview", "overview_tables", "picture"]
__all__ += ["sets_of", "units_of"]

# The kinds of strange rows of each task, in the order of the tables.
KINDS = {
    "classification": (HELD_OUT, "shuffled", "scaled", "noisy"),
    "regression": (SHIFTED, "shuffled", "scaled", "noisy"),
}
TASKS = {"classification": CLASSES, "regression": NUMBERS}

# The units of each set by the set's name.
Sets = dict[str, list[Unit]]


def sets_of(units: Sequence[Unit], task: str) -> Sets:
    """The units of each set of a task, in the order of :data:`TASKS`."""
    found = {name: [unit for unit in units if unit.result["set"] == name] for name in TASKS[task]}
    return {name: each for name, each in found.items() if each}


def units_of(sets: Sets) -> list[Unit]:
    """All units of these sets."""
    return [unit for found in sets.values() for unit in found]


def auroc(units: Sequence[Unit], kind: str, detector: str, metric: str = "auroc") -> float | None:
    """A detector's AUROC in %, or another measure, the mean over seeds; ``None`` without a cell."""
    values = over_seeds(units, "kinds", kind, detector, metric)
    return 100 * float(mean(values)) if values else None


def cells(sets: Sets, task: str, detector: str, metric: str = "auroc") -> dict[str, list[float]]:
    """A detector's measure in % for every set that has such rows, by kind."""
    return {
        kind: [
            value
            for units in sets.values()
            if (value := auroc(units, kind, detector, metric)) is not None
        ]
        for kind in KINDS[task]
    }


def overview(sets: Sets, task: str, metric: str = "auroc") -> dict[str, dict[str, float]]:
    """For each detector the mean over sets by kind, and the mean over all sets and kinds."""
    first = next(iter(sets.values()))[0].result["kinds"]["shuffled"]
    found = {}
    for detector in first:
        by_kind = cells(sets, task, detector, metric)
        every = [value for values in by_kind.values() for value in values]
        means = {kind: mean(values) for kind, values in by_kind.items() if values}
        found[detector] = {**means, "mean": mean(every)}
    return found


def overview_tables(sets: Sets, task: str) -> list[Table]:
    """The means over sets: one table with the AUROC, one with both meanings of FPR95."""
    aurocs = overview(sets, task)
    both = [overview(sets, task, metric) for metric in ("fpr95", "fpr95_openood")]
    ranked = sorted(aurocs, key=lambda detector: -aurocs[detector]["mean"])
    columns = list(aurocs[OURS])
    names = {
        detector: f"{detector} (ours)" if detector == OURS else detector for detector in aurocs
    }
    return [
        Table(
            [f"{task}: AUROC", *columns],
            [[names[d], *(f"{aurocs[d][kind]:.1f}" for kind in columns)] for d in ranked],
            "Means over sets and seeds, in %, more is better; best detector first",
        ),
        Table(
            [f"{task}: FPR95 / OpenOOD's FPR95", *columns],
            [
                [names[d], *(" / ".join(f"{m[d][kind]:.1f}" for m in both) for kind in columns)]
                for d in ranked
            ],
            "In %, less is better. The first is the share of strange rows that pass where 95 % of "
            "the test rows do (the paper's `fpr95`), the second the share of test rows that are "
            "refused where 95 % of the strange rows are (`fpr95_openood`)",
        ),
    ]


def details(sets: Sets, task: str) -> Table:
    """The AUROC of every detector for each set and kind."""
    detectors = list(overview(sets, task))
    rows = []
    for name, units in sets.items():
        for kind in KINDS[task]:
            if auroc(units, kind, OURS) is None:
                rows.append([f"{name}, {kind}", *["-"] * len(detectors)])
                continue
            values = [over_seeds(units, "kinds", kind, d, "auroc") for d in detectors]
            rows.append([f"{name}, {kind}", *(spread(v, 1, 100) for v in values)])
    return Table([f"{task}: AUROC of each set", *detectors], rows)


@dataclass(frozen=True)
class Gap:
    """Rows of a set on which another detector is better than the score, both AUROCs in %."""

    name: str
    kind: str
    best: str
    theirs: float
    ours: float


def gaps(sets: Sets, task: str, margin: float = 1.0) -> list[Gap]:
    """Sets and kinds for which the best other detector is more than a margin better, in points."""
    found = []
    for name, units in sets.items():
        for kind in KINDS[task]:
            ours = auroc(units, kind, OURS)
            if ours is None:
                continue
            others = {
                detector: auroc(units, kind, detector) or 0.0
                for detector in units[0].result["kinds"][kind]
                if detector != OURS
            }
            best = max(others, key=others.__getitem__)
            if others[best] - ours > margin:
                found.append(Gap(name, kind, best, others[best], ours))
    return found


def behind(sets: Sets, task: str, margin: float = 1.0) -> list[Block]:
    """A paragraph that names where another detector is better than the score, and by how much."""
    found = [
        f"{gap.name}, {gap.kind}: {gap.best} {gap.theirs:.1f} against {gap.ours:.1f}"
        for gap in gaps(sets, task, margin)
    ]
    if not found:
        return [Text(f"In no row is another detector more than {margin:g} point better.")]
    return [Text(f"The score is more than {margin:g} point behind in: {'; '.join(found)}.")]


def at_data(sets: Sets) -> Table:
    """Probabilities of the network and of the calibrated model at the test rows."""
    columns = [
        (stage, metric, digits, factor)
        for metric, digits, factor in (("nll", 4, 1.0), ("ece", 2, 100.0))
        for stage in ("base", "fitted", "calibrated")
    ]
    rows = [
        [
            name,
            "/".join(map(str, units[0].result["rows"])),
            str(units[0].result["columns"]),
            spread(over_seeds(units, "at data", "base", "accuracy"), 1, 100),
            *(spread(over_seeds(units, "at data", s, m), d, f) for s, m, d, f in columns),
        ]
        for name, units in sets.items()
    ]
    head = ["test rows", "rows: training/validation/test", "columns", "accuracy"]
    head += ["NLL, base", "fitted", "calibrated", "ECE, base", "fitted", "calibrated"]
    return Table(head, rows, "Probabilities at the data; all in % but the NLL")


def false_alarms(sets: Sets) -> Table:
    """The share of rows that `flag` flags at 5 %: false alarms, and strange rows found."""
    kinds = ("test", "shuffled", "scaled", "noisy")
    rows = [
        [name, *(spread(over_seeds(units, "flagged", kind), 1, 100) for kind in kinds)]
        for name, units in sets.items()
    ]
    head = ["flagged at 5 %", "test rows (false alarms)", *kinds[1:]]
    return Table(head, rows, "Share of rows that `flag` flags at its default level of 5 %, in %")


def intervals(sets: Sets) -> Table:
    """Coverage and widths of 90 % intervals, at the data and away from it."""
    rows = [
        [
            name,
            "/".join(map(str, units[0].result["rows"])),
            spread(over_seeds(units, "rmse"), 3),
            *(spread(over_seeds(units, "covered", kind), 1, 100) for kind in ("constant", "RGPR")),
            *(spread(over_seeds(units, "wider", factor), 2) for factor in ("2 x", "10 x")),
            str(units[0].result["shifted"]["rows"]),
            *(
                spread(over_seeds(units, "shifted", "covered", kind), 1, 100)
                for kind in ("constant", "RGPR")
            ),
            spread(over_seeds(units, "shifted", "wider"), 2),
        ]
        for name, units in sets.items()
    ]
    head = ["90 % intervals", "rows: training/validation/test", "RMSE"]
    head += ["coverage of test rows: constant width", "RGPR"]
    head += ["width of RGPR's, times that at the data: 2 x", "10 x"]
    head += ["shifted rows", "their coverage: constant width", "RGPR", "width, times"]
    return Table(head, rows, "RMSE in standard deviations of the target; coverages in %")


def picture(folder: Path, name: str, tasks: dict[str, Sets]) -> Figure:
    """Mean AUROC of each detector and kind, a row of panels for each task; ours is marked."""
    caption = (
        "AUROC of strange rows, in %: a large dot is the mean over sets, a small one a set. Above "
        "classification, below regression; the score of this library is orange. Each panel has its "
        "own scale, and the dotted line at 50 % is chance."
    )
    size = (9.5, 0.9 + 2.1 * len(tasks))
    options = {"nrows": len(tasks), "ncols": 4, "figsize": size, "squeeze": False, "sharey": "row"}
    small = {"ms": 3, "alpha": 0.35, "clip_on": False}
    with drawing(folder, name, caption, **options) as (_, axes, block):
        for row, (task, sets) in zip(axes, tasks.items(), strict=True):
            detectors = list(overview(sets, task))
            for axis, kind in zip(row, KINDS[task], strict=True):
                for place, detector in enumerate(reversed(detectors)):
                    values = cells(sets, task, detector)[kind]
                    color = COLORS[1] if detector == OURS else COLORS[0]
                    axis.plot(values, [place] * len(values), "o", **small, color=color)
                    if values:
                        marker = "D" if detector == OURS else "o"
                        axis.plot(mean(values), place, marker, ms=7, color=color, clip_on=False)
                axis.set_title(kind)
                axis.axvline(50, color="0.7", lw=0.8, ls=":")
                axis.grid(axis="y", color="0.92", lw=0.6)
                axis.set_axisbelow(True)
                axis.set_xlim(None, 101)
            row[0].set_yticks(range(len(detectors)), list(reversed(detectors)))
            row[0].set_ylabel(task)
        for axis in axes[-1]:
            axis.set_xlabel("AUROC, %")
    return block
