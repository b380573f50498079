"""OOD detection: tables "ood_avg", "ood_hyperopt", "ood_auroc_auprc", "acc_ece" and "calib_ood".

All from one set of predictions. For each seed a network is trained, 2000 images are split off the
test set for validation, and the metrics are those of the rest; the score is the largest
probability. Outliers for tuning are smoothed noise made of training images and never one of the
test sets. A set of outliers that is missing is left out, and named.

Unlike the paper, whose numbers average predictions of one network by random samples, ours average
networks of several seeds, and predictions are by the probit, which has no randomness. Beyond the
paper: this library's default, by its confidence and by its score, and four detectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import mean

from ..compared import compared
from ..comparison import PAPER_NAMES, by_set, equal_to_map, over_seeds, remarks, stand_ins
from ..context import Context
from ..detection_claims import claims
from ..experiment import Experiment, register
from ..methods import COMPARED, detectors
from ..published import published
from ..section import Block, Section, Table, Text, beside, printed, provenance, spread
from ..units import Result, Unit, read_units, run_seeds

__all__ = ["methods", "render", "run", "summary"]

NAME = "detection"


def methods() -> tuple[str, ...]:
    """The paper's methods, this library's, and every detector that is registered."""
    return (*COMPARED, "LLL-RGPR-score", *detectors())


def run(context: Context) -> None:
    """A unit for each set and seed."""
    run_seeds(context, NAME, context.image_sets(*PAPER_NAMES), _unit, methods=methods())


def _unit(context: Context, name: str, seed: int) -> Result:
    return compared(context, name, seed, methods())


# -- what it shows -------------------------------------------------------------------------------

# Each metric that has a column for each set of outliers, and the paper's table of it.
_TABLES = {
    "fpr95": "ood_hyperopt",
    "mmc": "ood_hyperopt",
    "auroc": "ood_auroc_auprc",
    "auprc": "ood_auroc_auprc",
}
_NOTES = (
    "All in % but the NLL. FPR95 and MMC, the mean confidence, are the better the lower (MMC of "
    "the test data should equal the accuracy), AUROC and AUPRC the better the higher. The score "
    "is the largest probability, or the detector's own. ECE has 15 bins. The area under precision"
    " against recall has the data as what is to be found, and depends on the sizes of the sets: "
    "the paper's 59.8 of MAP on MNIST against noise is what 8000 images and 2000 of noise give "
    "where all noise scores higher. Detectors have no probabilities. The ensemble of a seed has "
    "the networks of five seeds in a row, so ensembles share members, and their spread is "
    "narrower than that of independent ones. Training on a GPU does not repeat itself bit by bit,"
    " so another run gives other networks."
)
_DEVIATION = (
    "Where our numbers are not the paper's: with the recipe `fast` networks are trained in a third "
    "of the epochs, our residual divides by standard deviations and the paper's released code by "
    "means, its predictions are of random samples, and some sets of outliers are others. So the "
    "order of methods is to be compared, more than single numbers."
)


def render(folder: Path) -> Section:
    """The paper's tables for each set, and what it says about calibration."""
    units = read_units(folder)
    section = Section([Text(_NOTES), Text(_DEVIATION)])
    section.add(*remarks("ood_avg", "acc_ece"))
    for name, found in by_set(units).items():
        section.add(*_blocks(name, found))
        section.claims += claims(PAPER_NAMES.get(name, name), found)
    section.add(_calibration(by_set(units)), *remarks("calib_ood"), *provenance(units))
    return section


def _blocks(name: str, units: list[Unit]) -> Iterator[Block]:
    """Everything that is shown of one in-distribution set."""
    paper = PAPER_NAMES.get(name, name)
    sizes = units[0].result["sizes"]
    counts = f"{sizes['train']} training, {sizes['validation']} validation, {sizes['test']} test"
    others = ", ".join(f"{count} of {kind}" for kind, count in sizes["outliers"].items())
    seeds = ", ".join(str(unit.result["seed"]) for unit in units)
    yield Text(f"In-distribution: {paper}, seeds {seeds}; {counts} images; outliers: {others}.")
    yield from stand_ins(units)
    yield from equal_to_map(units)
    yield _means(paper, units)
    for metric, table in _TABLES.items():
        yield from _by_outliers(paper, units, metric, table)
    yield _times(paper, units)


def _measured(units: Sequence[Unit]) -> list[str]:
    """The methods that all of these units have, in the order in which they were measured.

    A detector is shown even where nothing has registered it now. Residuals of earlier versions of
    the library, which no longer has them, are left out.
    """
    found = [m for m in units[0].result["methods"] if over_seeds(units, "methods", m)]
    return [m for m in found if "-RGPR-" not in m or m in methods()]


def _means(paper: str, units: list[Unit]) -> Table:
    """Means over the sets of outliers, and what a method does at the data."""
    kinds = list(units[0].result["sizes"]["outliers"])
    rows = []
    for method in _measured(units):
        of = partial(over_seeds, units, "methods", method)
        place = {"in": paper, "method": method}
        accuracy, error = (printed("acc_ece", **place, metric=m) for m in ("accuracy", "ECE"))
        rows.append(
            [
                method,
                beside(spread(of("fpr95", "mean"), 1, 100), _averages(paper, method, kinds)),
                spread(of("auroc", "mean"), 1, 100),
                beside(spread(of("accuracy"), 2, 100), accuracy),
                beside(spread(of("ece"), 2, 100), error),
                spread(of("nll"), 4),
            ]
        )
    head = ["method", "FPR95", "AUROC", "accuracy", "ECE", "NLL"]
    caption = f"{paper}: means over the sets of outliers (ood_avg), accuracy and ECE (acc_ece)"
    return Table(head, rows, caption)


def summary(folder: Path) -> Table:
    """FPR95 of every method on every set, with the paper's means over the sets that it lists."""
    sets = by_set(read_units(folder))
    rows = []
    for method in _measured(next(iter(sets.values()))):
        cells = []
        for name, units in sets.items():
            paper, kinds = PAPER_NAMES.get(name, name), list(units[0].result["sizes"]["outliers"])
            listed = _listed(paper, method, kinds)
            shown = None if listed is None else f"{listed:.1f}"
            cells.append(
                beside(spread(over_seeds(units, "methods", method, "fpr95", "mean"), 1, 100), shown)
            )
        rows.append([method, *cells])
    return Table(["FPR95", *(PAPER_NAMES.get(name, name) for name in sets)], rows)


def _by_outliers(paper: str, units: list[Unit], metric: str, table: str) -> Iterator[Table]:
    """One metric for each set of outliers; no table where no method has this metric."""
    kinds = list(units[0].result["sizes"]["outliers"])
    columns = ["test", *kinds] if metric == "mmc" else kinds
    rows = []
    for method in _measured(units):
        if not over_seeds(units, "methods", method, metric):
            continue
        cells = []
        for kind in columns:
            place = {"in": paper, "out": paper if kind == "test" else kind, "method": method}
            ours = spread(over_seeds(units, "methods", method, metric, kind), 1, 100)
            cells.append(beside(ours, printed(table, **place, metric=metric.upper())))
        rows.append([method, *cells])
    if rows:
        head = [f"{metric.upper()}, {paper} against", *columns]
        yield Table(head, rows, f"{paper}: {metric.upper()} ({table})")


def _times(paper: str, units: list[Unit]) -> Table:
    """How long each part took, but for training: a network may be another experiment's."""
    rows = [
        [part, spread(over_seeds(units, "seconds", part), 1)]
        for part in units[0].result["seconds"]
        if part != "training" and over_seeds(units, "seconds", part)
    ]
    return Table([f"{paper}: what takes time", "seconds"], rows)


def _averages(name: str, method: str, kinds: list[str]) -> str | None:
    """The paper's average over sets of outliers as printed, and that of those it lists."""
    average, listed = (
        printed("ood_avg", **{"in": name}, method=method),
        _listed(name, method, kinds),
    )
    if average is None or listed is None:
        return None
    return f"{average}, its {len(kinds)} sets: {listed:.1f}"


def _listed(name: str, method: str, kinds: list[str]) -> float | None:
    """The mean of the paper's FPR95 over these sets of outliers, where it lists all of them."""
    place = {"in": name, "method": method, "metric": "FPR95"}
    known = [printed("ood_hyperopt", **place, out=kind) for kind in kinds]
    numbers = [value for value in known if value is not None]
    return mean(numbers) if len(numbers) == len(kinds) else None


def _calibration(sets: dict[str, list[Unit]]) -> Table:
    """Table "calib_ood": methods trained for outliers lose calibration too."""
    rows = []
    for method in ("MAP", "TS", "LLL", "LLL-RGPR-LL", "LLL-RGPR-OOD", "LLL-RGPR-onset"):
        found = [over_seeds(units, "methods", method, "ece") for units in sets.values()]
        if any(found):
            rows.append([method, *(spread(values, 2, 100) for values in found)])
    for method in published("calib_ood")["axes"]["method"]:
        numbers = (
            printed("calib_ood", **{"in": PAPER_NAMES.get(name, name)}, method=method)
            for name in sets
        )
        cells = ["-" if number is None else str(number) for number in numbers]
        rows.append([f"{method}, quoted by the paper", *cells])
    caption = "Calibration is at odds with detection: ECE (calib_ood; quoted rows were not run)"
    return Table(["method", *(PAPER_NAMES.get(name, name) for name in sets)], rows, caption)


register(
    Experiment(
        name=NAME,
        title="Outliers found and calibration kept, all methods on the same networks",
        paper="tab:ood_avg, tab:ood_hyperopt, tab:ood_auroc_auprc, tab:acc_ece, tab:calib_ood",
        place=110,
        run=run,
        render=render,
    )
)
