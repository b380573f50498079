"""The pictures of a report: what is drawn, and the words beside it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._network.batches import Batch
from ..answers.predictions import interval, ranks
from ..guarantee.inputs import at_distance
from ..model import RGPR
from .charts import Chart, line_chart
from .evaluate import Evaluation
from .passes import OURS, Run, Subject, surest

__all__ = ["charts"]

_RAYS = 32
# A bin of a reliability chart with fewer answers says nothing.
_FEW = 5


def charts(evaluation: Evaluation, subject: Subject, model: RGPR, x: Batch) -> list[Chart]:
    """The pictures of a report.

    Args:
        evaluation: What was measured.
        subject: The model as :mod:`rgpr.audit.passes` takes it.
        model: The model.
        x: A few inputs like the data.
    """
    found = []
    if isinstance(x, Tensor) and subject.extension.source is None:
        regression = model.likelihood == "regression"
        found.append(_width(subject, x) if regression else _far(subject, model, x))
    if evaluation.reliability:
        found += [_reliability(evaluation), _risk(evaluation)]
    return found


def _reliability(evaluation: Evaluation) -> Chart:
    """Accuracy against confidence; the dots say how many answers there are."""
    bins = {
        method: [row for row in rows if row[2] >= _FEW]
        for method, rows in evaluation.reliability.items()
    }
    series = {method: [(row[0], row[1]) for row in rows] for method, rows in bins.items()}
    words = (
        "Is the confidence honest?",
        "confidence",
        "share of right answers",
        "Above the dashed line the model is right more often than it says, below less often. The "
        "larger a dot, the more answers have this confidence; bins with fewer than "
        f"{_FEW} answers are left out.",
    )
    return line_chart(
        "reliability",
        words,
        {**series, "honest": [(0.0, 0.0), (1.0, 1.0)]},
        counts={method: [row[2] for row in rows] for method, rows in bins.items()},
        dashed=["honest"],
    )


def _risk(evaluation: Evaluation) -> Chart:
    """Errors among the most confident answers; without any error there is nothing to draw."""
    curves = {
        method: [((i + 1) / len(curve), risk) for i, risk in enumerate(curve)]
        for method, curve in evaluation.risk.items()
    }
    wrong = any(risk > 0 for curve in evaluation.risk.values() for risk in curve)
    words = (
        "What if the least certain inputs went to a person?",
        "share of inputs that are answered, most confident first",
        "share of errors among them",
        "Lower is better; the right end is all inputs."
        if wrong
        else f"There are no errors among the {evaluation.answered} test inputs, so there is "
        "nothing to draw.",
    )
    return line_chart("risk", words, curves if wrong else {})


def _width(subject: Subject, x: Tensor) -> Chart:
    """How wide a regression's intervals are against distance."""
    x = x[:_RAYS]
    typical = math.sqrt(x[0].numel())
    read, points = Run(subject), []
    # Without a calibration nothing is known about the noise, and half a deviation to each side is
    # drawn: the deviation itself.
    bound = torch.tensor(0.5) if subject.bound is None else subject.bound
    for step in range(41):
        distance = typical * 10 ** (step / 10 - 1)
        reading = read(at_distance(subject.extension, x, distance)).reading
        low, high = interval(ranks(subject.given, reading), bound.to(reading.u.device))
        points.append((distance, float((high - low).mean())))
    known = "the residual's standard deviation, in units of the target"
    words = (
        "How wide are the intervals far away?",
        "distance from the training data, in standard deviations",
        f"{known if subject.bound is None else 'width of the 90 % interval'}, mean of "
        f"{len(x)} rays",
        "Each test input is moved along its line through the mean of the training data. Training "
        "data lie around the mark 'typical'; beyond it the model says that it knows less and less."
        + (
            " Intervals that hold the target need validation data with targets."
            if subject.bound is None
            else ""
        ),
    )
    marks = {"typical": typical}
    return line_chart("distance", words, {OURS: points}, log=True, log_y=True, marks=marks)


def _far(subject: Subject, model: RGPR, x: Tensor) -> Chart:
    """Confidence against distance, with what is certified."""
    extension = subject.extension
    try:
        certificate = model.certify(eps=0.05)
        radius = certificate.radius
    except (ValueError, TypeError):
        certificate, radius = None, math.inf
    x = x[:_RAYS]
    typical = math.sqrt(x[0].numel())
    furthest = math.log10(radius if math.isfinite(radius) else 1e6) + 0.5
    start = math.log10(typical) - 1
    distances = [10 ** (start + (furthest - start) * step / 40) for step in range(41)]
    read = Run(subject)
    series: dict[str, list[tuple[float, float]]] = {}
    for distance in distances:
        answers = read(at_distance(extension, x, distance)).answers
        for method, p in answers.items():
            series.setdefault(method, []).append((distance, float(surest(p).mean())))
    marks = {"typical": typical}
    dashed = []
    if certificate is not None and math.isfinite(radius):
        name = "certified bound"
        series[name] = [(distance, certificate.bound(distance)) for distance in distances]
        marks["certified"], dashed = radius, [name]
    words = (
        "How sure is it far away?",
        "distance from the training data, in standard deviations",
        f"confidence, mean of {len(x)} rays",
        "Each test input is moved along its line through the mean of the training data. "
        "Training data lie around the mark 'typical'; beyond 'certified' every input, in every "
        "direction, has a confidence below 1/C + 0.05.",
    )
    return line_chart("distance", words, series, log=True, dashed=dashed, marks=marks)
