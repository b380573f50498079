r"""What only held-out data can tell; see :meth:`rgpr.RGPR.calibrate`.

References for p-values and bounds for sets come from scores of the data. How the residual and the
temperature are chosen within a budget is :mod:`rgpr.answers.onset`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..extension import Extension, Reading
from ..likelihoods import LabelLikelihood
from ..likelihoods.labels import of_target
from ..posteriors.gaussian import DiagonalGaussian, Gaussian
from . import conformal
from .examples import Examples, Shard, Wanted, merged
from .onset import Chosen, choose
from .probabilities import deviations, log_probabilities
from .score import weighed

__all__ = ["Calibrated", "Calibration", "calibrate", "held_out"]


@dataclass(frozen=True)
class Calibration:
    """What calibrating did; ``print`` it.

    Attributes:
        examples: How many held-out examples serve as references.
        seen: How many there were.
        labelled: Whether they had labels.
        temperature: Before and after.
        onset: The share of the held-out examples without any variance, before and after; ``None``
            for the paper's residual.
        slope: The factor on the variance beyond the onset, 1 if it stayed.
        nll: Mean negative log-likelihood of the held-out data: without residual and temperature,
            as the fit left it, and now; of several labels the sum of each example's. ``None``
            without labels.
        ece: Likewise the calibration error, for classes and labels.
        accuracy: Share of examples that are classified correctly, or of labels.
        noise: Regression: variance of the observations around the base's mean.
        warnings: What to think about.
    """

    examples: int
    seen: int
    labelled: bool
    temperature: tuple[float, float]
    onset: tuple[float, float] | None
    slope: float
    nll: tuple[float, float, float] | None = None
    ece: tuple[float, float, float] | None = None
    accuracy: float | None = None
    noise: float | None = None
    warnings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        kept = f"{self.examples} of {self.seen}" if self.examples < self.seen else f"{self.seen}"
        what = "labelled examples" if self.labelled else "examples without labels"
        smallest = 1 / (self.examples + 1)
        lines = [f"calibrated on {kept} {what}; the smallest p-value is {smallest:.2g}"]
        if self.accuracy is not None:
            lines.append(f"accuracy            {self.accuracy:.1%}")
        for name, values, scale, unit in (
            ("NLL", self.nll, 1.0, ""),
            ("ECE", self.ece, 100.0, " %"),
        ):
            if values is not None:
                base, before, after = (f"{scale * value:.4g}{unit}" for value in values)
                lines.append(f"{name}                 base {base}, fitted {before}, now {after}")
        if self.noise is not None:
            lines.append(f"observations' noise {self.noise:.3g} (variance)")
        if self.temperature[0] != self.temperature[1]:
            before, after = (f"{value:.3g}" for value in self.temperature)
            lines.append(f"temperature         {before} -> {after}")
        if self.onset is not None:
            before, after = (f"{share:.1%}" for share in self.onset)
            lines.append(
                f"exactly the base's  the answers of {after} of these examples, of {before} before"
            )
            times = "" if self.slope == 1 else f"{self.slope:.3g} times "
            lines.append(
                "less sure           the answers for stranger inputs, by an added variance that "
                f"grows {times}as steeply with the distance as after fit"
            )
        return "\n".join([*lines, *(f"! {warning}" for warning in self.warnings)])


@dataclass(frozen=True)
class Calibrated:
    """What calibrating sets on a model.

    Attributes:
        chosen: Onset, slope and temperature.
        references: Scores of the held-out inputs, in ascending order.
        label_scores: Conformal scores of their labels, in ascending order; ``None`` without labels.
        layers: How strange each representation found some of these inputs, ``(N, L)``, in the units
            of :class:`~rgpr.answers.Explanation`: what :class:`rgpr.Monitor` compares layers with.
        keys: Keys of the same inputs, by which test data that hold some of them are noticed; see
            :func:`rgpr._network.reservoir.row_keys`.
    """

    chosen: Chosen
    references: Tensor
    label_scores: Tensor | None
    layers: Tensor
    keys: Tensor


# Inputs whose layers and keys are kept: 32 KiB for each representation, and for the keys.
_LAYER_REFERENCES = 4096


def held_out(
    given: Extension, fitted_on: tuple[Tensor, int] | None, progress: bool = True
) -> Shard:
    """What collects held-out examples to calibrate with.

    Args:
        given: The model as the fit or the user left it.
        fitted_on: Keys of some training inputs and how many inputs there were, if known.
        progress: Show a progress bar where there is a terminal.
    """
    wanted = Wanted(
        "rgpr calibrate",
        progress,
        targets="optional",
        at_most=conformal.MOST_REFERENCES,
        watch=None if fitted_on is None else fitted_on[0],
        keep_overflowed=True,
    )
    return Shard(given, wanted)


def calibrate(
    shard: Shard,
    val_loader: Iterable[Any] | None,
    fitted_on: tuple[Tensor, int] | None,
    *,
    max_nll_increase: float,
) -> tuple[Calibrated, Calibration]:
    """Read held-out data once, choose, and report; nothing is changed.

    Args:
        shard: Held-out examples that were read before, or none; see :func:`held_out`.
        val_loader: More data, or ``None``.
        fitted_on: Keys of some training inputs and how many inputs there were, if known.
        max_nll_increase: The budget.
    """
    if not max_nll_increase >= 0:
        raise ValueError(f"max_nll_increase = {max_nll_increase} must not be negative")
    given, examples = shard.extension, merged(shard, val_loader)
    notes = _notes(given, examples, fitted_on)
    chosen = Chosen(given.residual.onset, given.residual.slope, given.temperature)
    report: dict[str, Any] = {}
    # Of rows where the network overflowed only the scores are known.
    inside = examples.u[:, 0] < torch.inf
    if examples.target is not None and bool(inside.any()):
        chosen, report = choose(given, examples.of(inside), max_nll_increase)
        notes += _disagreement(given, examples, chosen, report.get("accuracy"))
    strangeness = given.residual.strangeness(examples.u)
    references = weighed(strangeness, examples.first, given.likelihood).sort().values
    label_scores = None if examples.target is None else _label_scores(given, examples)
    onset = _quiet(given, examples, chosen, notes)
    for note in notes:
        warnings.warn(note, stacklevel=5)  # through the decorators of RGPR.calibrate
    typical = given.residual.typical
    # The kept examples are in an order as good as random, so the first are an even sample.
    layers = examples.u[:_LAYER_REFERENCES] / torch.where(typical > 0, typical, 1.0)
    keys = examples.keys[:_LAYER_REFERENCES].to(layers.device)
    return Calibrated(chosen, references, label_scores, layers, keys), Calibration(
        examples=len(examples),
        seen=examples.seen,
        labelled=examples.target is not None,
        temperature=(float(given.temperature), float(chosen.temperature)),
        onset=onset,
        slope=float(chosen.slope),
        warnings=notes,
        **report,
    )


def _label_scores(given: Extension, examples: Examples) -> Tensor:
    """How strange each label is given the answer, in ascending order, ``(N,)``."""
    gaussian = DiagonalGaussian(examples.first, examples.second)
    # What was collected is float64, whatever dtype the inputs have.
    reading: Reading[Gaussian] = Reading(gaussian, examples.u, torch.float64)
    if isinstance(given.likelihood, LabelLikelihood):
        every = conformal.class_scores(log_probabilities(given, reading))
        each = of_target(every, examples.labels)
        return each.reshape(len(each), -1).amax(1).sort().values
    error = (examples.labels - examples.first).abs()
    return (error / deviations(given, reading)).amax(1).sort().values


def _quiet(
    given: Extension, examples: Examples, chosen: Chosen, notes: list[str]
) -> tuple[float, float] | None:
    """The share of the examples without any variance, before and after; a note if it moved far."""
    before = given.residual.onset
    if before is None or chosen.onset is None:
        return None
    if float(chosen.onset) > 2 * float(before):
        notes.append(
            f"the variance sets in at {float(chosen.onset / before):.3g} times the "
            "strangeness that fit left, since these data lie further out than the training "
            "data; inputs in between are answered as the base does. Are they of the same kind?"
        )
    after = given.residual.with_onset(chosen.onset, chosen.slope)
    shares = [float((r.beyond(examples.u) == 0).double().mean()) for r in (given.residual, after)]
    return shares[0], shares[1]


def _disagreement(
    given: Extension, examples: Examples, chosen: Chosen, accuracy: float | None
) -> list[str]:
    """A word where a network that is sure agrees with the labels no more than by chance."""
    if not given.likelihood.sets or accuracy is None:
        return []
    chance = 1 / given.likelihood.classes(examples.first.shape[1])
    error = (chance * (1 - chance) / len(examples)) ** 0.5
    sure = float(chosen.temperature) > 2 * float(given.temperature)
    if not sure or accuracy > chance + 3 * error:
        return []
    return [
        f"only {accuracy:.1%} of the labels agree with the network, and by chance {chance:.1%} "
        "would; are the labels in the order of the inputs, and the classes in that of the outputs?"
    ]


def _notes(given: Extension, examples: Examples, fitted_on: tuple[Tensor, int] | None) -> list[str]:
    """What a person should know about the data they calibrate with."""
    notes = []
    if fitted_on is not None:
        keys, count = fitted_on
        # If these examples were drawn from the training data, so many of them would be known.
        expected = len(keys) * min(1.0, examples.seen / count)
        if examples.watched >= max(2.0, 0.5 * expected):
            notes.append(
                f"at least {examples.watched} of these {examples.seen} inputs are training inputs "
                "that fit saw; their scores are too small, and p-values and sets will not keep "
                "their promise. Calibrate with inputs that were held out"
            )
    if len(examples) < conformal.references_for(0.05):
        needed = conformal.references_for(0.05)
        notes.append(
            f"{len(examples)} examples: no p-value is below 1/{len(examples) + 1}, so "
            f"flag(alpha=0.05) is refused; that takes {needed}"
        )
    target = examples.target if isinstance(given.likelihood, LabelLikelihood) else None
    if target is not None and len(target) > 1 and bool((target == target[0]).all()):
        notes.append(
            f"all labels are {target[0].tolist()}: what is learned holds for such inputs alone. "
            "Calibrate with all classes or labels, as often as they will come"
        )
    return notes
