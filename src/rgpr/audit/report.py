"""A report on a model as one HTML file that needs neither a network nor JavaScript to be read."""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._atomic import replacing
from .._network.checks import network_dtype_device
from .._network.loaders import inputs, on_device
from .._network.sources import Batches
from .._network.table import table_of
from ..model import RGPR
from . import curves, findings, tables
from .evaluate import Evaluation, measure, named, subject_of, summary
from .examples import Example, Looks, examples, facts, picture
from .remarks import heard, overlaps, without_numbers

__all__ = ["Report", "audit"]


@dataclass(frozen=True)
class Report:
    """What an audit found.

    Attributes:
        html: The report.
        evaluation: The numbers in it.
        warnings: What was warned of while it was made.
    """

    html: str
    evaluation: Evaluation
    warnings: list[str] = field(default_factory=list)

    def save(self, path: str | Path) -> Path:
        """Write the report, atomically.

        Raises:
            ValueError: The name does not end in ``.html`` or ``.htm``.
        """
        path = check_name(path)
        with replacing(path) as temporary:
            Path(temporary).write_text(self.html, encoding="utf-8")
        return path


def check_name(path: str | Path) -> Path:
    """Refuse a file whose name says that it is something else than HTML."""
    path = Path(path)
    if path.suffix.lower() not in (".html", ".htm"):
        raise ValueError(
            f"{path}: a report is HTML, so its name ends in .html or .htm; a browser prints it to "
            "PDF"
        )
    return path


def audit(
    model: RGPR,
    test: Any,
    outliers: Mapping[str, Any] | None = None,
    *,
    title: str = "",
    command: str = "",
    classes: Sequence[str] | None = None,
    image: tuple[int, ...] | None = None,
    notes: str | Iterable[str] = (),
    progress: bool = True,
) -> Report:
    """Look at a model from all sides, on test data, outliers that can be made of them, and yours.

    Args:
        model: A fitted model; p-values and thresholds need one that was calibrated.
        test: Held-out data with targets, in any form that :meth:`RGPR.fit` takes, and readable
            more than once.
        outliers: Sets of inputs that the network was not trained for, by name.
        title: The report's title; the class of the network by default.
        command: How to make this report again; the command line of this process by default.
        classes: Names of the classes or labels, in the order of the outputs.
        image: Height and width by which flat inputs are drawn as images, or channels, height and
            width. Inputs with two or three axes are drawn by themselves.
        notes: What else a reader should be warned of, one note or several. What
            :meth:`RGPR.calibrate` warned of is said anyway, unless the model was saved and loaded
            since.
        progress: Show progress bars where there is a terminal.

    Raises:
        ModuleNotFoundError: jinja2 or Pillow is not there; ``pip install '.[audit]'``.
        RuntimeError: The model was not fitted.
        ValueError: Targets that do not fit, or data without any input.

    Warns:
        UserWarning: Test inputs are among the training or the validation inputs.
    """
    outliers = named(outliers)
    subject = subject_of(model)
    network = model.posterior.network
    device = network_dtype_device(network)[1]
    looks = Looks(classes, image)
    with heard() as said:
        source = inputs(model._data(test), network, progress=False, description="")
        x = on_device(findings.first_finite(source), device)
        makes = isinstance(x, Tensor) and x.is_floating_point()
        made = findings.made_outliers(x) if makes else {}
        made = {name: each for name, each in made.items() if name not in outliers}
        sets = {"test": test, **outliers, **{name: data for name, (_, data) in made.items()}}
        measured = measure(subject, model, sets, progress)
        evaluation = summary(subject, measured, 0.05)
        few: Any = x[:256] if isinstance(x, Tensor) else x
        levels = findings.thresholds(subject, measured)
        shown = {
            name: _shown(model, model._data(data), x, looks)
            for name, data in {"test": test, **outliers}.items()
        }
        pictures = {chart.key: chart for chart in curves.charts(evaluation, subject, model, few)}
        timings = findings.timings(model, few)
    overlap = overlaps(model, measured["test"])
    for note in overlap:
        warnings.warn(note, stacklevel=2)
    notes = [notes] if isinstance(notes, str) else notes
    remarks = [*overlap, *without_numbers(evaluation)]
    told = list(dict.fromkeys([*model._notes, *notes, *remarks, *said]))
    html = _template().render(
        title=title or _title(network),
        regression=model.likelihood == "regression",
        evaluation=evaluation,
        warned=[note[:1].upper() + note[1:] for note in told],
        card=_hardest(evaluation, list(outliers)),
        about=_about(model),
        layers=_layers(model, few),
        answers=tables.answers(evaluation) if evaluation.answers else None,
        detection={name: tables.detection(each) for name, each in evaluation.detection.items()},
        made={name: words for name, (words, _) in made.items()},
        charts=pictures,
        levels=tables.levels(levels) if levels else None,
        thresholds={row.alpha: row.score for row in levels},
        missing=findings.missing_levels(subject),
        examples={name: each for name, each in shown.items() if each},
        timings=timings,
        batch=len(few) if isinstance(few, Tensor) else None,
        versions=_versions(),
        commit=_commit(),
        command=command or shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        date=datetime.date.today().isoformat(),
    )
    return Report(html, evaluation, told)


def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rgpr.audit"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("report.html")


def _title(network: nn.Module) -> str:
    """The class of the network, unless it says nothing."""
    name = type(network).__name__
    return "Network" if name in ("Sequential", "Module") else name


def _hardest(evaluation: Evaluation, own: list[str]) -> tuple[float, str] | None:
    """The least share of outliers that is flagged, and of which set: the user's, if there are any.

    Sets that were made from the test data are mostly easy, so they are named as what they are.
    """
    flagged = evaluation.flagged
    if not flagged:
        return None
    hardest = min(own or flagged, key=lambda name: flagged[name])
    words = (
        f"of '{hardest}' are flagged, the hardest of {len(flagged)} sets made from your test data"
    )
    if own:
        others = f", the hardest of your {len(own)} sets" if len(own) > 1 else ", your set"
        words = f"of '{hardest}'{others}, are flagged"
    return flagged[hardest], words


def _about(model: RGPR) -> dict[str, str]:
    """What the model is, as pairs of words."""
    network = model.posterior.network
    weights = sum(p.numel() for p in network.parameters())
    name = type(model.posterior).__name__
    return {
        "network": f"{type(network).__name__} with {weights:,} parameters",
        "base": "the network itself" if name == "MAP" else name,
        "likelihood": model.likelihood,
        **{"fitted on": "", "calibrated on": "not yet", **model._learned_from()},
        "temperature": f"{float(model.temperature):.3g}",
    }


def _layers(model: RGPR, x: Any) -> list[tuple[str, str, str]]:
    """Name, kind and shape of every representation that is read."""
    table = table_of(model.posterior.look(x), model._layers)
    taken = [row for row in table.rows if row.taken]
    return [
        (row.name, row.kind, "(" + ", ".join(str(size) for size in row.shape) + ")")
        for row in taken
    ]


def _shown(
    model: RGPR, data: Iterable[Any], like: Any, looks: Looks
) -> dict[str, list[tuple[Example, str, Any]]]:
    """Every example with a picture, as a data URI, or with its most unusual entries."""
    columns = data.columns if isinstance(data, Batches) else None
    columns = model._columns if columns is None else columns
    found = {}
    for kind, each in examples(model, data, looks).items():
        drawn = [(example, picture(example.x, like, looks)) for example in each]
        found[kind] = [
            (example, drawing, [] if drawing else facts(model, example.x, columns))
            for example, drawing in drawn
        ]
    return found


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("rgpr", "torch", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return found


def _commit() -> str:
    """The commit of the folder in which the report is made, and whether anything was changed."""
    try:
        asked = [
            subprocess.run(
                ["git", *words], capture_output=True, text=True, check=True, timeout=10
            ).stdout.strip()
            for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain"])
        ]
    except (OSError, subprocess.SubprocessError):
        return "not in a git repository"
    return asked[0] + (" and changes that are not committed" if asked[1] else "")
