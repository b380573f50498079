"""Calibration and detection in one table, beside the bare network, the base and other detectors."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import metrics
from .._axes import row
from .._text import aligned
from ..model import RGPR
from . import plots
from .passes import OURS, OWN, Answers, Subject, read

__all__ = [
    "DETECTION",
    "Evaluation",
    "evaluate",
    "measure",
    "named",
    "share",
    "subject_of",
    "summary",
]

# Points of a risk-coverage curve that are kept.
_POINTS = 200
# A wrong answer above this confidence is one that nobody would have looked at again.
_SURE = 0.9
# The 95 % quantile of Kolmogorov's distribution.
_KOLMOGOROV = 1.358
# Metrics of detection, in the order in which tables show them.
DETECTION = ("auroc", "fpr95", "fpr95 OpenOOD", "aupr in", "aupr out")


@dataclass(frozen=True, repr=False)
class Evaluation:
    """What :func:`rgpr.evaluate` measured; ``print`` it.

    Attributes:
        answers: By method and metric, how good and how honest the answers on the test data are.
            ``nll`` and ``brier`` are means, ``ece`` and ``adaptive ece`` calibration errors,
            ``aurc`` the area under the risk-coverage curve, ``wrong above 0.9`` the share of errors
            whose confidence was above 0.9, ``covered`` and ``size`` those of conformal sets or
            intervals, ``rmse`` of a regression.
        detection: By set of outliers, method and metric, how well they are told from test data.
            ``fpr95`` is the paper's, the share of outliers that pass where 95 % of the data do;
            ``fpr95 OpenOOD`` is the share of the data refused where 95 % of outliers are.
        alarms: Of a calibrated model on the test data: the level ``alpha``, the share of
            ``false alarms`` at it, and ``gap``, the largest distance between the share of p-values
            below a level and that level, over all levels. If the test data are like the held-out
            data, it is at most ``gap by chance`` in 19 of 20 cases.
        flagged: By set of outliers, the share that is flagged at ``alpha``.
        reliability: By method, rows of mean confidence, accuracy and count of equal bins.
        risk: By method, the share of errors among the most confident answers, at even coverages.
        counts: How many inputs each set has.
        seconds: How long the pass over each set took.
        nans: For how many inputs of each set the network or the model gives a NaN, as it does for
            inputs that hold one. They count as the strangest in ``detection`` and as flagged, and
            are left out of ``answers``, ``reliability`` and ``risk``.
    """

    answers: dict[str, dict[str, float]]
    detection: dict[str, dict[str, dict[str, float]]]
    alarms: dict[str, float]
    flagged: dict[str, float]
    reliability: dict[str, list[list[float]]]
    risk: dict[str, list[float]]
    counts: dict[str, int]
    seconds: dict[str, float]
    nans: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        """All of it as JSON."""
        return json.dumps(asdict(self), indent=1)

    def to_frame(self) -> Any:
        """A pandas frame with columns ``set``, ``method``, ``metric`` and ``value``."""
        import pandas as pd  # type: ignore[import-untyped]

        rows = [
            ("test", method, metric, value)
            for method, values in self.answers.items()
            for metric, value in values.items()
        ]
        rows += [("test", OURS, metric, value) for metric, value in self.alarms.items()]
        rows += [
            (name, method, metric, value)
            for name, methods in self.detection.items()
            for method, values in methods.items()
            for metric, value in values.items()
        ]
        rows += [(name, OURS, "flagged", value) for name, value in self.flagged.items()]
        return pd.DataFrame(rows, columns=["set", "method", "metric", "value"])

    def plot(self) -> Any:
        """Reliability, risk against coverage, and detection; an array of matplotlib Axes."""
        wanted: list[tuple[Callable[..., Any], Any]] = [
            (plots.reliability, self.reliability),
            (plots.risk, self.risk),
            (plots.detection, self.detection),
        ]
        pictures = [(draw, found) for draw, found in wanted if found]
        if not pictures:
            raise ValueError("there is nothing to draw: give test data with targets, or outliers")
        axes = row(len(pictures))
        for (draw, found), ax in zip(pictures, axes, strict=True):
            draw(found, ax)
        return axes

    @property
    def answered(self) -> int:
        """How many of the test inputs ``answers`` is about: all but those with a NaN."""
        return self.counts["test"] - self.nans.get("test", 0)

    @property
    def like_held_out(self) -> bool | None:
        """Whether the test data look like those of the calibration; ``None`` without one."""
        return self.alarms["gap"] <= self.alarms["gap by chance"] if self.alarms else None

    @property
    def verdict(self) -> str:
        """The same in words."""
        if self.like_held_out is None:
            return "nothing is known about whether these test data are like the held-out data"
        look = "look" if self.like_held_out else "are probably not"
        return f"these test data {look} like the held-out data"

    def __str__(self) -> str:
        parts = [self._answers_text()] if self.answers else []
        if self.alarms:
            parts.append(self._alarms_text())
        parts += [self._detection_text(name) for name in self.detection]
        return "\n\n".join(parts)

    __repr__ = __str__

    def _answers_text(self) -> str:
        names = list(dict.fromkeys(name for values in self.answers.values() for name in values))
        nans = self.nans.get("test", 0)
        left = f", and {nans} with NaN left out" if nans else ""
        head = [f"test data ({self.answered}{left})", *names]
        rows = [
            [method, *(f"{values[name]:.4g}" if name in values else "" for name in names)]
            for method, values in self.answers.items()
        ]
        return aligned([head, *rows])

    def _alarms_text(self) -> str:
        alpha, gap, chance = (self.alarms[name] for name in ("alpha", "gap", "gap by chance"))
        return (
            f"{100 * self.alarms['false alarms']:.1f} % of the test data are flagged at alpha = "
            f"{alpha:g}; of data like the held-out data about {100 * alpha:g} % are.\n"
            f"At no level is the share of flagged inputs further than {gap:.3f} from that level. "
            f"By chance alone it stays within {chance:.3f} in 19 of 20 cases,\nso {self.verdict}."
        )

    def _detection_text(self, name: str) -> str:
        flagged = f", {100 * self.flagged[name]:.1f} % flagged" if name in self.flagged else ""
        nans = f", {self.nans[name]} with NaN" if self.nans.get(name) else ""
        head = [f"{name} ({self.counts[name]}{nans}{flagged})", *DETECTION]
        rows = [
            [method, *(f"{100 * values[metric]:.1f}" for metric in DETECTION)]
            for method, values in self.detection[name].items()
        ]
        return aligned([head, *rows])


def evaluate(
    model: RGPR,
    test: Any,
    outliers: Mapping[str, Any] | None = None,
    *,
    detectors: Mapping[str, Any] | None = None,
    alpha: float = 0.05,
    progress: bool = True,
) -> Evaluation:
    """Measure calibration and detection, from one pass of the network over each set.

    An input that holds a NaN counts as the strangest, as :meth:`RGPR.flag` treats it. It has no
    answer, so it is left out of what is said about answers; ``nans`` of the result counts such
    inputs.

    Args:
        model: A fitted model; p-values and sets need one that was calibrated.
        test: Held-out data with targets, in any form that :meth:`RGPR.fit` takes, and in no part
            of `fit` or `calibrate`. Without targets only detection is measured.
        outliers: Sets of inputs that the network was not trained for, by name.
        detectors: Other detectors to compare with, by name, fitted: ours, those of pytorch-ood, or
            any function of a batch of inputs to scores ``(B,)`` that are higher for stranger
            inputs. One that has ``predict_logits`` or ``predict_features`` gets what this pass
            read; any other runs the network itself.
        alpha: The level at which inputs are flagged.
        progress: Show a progress bar where there is a terminal.

    Raises:
        RuntimeError: The model was not fitted.
        TypeError: ``outliers`` or ``detectors`` are not given by name.
        ValueError: Targets that do not fit, a set without inputs, a name that stands for something
            else here, or a detector that gives no score for an input.

    Example:
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> network = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))
        >>> x, y = torch.randn(64, 2), torch.randint(3, (64,))
        >>> found = evaluate(RGPR(network).fit([x]), (x, y), {"far": 100 * torch.randn(50, 2)})
        >>> found.detection["far"]["RGPR, score"]["auroc"] > 0.99
        True
    """
    sets = {"test": test, **named(outliers)}
    subject = subject_of(model, detectors)
    return summary(subject, measure(subject, model, sets, progress), alpha)


def subject_of(model: RGPR, detectors: Mapping[str, Any] | None = None) -> Subject:
    """A fitted model as :mod:`rgpr.audit.passes` takes it.

    Raises:
        TypeError: The detectors are not given by name.
        ValueError: A name is taken.
    """
    if detectors is not None and not isinstance(detectors, Mapping):
        raise TypeError(
            f"detectors is a {type(detectors).__name__}; expected detectors by name, "
            "{'energy': detector}"
        )
    taken = [name for name in detectors or {} if name in OWN]
    if taken:
        raise ValueError(
            f"detectors are named {taken}, and the model's own rows have these names; choose others"
        )
    bound = None if model._label_scores is None else model._bound(0.9)
    given, references = model._as_given(), model._references
    keys = {"training": model._fit_keys, "validation": model._val_keys}
    known = {name: each.cpu() for name, each in keys.items() if each is not None}
    return Subject(model._extension(), references, given, bound, dict(detectors or {}), known)


def named(outliers: Mapping[str, Any] | None) -> dict[str, Any]:
    """Sets of outliers by their names, none of which is that of the test data."""
    if outliers is None:
        return {}
    if not isinstance(outliers, Mapping):
        raise TypeError(
            f"outliers is a {type(outliers).__name__}; expected sets by name, {{'noise': inputs}}. "
            "Targets of the test data go with the inputs: (x, y)"
        )
    if "test" in outliers:
        raise ValueError("outliers={'test': ...}: this name is taken by the test data; use another")
    return dict(outliers)


def measure(
    subject: Subject, model: RGPR, sets: Mapping[str, Any], progress: bool
) -> dict[str, Answers]:
    """What one pass over each set says, the test data first.

    Raises:
        ValueError: A set holds no input.
    """
    found = {}
    for name, data in sets.items():
        found[name] = read(subject, model._data(data), name, progress)
        if found[name].count == 0:
            raise ValueError(f"the {name} data hold no input; give at least one, or leave them out")
    return found


def summary(subject: Subject, sets: Mapping[str, Answers], alpha: float) -> Evaluation:
    """The metrics of what was measured, the test data first."""
    data, *_ = sets.values()
    outliers = {name: each for name, each in sets.items() if each is not data}
    levels = {}
    if subject.references is not None and len(data.p_value):
        levels = _alarms(data.p_value, len(subject.references), alpha)
    return Evaluation(
        answers={method: _grades(data, method) for method in data.sums},
        detection={name: _detection(data, each) for name, each in outliers.items()},
        alarms=levels,
        flagged={name: share(each.p_value, alpha) for name, each in outliers.items() if levels},
        reliability={
            method: metrics.reliability(data.confidence[method], data.right[method]).tolist()
            for method in data.confidence
        },
        risk={method: _curve(data, method) for method in data.confidence},
        counts={name: each.count for name, each in sets.items()},
        seconds={name: each.seconds for name, each in sets.items()},
        nans={name: each.nans for name, each in sets.items()},
    )


def _grades(data: Answers, method: str) -> dict[str, float]:
    means = {name: total / data.labelled for name, total in data.sums[method].items()}
    if "squared error" in means:
        return {"rmse": means.pop("squared error") ** 0.5, **means}
    confidence, right = data.confidence[method], data.right[method]
    wrong = ~right
    return {
        "accuracy": right.double().mean().item(),
        "nll": means.pop("nll"),
        "brier": means.pop("brier"),
        "ece": _ece(metrics.reliability(confidence, right)),
        "adaptive ece": metrics.adaptive_ece(confidence, right),
        "aurc": metrics.aurc(confidence, right),
        f"wrong above {_SURE}": (confidence[wrong] > _SURE).double().mean().item()
        if bool(wrong.any())
        else 0.0,
        **means,
    }


def _ece(rows: Tensor) -> float:
    filled = rows[rows[:, 2] > 0]
    gaps = (filled[:, 0] - filled[:, 1]).abs() * filled[:, 2]
    return float(gaps.sum() / filled[:, 2].sum())


def _curve(data: Answers, method: str) -> list[float]:
    curve = metrics.risk_coverage(data.confidence[method], data.right[method])
    places = torch.linspace(0, len(curve) - 1, min(_POINTS, len(curve))).round().long()
    return curve[places].tolist()


def _detection(data: Answers, outliers: Answers) -> dict[str, dict[str, float]]:
    found = {}
    for method, inside in data.certainty.items():
        outside = outliers.certainty[method]
        found[method] = {
            "fpr95": metrics.fpr95(inside, outside),
            "fpr95 OpenOOD": metrics.fpr95_openood(inside, outside),
            "auroc": metrics.auroc(inside, outside),
            "aupr in": metrics.auprc(inside, outside),
            "aupr out": metrics.auprc(-outside, -inside),
        }
    return found


def share(p_value: Tensor, alpha: float) -> float:
    """The share of inputs that are flagged at this level, those with a NaN among them."""
    return (~(p_value > alpha)).double().mean().item()


def _alarms(p_value: Tensor, references: int, alpha: float) -> dict[str, float]:
    p = p_value.nan_to_num(0.0).sort().values
    steps = torch.arange(1, len(p) + 1, dtype=torch.float64) / len(p)
    gap = torch.maximum((steps - p).abs(), (steps - 1 / len(p) - p).abs()).max().item()
    # P-values are ranks among the references, so the gap is the distance between two samples: the
    # 95 % quantile is that of Kolmogorov and Smirnov, and a rank is one reference above its share.
    chance = _KOLMOGOROV * (1 / len(p) + 1 / references) ** 0.5 + 1 / (references + 1)
    alarms = share(p_value, alpha)
    return {"alpha": alpha, "false alarms": alarms, "gap": gap, "gap by chance": chance}
