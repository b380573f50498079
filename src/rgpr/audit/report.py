"""A report on a model as one HTML file that needs neither a network nor JavaScript to be read."""

from __future__ import annotations

import base64
import datetime
import io
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._atomic import replacing
from .._network.checks import network_dtype_device
from .._network.loaders import inputs, on_device
from .._network.table import table_of
from ..model import RGPR
from . import findings
from .evaluate import DETECTION, Evaluation, measure, named, subject_of, summary

__all__ = ["Report", "audit"]


@dataclass(frozen=True)
class Report:
    """What an audit found.

    Attributes:
        html: The report.
        evaluation: The numbers in it.
    """

    html: str
    evaluation: Evaluation

    def save(self, path: str | Path) -> Path:
        """Write the report, atomically."""
        path = Path(path)
        with replacing(path) as temporary:
            Path(temporary).write_text(self.html, encoding="utf-8")
        return path


def audit(
    model: RGPR,
    test: Any,
    outliers: Mapping[str, Any] | None = None,
    *,
    title: str = "",
    command: str = "",
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
        progress: Show progress bars where there is a terminal.

    Raises:
        ModuleNotFoundError: jinja2 or Pillow is not there; ``pip install 'rgpr[audit]'``.
        RuntimeError: The model was not fitted.
        ValueError: Targets that do not fit, or data without any input.
    """
    outliers = named(outliers)
    subject = subject_of(model)
    network = model.posterior.network
    device = network_dtype_device(network)[1]
    source = inputs(model._data(test), network, progress=False, description="")
    x = on_device(next(source), device)
    made = findings.made_outliers(x) if isinstance(x, Tensor) and x.is_floating_point() else {}
    sets = {"test": test, **made, **outliers}
    measured = measure(subject, model, sets, progress)
    evaluation = summary(subject, measured, 0.05)
    few: Any = x[:256] if isinstance(x, Tensor) else x
    shown = {"test data": findings.examples(model, model._data(test))}
    for name, data in outliers.items():
        shown[name] = findings.examples(model, model._data(data))
    html = _template().render(
        title=title or type(network).__name__,
        evaluation=evaluation,
        detection=DETECTION,
        about=_about(model),
        layers=_layers(model, few),
        charts=findings.charts(evaluation, subject, model, few),
        thresholds=findings.thresholds(subject, measured),
        examples={name: _pictures(each, x) for name, each in shown.items() if each},
        timings=findings.timings(model, few),
        batch=len(few) if isinstance(few, Tensor) else None,
        versions=_versions(),
        commit=_commit(),
        command=command or shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        date=datetime.date.today().isoformat(),
    )
    return Report(html, evaluation)


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


def _about(model: RGPR) -> dict[str, str]:
    """What the model is, as pairs of words."""
    network = model.posterior.network
    weights = sum(p.numel() for p in network.parameters())
    return {
        "network": f"{type(network).__name__} with {weights:,} parameters",
        "base": type(model.posterior).__name__,
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


def _pictures(
    kinds: Mapping[str, Sequence[findings.Example]], like: Any
) -> dict[str, list[tuple[findings.Example, str, list[str]]]]:
    """Every example with a picture, as a data URI, or its first numbers."""
    return {
        kind: [(each, _picture(each.x, like), _numbers(each.x)) for each in found]
        for kind, found in kinds.items()
    }


def _picture(x: Tensor, like: Tensor) -> str:
    """A PNG as a data URI; empty for what is no image."""
    side = round(x.numel() ** 0.5)
    if x.dim() == 1 and side * side == x.numel() and side >= 8:
        x = x.reshape(1, side, side)  # an image that was made flat
    if x.dim() != 3 or x.shape[0] not in (1, 3) or min(x.shape[1:]) < 4:
        return ""
    from PIL import Image

    low, high = float(like.amin()), float(like.amax())
    levels = ((x.float() - low) / max(high - low, 1e-12)).nan_to_num(0.0).clamp(0, 1)
    array = (255 * levels).round().byte().movedim(0, 2).squeeze(2).numpy()
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _numbers(x: Tensor) -> list[str]:
    flat = x.flatten()
    return [f"{float(value):.3g}" for value in flat[:8]] + (["..."] if len(flat) > 8 else [])


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
