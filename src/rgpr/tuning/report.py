"""What a search came to, in numbers and words."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..answers.examples import Parameters
from ..extension import Extension
from ..likelihoods import LabelLikelihood
from ..metrics import confidence
from .objectives import Objective
from .result import TuningResult
from .search import Found
from .space import INPUT_FLOOR

__all__ = ["report"]


def report(
    extension: Extension, objective: Objective, found: Found, seconds: float
) -> TuningResult:
    """The result that a user gets.

    Args:
        extension: The model that was tuned.
        objective: What was maximised.
        found: What the search came to.
        seconds: How long it took.
    """
    layers, tuned, data = extension.layers, found.tuned, objective.data
    labels = isinstance(extension.likelihood, LabelLikelihood)
    return TuningResult(
        objective=objective.name,
        before=found.before,
        after=found.after,
        sigma2=dict(zip(layers, tuned.sigma2.tolist(), strict=True)),
        share=_share(layers, tuned.sigma2, data.u, data.u_outliers),
        temperature=float(tuned.temperature),
        noise=None if labels else float(tuned.noise),
        ood_weight=found.weight,
        metrics=_metrics(objective, found.now, tuned),
        trials=found.trials,
        converged=found.optimum.converged,
        history=found.optimum.history,
        examples=data.used,
        seen=data.seen,
        seconds=seconds,
        warnings=_notes(layers, found),
    )


def _metrics(
    objective: Objective, before: Parameters, after: Parameters
) -> dict[str, tuple[float, float]]:
    """What the tuning did to predictions, as pairs of before and after."""
    validation, outliers = objective.validation, objective.outliers
    if validation is None or not isinstance(validation.likelihood, LabelLikelihood):
        return {}
    target, likelihood = validation.labels, validation.likelihood

    def sure(p: Tensor) -> float:
        """The mean confidence, of several labels over all of them."""
        return float(confidence(p.reshape(-1, p.shape[-1])).mean())

    p, q = validation.probabilities(before), validation.probabilities(after)
    pairs = {
        "validation accuracy": (likelihood.accuracy(p, target), likelihood.accuracy(q, target)),
        "validation NLL": (likelihood.nll(p, target), likelihood.nll(q, target)),
        "validation ECE": (likelihood.ece(p, target), likelihood.ece(q, target)),
        "mean confidence at data": (sure(p), sure(q)),
    }
    if outliers is not None:
        p, q = outliers.probabilities(before), outliers.probabilities(after)
        pairs["mean confidence at outliers"] = (sure(p), sure(q))
    return pairs


def _share(
    layers: Sequence[str], sigma2: Tensor, at_data: Tensor, at_outliers: Tensor | None
) -> dict[str, tuple[float, float | None]]:
    data = (sigma2 * at_data.median(0).values).tolist()
    far: list[float | None] = [None] * len(layers)
    if at_outliers is not None:
        far = (sigma2 * at_outliers.median(0).values).tolist()
    return {layer: (a, b) for layer, a, b in zip(layers, data, far, strict=True)}


def _notes(layers: Sequence[str], found: Found) -> list[str]:
    """What a person should know about the outcome."""
    notes = []
    space, tuned, trials = found.space, found.tuned, found.trials
    # A lower temperature makes up for a larger scale: only the two together say how much it is.
    typical = (tuned.sigma2 * space.typical * tuned.temperature.square()).tolist()
    zero = [layer for layer, value in zip(layers, typical, strict=True) if value < 1e-6]
    infinite = [layer for layer, value in zip(layers, typical, strict=True) if value > 1e6]
    if float(tuned.sigma2[0] * space.typical[0]) < 2 * INPUT_FLOOR:
        notes.append(
            f"sigma2 of the input ran towards zero and was held at {float(tuned.sigma2[0]):.2g}, "
            "where no prediction at the data notices it: this objective sees no use for variance "
            "there. Confidence still goes to 1/C, but further out; objective='ood' with "
            "outliers of your own brings that nearer"
        )
    if zero:
        notes.append(
            f"sigma2 ran to zero for {zero}: these layers do not help to tell the outliers from "
            "the data, or hurt the likelihood. Nothing is wrong; leave them out to save time"
        )
    if infinite:
        notes.append(
            f"sigma2 ran to infinity for {infinite}: predictions at the data are drowned there. "
            "The base is worse than guessing on these targets, or the labels do not belong to the "
            "inputs, or ood_weight is far too large"
        )
    if trials and all(trial.increase > 0 for trial in trials) and trials[-1].weight == 0:
        notes.append(
            "no weight of the outliers stays within the calibration budget; the variance was "
            "shrunk until it does. Allow a larger increase, or use temperature=True"
        )
    if not found.optimum.converged:
        notes.append("the search ended before its gradient vanished; the result may be improved")
    return notes
