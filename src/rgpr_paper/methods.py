"""The methods that are compared, by name, over one trained network.

A name is a base, alone or with the residual: ``LLL``, ``LLL-RGPR-OOD``, ``KFL-RGPR``.

- Bases: ``MAP``, ``TS`` (temperature scaling), ``DE`` (deep ensemble), ``GP-DSCS``, ``LLL``
  (last-layer Laplace), ``KFL`` (Kronecker-factored Laplace), ``SWAG``, ``SVDKL``.
- ``-RGPR-LL`` and ``-RGPR-OOD``: the paper's residual, tuned by the validation likelihood and
  with outliers of weight 0.5; ``-RGPR-OOD-natural`` takes natural images as these outliers.
- ``-RGPR``: the paper's residual with all scales at 1e-10, as in its far-away table;
  ``-RGPR-untuned``: with those that the fit sets.
- ``-RGPR-onset``: this library's default residual, calibrated on the validation images.
- Two kinds of methods give scores instead of probabilities: ``LLL-RGPR-score``, the score of that
  model, and every registered detector by the name of its class, such as ``Energy`` or ``KNN``.

Bases with Gaussian outputs predict by the probit; the samples of an ensemble, of KFL and of SWAG
are averaged after the softmax. Prior precisions and temperatures are chosen, and scales tuned, on
2000 images split off the test set, as in the paper; test images are the rest. Outliers for tuning
are smoothed noise made of training images, and never a test set of outliers.

The bases are in :mod:`rgpr_paper.image_posteriors`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from rgpr import noise
from rgpr.answers import Calibration
from rgpr.baselines.detectors import DETECTORS, Detector, MaxSoftmax
from rgpr.model import RGPR
from rgpr.posteriors import Ensemble, Posterior
from rgpr.posteriors.sampled import SampledPosterior
from rgpr.tuning import TuningResult

from .context import Context
from .data import ImageSet, Loader, grey, notes_of, read_images, read_split, some
from .image_posteriors import BASES, SAMPLES
from .networks import MEMBERS, SETTINGS, trained

__all__ = [
    "BASES",
    "COMPARED",
    "FAR_SIGMA2",
    "OUTLIERS_TO_TUNE",
    "SAMPLES",
    "Contestants",
    "Method",
    "contestants",
    "detectors",
]

VALIDATION = OUTLIERS_TO_TUNE = 2000
FAR_SIGMA2 = 1e-10

# The paper's methods in its order, and this library's.
COMPARED = (
    "MAP",
    "TS",
    "DE",
    "GP-DSCS",
    "LLL",
    "LLL-RGPR-LL",
    "LLL-RGPR-OOD",
    "LLL-RGPR-onset",
)


def detectors() -> dict[str, type[Detector]]:
    """Every registered detector but max-softmax, whose score is the confidence of ``MAP``."""
    return {kind.__name__: kind for kind in DETECTORS.values() if kind is not MaxSoftmax}


@dataclass(frozen=True)
class Method:
    """A method, ready to be measured.

    Attributes:
        name: The name that it was asked for by.
        predict: Gives probabilities ``(B, C)``, or scores ``(B,)`` that are higher for inputs more
            like the data.
        model: The model that predicts probabilities; ``None`` for methods that give scores.
        tuning: The result of tuning or calibrating, where there was some.
        seconds: How long the method's own parts took. Parts that several methods share, such as
            the base, are timed by :class:`Contestants`.
    """

    name: str
    predict: Callable[[Tensor], Tensor]
    model: RGPR | None
    tuning: TuningResult | Calibration | None
    seconds: dict[str, float]


class Contestants:
    """All methods over one network; what was fitted for one is kept for the others.

    Attributes:
        network: The trained network.
        train: Loader of all training images.
        validation: Loader of 2000 images split off the test set, or a fifth of a smaller one.
        test: Loader of the other test images.
        test_rows: Rows of the whole test set that ``test`` has.
        notes: What the images of the set itself really are, by its name, where it is a stand-in.
        natural_notes: The same of the natural images, once they were asked for.
        seconds: How long training and fitting took, by part.
        choices: What the validation images chose for a base, by the base's name; of ``LLL`` the
            prior precision, see :class:`rgpr.posteriors.prior_precision.PriorChoice`.
    """

    def __init__(self, context: Context, name: str, seed: int) -> None:
        self.context: Context = context
        self.name: str = name
        self.seed: int = seed
        self.network: nn.Module
        self.train: Loader
        self.validation: Loader
        training, test = read_split(context.data, name, context.device, context.download)
        self.notes = notes_of({name: training})
        self.natural_notes: dict[str, str] = {}
        self.seconds: dict[str, float] = {}
        self.choices: dict[str, dict[str, Any]] = {}
        with self._timed("training"):
            self.network = trained(context, name, seed)
        rows = some(torch.arange(len(test.x), device=test.x.device), len(test.x), seed)
        held_out, self.test_rows = rows.tensor_split([min(VALIDATION, len(rows) // 5)])
        self.train = Loader(training.x, training.y)
        self.validation = Loader(test.x[held_out], test.y[held_out])
        self.test = Loader(test.x[self.test_rows], test.y[self.test_rows])
        self._posteriors: dict[str, Posterior] = {}
        self._methods: dict[str, Method] = {}

    @property
    def classes(self) -> int:
        """Number of classes."""
        return SETTINGS[self.name].classes

    @cached_property
    def noise(self) -> Loader:
        """Smoothed noise made of 2000 training images: the outliers for tuning."""
        originals = Loader(some(self.train.x, OUTLIERS_TO_TUNE, self.seed))
        return Loader(torch.cat(list(noise.NoiseLoader(noise.smoothed, originals, seed=self.seed))))

    @cached_property
    def natural(self) -> Loader:
        """Natural images as outliers for tuning; for digits, which have none, the noise.

        Raises:
            MissingDataError: Neither ImageNet32 nor its stand-in is there.
        """
        if self.name == "digits":
            return self.noise
        images = natural_images(self.context)
        if images.note:
            self.natural_notes["ImageNet32"] = images.note
        x = some(images.x, OUTLIERS_TO_TUNE, self.seed).to(self.context.device)
        if self.train.x.shape[1] == 1:
            x = grey(x)
        return Loader(x)

    def posterior(self, base: str) -> Posterior:
        """The base of that name, fitted when first asked for.

        Raises:
            ValueError: There is no such base.
        """
        if base not in BASES:
            raise ValueError(f"no base '{base}'; there are {', '.join(BASES)}")
        if base not in self._posteriors:
            # The first call may come amid predictions, where gradients are off.
            with self._timed(f"{base}, fit"), _quiet(), torch.enable_grad():
                self._posteriors[base] = BASES[base](self)
        return self._posteriors[base]

    def method(self, name: str) -> Method:
        """The method of that name, fitted and tuned when first asked for.

        Raises:
            MissingDataError: Data that it is tuned with are not there.
            ValueError: There is no such method.
        """
        if name not in self._methods:
            with _quiet():  # the result of a tuning keeps its warnings
                self._methods[name] = self._make(name)
        return self._methods[name]

    def methods(self, names: Iterable[str]) -> Iterator[Method]:
        """The methods of these names, each fitted when its turn comes."""
        return (self.method(name) for name in names)

    def extended(self, base: str, sigma2: float | None) -> RGPR:
        """A base with the paper's residual, not tuned: scales all the same, or the fit's own."""
        model = RGPR(self.posterior(base), residual="paper").fit(self.train, progress=False)
        if sigma2 is not None:
            model.sigma2 = sigma2
        return model

    def _make(self, name: str) -> Method:
        if name in detectors():
            started = time.perf_counter()
            detector = detectors()[name](self.network).fit(self.train, progress=False)
            seconds = {"fit": time.perf_counter() - started}
            return Method(name, lambda x: -detector.score(x), None, None, seconds)
        base, residual, kind = name.partition("-RGPR")
        self.posterior(base)  # fitted, or refused, before the method's own time is taken
        if not residual:
            return _alone(self, base)
        if kind not in _RESIDUALS:
            known = ", ".join(repr(suffix) for suffix in _RESIDUALS)
            raise ValueError(f"no method '{name}'; '-RGPR' can be followed by {known}")
        return _RESIDUALS[kind](self, base, name)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[part] = time.perf_counter() - started


@lru_cache(maxsize=8)
def contestants(context: Context, name: str, seed: int) -> Contestants:
    """The methods over the network of a set and a seed; the same object within a run."""
    return Contestants(context, name, seed)


@lru_cache(maxsize=1)
def natural_images(context: Context) -> ImageSet:
    """ImageNet32, or its stand-in."""
    return read_images(context.data, "imagenet32", "train", download=context.download)


# -- with and without the residual ---------------------------------------------------------------


def _alone(c: Contestants, base: str) -> Method:
    """A base without the residual: its scales are zero, so that the fit only checks shapes."""
    model = RGPR(c.posterior(base), layers="input", residual="paper")
    model.fit(c.validation, progress=False).sigma2 = 0.0
    return Method(base, _predictor(model), model, None, {})


def _with_fixed_scales(c: Contestants, base: str, name: str) -> Method:
    model = c.extended(base, FAR_SIGMA2)
    return Method(name, _predictor(model), model, None, {})


def _untuned(c: Contestants, base: str, name: str) -> Method:
    model = c.extended(base, None)
    return Method(name, _predictor(model), model, None, {})


def _calibrated(c: Contestants, base: str, name: str) -> Method:
    """This library's default residual, calibrated on the validation images."""
    started = time.perf_counter()
    model = RGPR(c.posterior(base)).fit(c.train, progress=False)
    fitted = time.perf_counter()
    found = model.calibrate(c.validation, progress=False)
    seconds = {"fit": fitted - started, "calibrate": time.perf_counter() - fitted}
    return Method(name, _predictor(model), model, found, seconds)


def _score(c: Contestants, base: str, name: str) -> Method:
    """The score of the calibrated model, whose sign makes it higher for inputs like the data."""
    model = c.method(f"{base}-RGPR-onset").model
    assert model is not None
    return Method(name, lambda x: -model.score(x), None, None, {})


def _by_likelihood(c: Contestants, base: str, name: str) -> Method:
    return _tuned(c, base, name, objective="likelihood")


def _by_noise(c: Contestants, base: str, name: str) -> Method:
    return _tuned(c, base, name, objective="ood", ood_weight=0.5, ood=c.noise)


def _by_natural_images(c: Contestants, base: str, name: str) -> Method:
    return _tuned(c, base, name, objective="ood", ood_weight=0.5, ood=c.natural)


def _tuned(c: Contestants, base: str, name: str, **objective: Any) -> Method:
    """The paper's residual, its scales tuned on the validation images."""
    started = time.perf_counter()
    model = c.extended(base, None)
    seconds = {"fit": time.perf_counter() - started}
    result = model.tune(c.validation, progress=False, **objective)
    seconds["tune"] = result.seconds
    return Method(name, _predictor(model), model, result, seconds)


# What may follow "-RGPR" in a name.
_RESIDUALS: dict[str, Callable[[Contestants, str, str], Method]] = {
    "": _with_fixed_scales,
    "-untuned": _untuned,
    "-onset": _calibrated,
    "-score": _score,
    "-LL": _by_likelihood,
    "-OOD": _by_noise,
    "-OOD-natural": _by_natural_images,
}


def _predictor(model: RGPR) -> Callable[[Tensor], Tensor]:
    """The probit, or samples averaged after the softmax where the base has samples alone."""
    posterior = model.posterior
    if not isinstance(posterior, SampledPosterior):
        return model
    # An ensemble takes its members in turn; several turns for the sake of the residual.
    samples = 4 * MEMBERS if isinstance(posterior, Ensemble) else SAMPLES

    def predict(x: Tensor) -> Tensor:
        generator = torch.Generator(x.device).manual_seed(0)
        probabilities: Tensor = model(x, link_approx="mc", n_samples=samples, generator=generator)
        return probabilities

    return predict


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
