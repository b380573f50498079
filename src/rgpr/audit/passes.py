"""One pass over a set of data: all that is measured about each input, as numbers on the CPU.

An input leaves a few numbers behind and not its probabilities, so memory grows with the number of
inputs and not with the number of classes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .._network.batches import Batch
from .._network.checks import network_dtype_device
from .._network.guards import Guard
from .._network.loaders import inputs_and_targets, on_device
from .._network.outputs import outputs_of
from .._network.reservoir import row_keys
from .._network.running import watching
from .._network.trace import linear_head
from ..answers.conformal import p_values
from ..answers.predictions import class_set, interval, ranks
from ..answers.probabilities import answer, log_probabilities
from ..answers.score import score
from ..extension import Extension, Reading
from ..likelihoods import LabelLikelihood
from ..posteriors.gaussian import Gaussian

__all__ = [
    "BASE",
    "NETWORK",
    "OURS",
    "OWN",
    "Answers",
    "Run",
    "Subject",
    "head_of",
    "overheard",
    "read",
    "surest",
]

# Whose answers are compared: the bare network's, the base's (a Laplace approximation, an ensemble,
# ...) and the model's.
NETWORK, BASE, OURS = "network", "base", "RGPR"
_P_VALUE = "p-value"
_CONFIDENCES = {method: f"{method}, confidence" for method in (NETWORK, BASE, OURS)}
_VARIANCE, _SCORE = f"{OURS}, variance", f"{OURS}, score"
# Names that no other detector may have.
OWN = (*_CONFIDENCES.values(), _VARIANCE, _SCORE, _P_VALUE)


@dataclass(frozen=True)
class Subject:
    """What is evaluated.

    Attributes:
        extension: The model's parts.
        references: Scores of its validation data, in ascending order; ``None`` before `calibrate`.
        given: The model as the fit left it, by which sets and intervals are ranked.
        bound: The largest conformal score inside of them; ``None`` without labelled validation
            data.
        detectors: Other detectors by name, see :func:`rgpr.evaluate`.
        known: Keys of inputs that the model has seen, by the name of the data; see
            :func:`rgpr._network.reservoir.row_keys`.
    """

    extension: Extension
    references: Tensor | None
    given: Extension
    bound: Tensor | None
    detectors: Mapping[str, Any]
    known: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def methods(self) -> list[str]:
        """Whose answers there are; a base that is its network counts once."""
        posterior = self.extension.posterior
        parts = posterior.mean_parts()
        if parts is None:  # its network makes features
            return [BASE, OURS]
        same = posterior.is_certain and len(parts) == 1 and parts[0][1] == 1.0
        return [NETWORK, OURS] if same else [NETWORK, BASE, OURS]


@dataclass
class Answers:
    """What was measured about ``N`` inputs, and about their ``Q`` questions if there are targets.

    A classification asks one question about each input, several labels one each.

    Attributes:
        count: ``N``.
        nans: For how many of the inputs the network or the model gives a NaN, as it does for an
            input that holds one.
        labelled: How many of the others had targets.
        certainty: By method, higher for inputs that are more like the data, ``(N,)``; a NaN counts
            as the least.
        p_value: ``(N,)``, empty for a model that was not calibrated.
        confidence: By method, the confidence in the answer to each question, ``(Q,)``.
        right: By method, whether it was right, ``(Q,)``.
        sums: By method and name of the metric, sums over the labelled inputs.
        seconds: How long the pass took, by the clock.
        known: By the name of the data, how many of the inputs the model has surely seen.
    """

    count: int = 0
    nans: int = 0
    labelled: int = 0
    certainty: dict[str, Tensor] = field(default_factory=dict)
    p_value: Tensor = field(default_factory=lambda: torch.zeros(0))
    confidence: dict[str, Tensor] = field(default_factory=dict)
    right: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, dict[str, float]] = field(default_factory=dict)
    seconds: float = 0.0
    known: dict[str, int] = field(default_factory=dict)


def read(subject: Subject, data: Iterable[Any], name: str, progress: bool) -> Answers:
    """Run the model once on every batch of the set of this name, and note what is measured.

    An input for which the network or the model gives a NaN is neither answered rightly nor
    wrongly, so it is left out of all that is known by targets.

    Raises:
        ValueError: No batch, targets that do not fit the outputs, a detector that cannot read this
            network, or one that gives a NaN for another input.
    """
    network = subject.extension.posterior.network
    device = network_dtype_device(network)[1]
    rows: dict[tuple[str, str], list[Tensor]] = {}
    found, run, started = Answers(), Run(subject), time.perf_counter()
    description = f"rgpr evaluate, {name}"
    pairs = inputs_and_targets(data, network, progress=progress, description=description)
    for number, (x, target) in enumerate(pairs):
        batch = run(on_device(x, device))
        if batch.count == 0:
            continue
        _check_detectors(subject, batch, found.count, name)
        found.count += batch.count
        found.nans += int(batch.nan.sum())
        if subject.known:
            keys = row_keys(x).cpu()
            for which, seen in subject.known.items():
                found.known[which] = found.known.get(which, 0) + int(torch.isin(keys, seen).sum())
        for method, values in batch.certainty.items():
            if method != _P_VALUE:
                values = values.masked_fill(values.isnan(), -torch.inf)
            rows.setdefault(("certainty", method), []).append(values.double().cpu())
        if target is None:
            continue
        y = subject.extension.likelihood.target(target, batch.mean.shape, number)
        if bool(batch.nan.all()):
            continue
        kept = ~batch.nan
        found.labelled += int(kept.sum())
        for method, graded in run.graded(batch, y.to(batch.mean.device)).items():
            sums = found.sums.setdefault(method, {})
            for kind, each in graded.items():
                values = each.reshape(batch.count, -1)[kept]  # of all questions about an input
                if kind in ("confidence", "right"):
                    rows.setdefault((kind, method), []).append(values.flatten().cpu())
                else:
                    sums[kind] = sums.get(kind, 0.0) + float(values.double().sum())
    for (kind, method), parts in rows.items():
        getattr(found, kind)[method] = torch.cat(parts)
    found.p_value = found.certainty.pop(_P_VALUE, found.p_value)
    found.seconds = time.perf_counter() - started
    return found


@dataclass(frozen=True)
class _Batch:
    """What is known about a batch after one pass; ``nan`` says for which inputs there is one."""

    count: int
    nan: Tensor
    mean: Tensor
    reading: Reading[Gaussian]
    answers: dict[str, Tensor]
    certainty: dict[str, Tensor]


class Run:
    """Runs the model on batches; the head is looked for in the first of them."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._head: nn.Module | None = None
        detectors = subject.detectors.values()
        self._reads_features = any(hasattr(each, "predict_features") for each in detectors)

    @torch.no_grad()
    def __call__(self, x: Batch) -> _Batch:
        subject = self._subject
        extension = subject.extension
        network = extension.posterior.network
        if self._reads_features and self._head is None:
            self._head = head_of(network, x)
        hooks, heard = overheard(network, self._head)
        with hooks, hooks:
            reading: Reading[Gaussian] = extension.read(x)
        own = outputs_of(heard[network], x, extension.posterior.output)
        answers = self._answers(own, reading)
        strange = score(extension, reading)
        certainty = {_CONFIDENCES[method]: surest(p) for method, p in answers.items()}
        if not answers:  # a regression says how far off it may be
            variance = answer(extension, reading, diagonal=True)[1]
            certainty[_VARIANCE] = -variance.sum(1)
        certainty[_SCORE] = -strange
        nan = reading.output.mean.isnan().any(1)
        for values in certainty.values():
            nan = nan | values.isnan()
        if subject.references is not None:
            certainty[_P_VALUE] = p_values(strange, subject.references)
        features = None if self._head is None else heard[self._head]
        for name, detector in subject.detectors.items():
            certainty[name] = -_scores(name, _scored(detector, x, own, features), len(own))
        return _Batch(len(own), nan, reading.output.mean, reading, answers, certainty)

    def _answers(self, own: Tensor, reading: Reading[Gaussian]) -> dict[str, Tensor]:
        """Probabilities of the alternatives, by method; none of a regression."""
        extension = self._subject.extension
        likelihood = extension.likelihood
        if not isinstance(likelihood, LabelLikelihood):
            return {}
        without = replace(reading, u=torch.zeros_like(reading.u))
        plain = replace(extension, temperature=torch.ones_like(extension.temperature))
        ways: dict[str, Callable[[], Tensor]] = {
            NETWORK: lambda: likelihood.log_probabilities(own.double()),
            BASE: lambda: log_probabilities(plain, without),
            OURS: lambda: log_probabilities(extension, reading),
        }
        return {method: ways[method]().exp() for method in self._subject.methods}

    @torch.no_grad()
    def graded(self, batch: _Batch, y: Tensor) -> dict[str, dict[str, Tensor]]:
        """By method: confidence and what was right of each question, and numbers to be summed."""
        subject = self._subject
        likelihood, graded = subject.extension.likelihood, dict[str, dict[str, Tensor]]()
        if not isinstance(likelihood, LabelLikelihood):
            graded[OURS] = {"squared error": (batch.mean - y).square().mean(1)}
            if subject.bound is not None:
                low, high = interval(ranks(subject.given, batch.reading), subject.bound)
                graded[OURS]["covered"] = ((low <= y) & (y <= high)).all(1)
                graded[OURS]["size"] = (high - low).mean(1)
            return graded
        for method, p in batch.answers.items():
            rows, of = likelihood.alone(p, y)
            top, index = rows.max(1)
            gaps = rows - torch.nn.functional.one_hot(of, rows.shape[1])
            questions = len(rows) // len(p)
            graded[method] = {
                "confidence": top,
                "right": index == of,
                "nll": -rows.gather(1, of[:, None]).log(),
                "brier": gaps.square().sum(1) / questions,
            }
        if subject.bound is not None and likelihood.sets:
            inside = class_set(ranks(subject.given, batch.reading), subject.bound)
            graded[OURS]["covered"] = inside.gather(1, y[:, None])
            graded[OURS]["size"] = inside
        return graded


def head_of(network: nn.Module, x: Batch) -> nn.Module:
    """The linear layer that the network's outputs come out of.

    Raises:
        ValueError: They do not come straight out of one.
    """
    name = linear_head(network, x)
    if name is None:
        raise ValueError(
            "a detector reads what goes into the last linear layer, and this network's outputs do "
            "not come straight out of one; leave that detector out"
        )
    return network.get_submodule(name)


def overheard(network: nn.Module, head: nn.Module | None) -> tuple[Guard, dict[nn.Module, Any]]:
    """Hooks for the next pass, and where they put what it returns and what goes into its head.

    What is heard is found by the module, the network itself or its head.
    """
    heard: dict[nn.Module, Any] = {}

    def returned(module: nn.Module, args: Any, output: Any) -> None:
        heard[module] = output

    def given(module: nn.Module, args: tuple[Any, ...]) -> None:
        heard[module] = args[0].clone()

    before = {} if head is None else {head: given}
    return watching(network, {network: returned}, before), heard


def _scored(detector: Any, x: Batch, logits: Tensor, features: Tensor | None) -> Any:
    """How strange another detector finds inputs, higher is stranger, from what is there already."""
    if hasattr(detector, "predict_features"):
        return detector.predict_features(features)
    if hasattr(detector, "predict_logits"):
        return detector.predict_logits(logits)
    return detector.score(x) if hasattr(detector, "score") else detector(x)


def _scores(name: str, scores: Any, count: int) -> Tensor:
    """What the detector of this name gave for so many inputs, if it is a score for each."""
    if not isinstance(scores, Tensor) or scores.shape != (count,):
        got = f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores)
        raise ValueError(
            f"the detector '{name}' gave {got} for {count} inputs; expected a tensor (B,), higher "
            "for stranger inputs"
        )
    return scores.double()


def _check_detectors(subject: Subject, batch: _Batch, before: int, name: str) -> None:
    """Refuse a NaN of another detector for an input of which the model makes numbers."""
    for key in subject.detectors:
        values = batch.certainty[key]
        lost = values.isnan() & ~batch.nan.to(values.device)
        if bool(lost.any()):
            raise ValueError(
                f"the detector '{key}' gave NaN for row {before + int(lost.nonzero()[0])}, from 0, "
                f"of the {name} data; let it give inf for inputs that are as strange as can be"
            )


def surest(p: Tensor) -> Tensor:
    """The probability of the surest answer about each input, ``(B,)``."""
    return p.flatten(1).amax(1)
