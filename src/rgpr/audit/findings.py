"""What a report says about a model: numbers, charts and examples, measured and not yet drawn."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import noise
from .._network.batches import Batch, run
from .._network.checks import network_dtype_device
from .._network.loaders import inputs_and_targets, on_device
from ..guarantee.inputs import at_distance
from ..model import RGPR
from .charts import Chart, line_chart
from .evaluate import Evaluation, share
from .passes import Answers, Run, Subject, surest

__all__ = ["Example", "Threshold", "charts", "examples", "made_outliers", "thresholds", "timings"]

_LEVELS = (0.01, 0.05, 0.1, 0.2)
_RAYS = 32
_EXAMPLES = 6
_MADE = 1000
# A bin of a reliability chart with fewer answers says nothing.
_FEW = 5


@dataclass(frozen=True)
class Threshold:
    """What happens at one level.

    Attributes:
        alpha: The level.
        score: Inputs with at least this score are held back.
        shares: By set, the share of inputs that is.
    """

    alpha: float
    score: float
    shares: dict[str, float]


@dataclass(frozen=True)
class Example:
    """One input, and why it is where it is.

    Attributes:
        x: The input, on the CPU.
        number: Its place in the data.
        score: How strange it is.
        p_value: Of a calibrated model.
        confidence: Of the prediction.
        label: The prediction.
        layer: The layer that finds it strangest.
        times: How many times the median at the data that layer's strangeness is.
        truth: The target, if there is one.
    """

    x: Tensor
    number: int
    score: float
    p_value: float | None
    confidence: float | None
    label: str
    layer: str
    times: float
    truth: str = ""


def made_outliers(x: Tensor) -> dict[str, Tensor]:
    """Outliers that can be made of any inputs: shuffled, uniform, and smoothed ones of images."""
    generator = torch.Generator().manual_seed(0)
    x = x[:_MADE].cpu()
    flat = x.flatten(1)
    order = torch.rand(flat.shape, generator=generator).argsort(1)
    low, high = x.amin(), x.amax()
    made = {
        "shuffled": flat.gather(1, order).reshape(x.shape),
        "uniform": noise.uniform(x, low=low, high=high, generator=generator),
    }
    if x.dim() == 4 and min(x.shape[2:]) > 7:
        made["smoothed"] = noise.smoothed(x, low=low, high=high, generator=generator)
    return made


def charts(evaluation: Evaluation, subject: Subject, model: RGPR, x: Batch) -> list[Chart]:
    """The pictures of a report.

    Args:
        evaluation: What was measured.
        subject: The model as :mod:`rgpr.audit.passes` takes it.
        model: The model.
        x: A few inputs like the data.
    """
    found = []
    far = _far(subject, model, x) if isinstance(x, Tensor) else None
    found += [far] if far is not None else []
    if evaluation.reliability:
        diagonal = {"honest": [(0.0, 0.0), (1.0, 1.0)]}
        series = {
            method: [(row[0], row[1]) for row in rows if row[2] >= _FEW]
            for method, rows in evaluation.reliability.items()
        }
        words = (
            "Is the confidence honest?",
            "confidence",
            "share of right answers",
            "Above the dashed line the model is right more often than it says, below less often. "
            f"Bins with fewer than {_FEW} answers are left out.",
        )
        found.append(line_chart("reliability", words, {**series, **diagonal}, dashed=["honest"]))
        curves = {
            method: [((i + 1) / len(curve), risk) for i, risk in enumerate(curve)]
            for method, curve in evaluation.risk.items()
        }
        words = (
            "What if the least certain inputs went to a person?",
            "share of inputs that are answered, most confident first",
            "share of errors among them",
            "Lower is better; the right end is all inputs.",
        )
        found.append(line_chart("risk", words, curves))
    return found


def _far(subject: Subject, model: RGPR, x: Tensor) -> Chart | None:
    """Confidence against distance, with what is certified."""
    extension = subject.extension
    if extension.source is not None or model.likelihood == "regression":
        return None
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


def thresholds(subject: Subject, sets: Mapping[str, Answers]) -> list[Threshold]:
    """What would be held back at usual levels, by set."""
    references, rows = subject.references, []
    if references is None:
        return []
    for alpha in _LEVELS:
        # An input is held back if at most so many references are at least as strange.
        allowed = math.floor(alpha * (len(references) + 1)) - 1
        if allowed >= 0:
            score = float(references[max(0, len(references) - 1 - allowed)])
            shares = {name: share(each.p_value, alpha) for name, each in sets.items()}
            rows.append(Threshold(alpha, score, shares))
    return rows


@torch.no_grad()
def examples(model: RGPR, data: Iterable[Any]) -> dict[str, list[Example]]:
    """The strangest and the most ordinary inputs of a set."""
    network = model.posterior.network
    device = network_dtype_device(network)[1]
    kept: list[Example] = []
    number = 0
    for x, y in inputs_and_targets(data, network, progress=False, description=""):
        if not isinstance(x, Tensor):
            return {}
        explained = model.explain(on_device(x, device))
        score = explained.score.cpu()
        order = score.argsort()
        count = min(_EXAMPLES, len(order))
        rows = sorted({*order[:count].tolist(), *order[-count:].tolist()})
        answered: Any = model(on_device(x[rows], device))
        p = None if model._references is None else model.p_value(on_device(x[rows], device))
        for place, row in enumerate(rows):
            distances = explained.strangeness[row]
            layer = int(distances.argmax())
            label, confidence = _said(answered, place, model.likelihood)
            kept.append(
                Example(
                    x[row].detach().cpu(),
                    number + row,
                    float(score[row]),
                    None if p is None else float(p[place]),
                    confidence,
                    label,
                    explained.layers[layer],
                    float(distances[layer]),
                    "" if y is None else _true(y[row], model.likelihood),
                )
            )
        number += len(x)
        kept.sort(key=lambda example: example.score)
        kept = (
            kept[: 2 * _EXAMPLES]
            if len(kept) <= 2 * _EXAMPLES
            else [*kept[:_EXAMPLES], *kept[-_EXAMPLES:]]
        )
    half = max(1, len(kept) // 2)
    return {"strangest": kept[::-1][:half], "most ordinary": kept[:half]}


def _said(answered: Any, row: int, likelihood: str) -> tuple[str, float | None]:
    if likelihood == "regression":
        mean, covariance = answered
        deviation = float(covariance[row].diagonal().mean().sqrt())
        return f"{float(mean[row].mean()):.3g} ± {deviation:.2g}", None
    p = answered[row]
    if likelihood == "multilabel":
        there = (p > 0.5).nonzero().flatten().tolist()
        return f"labels {there}", float(torch.maximum(p, 1 - p).max())
    return f"class {int(p.argmax())}", float(p.max())


def _true(y: Tensor, likelihood: str) -> str:
    if likelihood == "regression":
        return f"{float(y.double().mean()):.3g}"
    if likelihood == "multilabel":
        return f"labels {(y > 0).nonzero().flatten().tolist()}"
    return f"class {int(y) if y.dim() == 0 or len(y) == 1 else int(y.argmax())}"


def timings(model: RGPR, x: Batch) -> dict[str, float]:
    """Seconds for a batch: the bare network, and the model; the median of five runs."""
    network = model.posterior.network

    def seconds(function: Any) -> float:
        times = []
        with torch.no_grad():
            function()
            for _ in range(5):
                started = time.perf_counter()
                function()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - started)
        return sorted(times)[2]

    return {
        "bare network": seconds(lambda: run(network, x)),
        "with RGPR": seconds(lambda: model(x)),
    }
