"""The methods that are compared, by name, over one trained network.

A name is a base, alone or with the residual: ``LLL``, ``LLL-RGPR-OOD``, ``KFL-RGPR``.

- Bases: ``MAP``, ``TS`` (temperature scaling), ``DE`` (deep ensemble), ``GP-DSCS``, ``LLL``
  (last-layer Laplace), ``KFL`` (Kronecker-factored Laplace), ``SWAG``, ``SVDKL``.
- ``-RGPR-LL`` and ``-RGPR-OOD``: the paper's residual, tuned by the validation likelihood and
  with outliers of weight 0.5; ``-RGPR-OOD-natural`` takes natural images as these outliers.
- ``-RGPR``: the paper's residual with all scales at 1e-10, as in its far-away table;
  ``-RGPR-untuned``: with those that the fit sets.
- ``-RGPR-onset``: this library's default residual, calibrated on the validation images.
- Detectors give scores instead of probabilities: ``LLL-RGPR-score``, the score of that model, and
  ``Energy``, ``KNN``, ``Mahalanobis``, ``ViM``.

Bases with Gaussian outputs predict by the probit; the samples of an ensemble, of KFL and of SWAG
are averaged after the softmax. Prior precisions and temperatures are chosen, and scales tuned, on
2000 images split off the test set, as in the paper; test images are the rest. Outliers for tuning
are smoothed noise made of training images, and never a test set of outliers.

With the recipe ``fast`` KFL's curvature is estimated by one sampled label an image instead of the
sum over all classes, and SWAG goes on for 10 epochs instead of 20. Batch normalisation of its
samples has the statistics of 10000 training images.
"""

from __future__ import annotations

import copy
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
from rgpr.baselines.detectors import KNN, Detector, Energy, Mahalanobis, ViM
from rgpr.baselines.gp_residual import GPDSCS
from rgpr.model import RGPR
from rgpr.posteriors import (
    KFL,
    MAP,
    SVDKL,
    Ensemble,
    Posterior,
    SWAGCollector,
    Temperature,
    choose_prior_precision,
    fit_laplace,
)
from rgpr.posteriors.sampled import SampledPosterior
from rgpr.tuning import TuningResult

from .data import ImageSet, Loader, grey, notes_of, read_images, read_split, some
from .experiment import Context
from .networks import MEMBERS, SETTINGS, ensemble, trained
from .training import Recipe, train

__all__ = [
    "BASES",
    "COMPARED",
    "DETECTORS",
    "FAR_SIGMA2",
    "SAMPLES",
    "Contestants",
    "Method",
    "contestants",
]

VALIDATION = OUTLIERS_TO_TUNE = 2000
SAMPLES = 10
STATISTICS = 10_000
FAR_SIGMA2 = 1e-10
DETECTORS: dict[str, type[Detector]] = {
    "Energy": Energy,
    "KNN": KNN,
    "Mahalanobis": Mahalanobis,
    "ViM": ViM,
}


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


@dataclass(frozen=True)
class Method:
    """A method, ready to be measured.

    Attributes:
        name: As asked for.
        predict: Probabilities ``(B, C)``, or scores ``(B,)``, higher for more in-distribution.
        model: What predicts, unless it is a detector.
        tuning: What tuning or calibrating chose, where there was some.
        seconds: How long its own parts took; what it shares with others is with these.
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
        validation: Of 2000 images split off the test set, or a fifth of a smaller one.
        test: Of the rest.
        test_rows: Which rows of the whole test set these are.
        notes: What the images are, if not what their name says.
        seconds: How long training and fitting took, by part.
    """

    def __init__(self, context: Context, name: str, seed: int) -> None:
        self.context, self.name, self.seed = context, name, seed
        self.network: nn.Module
        self.train: Loader
        self.validation: Loader
        training, test = read_split(context.data, name, context.device, context.download)
        self.notes = notes_of({name: training})
        self.seconds: dict[str, float] = {}
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
        """How many classes there are."""
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
            self.notes["ImageNet32"] = images.note
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
            # Fitted when first asked for, which may be amid predictions.
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
            with _quiet():  # what tuning says is kept in its result
                self._methods[name] = self._make(name)
        return self._methods[name]

    def methods(self, names: Iterable[str]) -> Iterator[Method]:
        """One after the other."""
        return (self.method(name) for name in names)

    def extended(self, base: str, sigma2: float | None) -> RGPR:
        """A base with the paper's residual, not tuned: scales all the same, or the fit's own."""
        model = RGPR(self.posterior(base), residual="paper").fit(self.train, progress=False)
        if sigma2 is not None:
            model.sigma2 = sigma2
        return model

    def _make(self, name: str) -> Method:
        if name in DETECTORS:
            started = time.perf_counter()
            detector = DETECTORS[name](self.network).fit(self.train, progress=False)
            seconds = {"fit": time.perf_counter() - started}
            return Method(name, lambda x: -detector.score(x), None, None, seconds)
        base, residual, tuning = name.partition("-RGPR")
        posterior = self.posterior(base)
        started = time.perf_counter()
        if not residual:
            # The fit only checks shapes here: the residual is switched off.
            model = RGPR(posterior, layers="input", residual="paper")
            model.fit(self.validation, progress=False).sigma2 = 0.0
            return Method(name, _predictor(model), model, None, {})
        if tuning in ("", "-untuned"):
            model = self.extended(base, None if tuning else FAR_SIGMA2)
            return Method(name, _predictor(model), model, None, {})
        if tuning == "-score":
            model = self._calibrated(f"{base}-RGPR-onset")
            return Method(name, lambda x: -model.score(x), None, None, {})
        if tuning == "-onset":
            model = RGPR(posterior).fit(self.train, progress=False)
            seconds = {"fit": time.perf_counter() - started}
            started = time.perf_counter()
            found = model.calibrate(self.validation, progress=False)
            seconds["calibrate"] = time.perf_counter() - started
            return Method(name, _predictor(model), model, found, seconds)
        if tuning not in _TUNINGS:
            known = ["-onset", "-score", *_TUNINGS]
            raise ValueError(f"no method '{name}'; '-RGPR' can be followed by {known}")
        model = RGPR(posterior, residual="paper").fit(self.train, progress=False)
        seconds = {"fit": time.perf_counter() - started}
        result = model.tune(self.validation, progress=False, **_TUNINGS[tuning](self))
        seconds["tune"] = result.seconds
        return Method(name, _predictor(model), model, result, seconds)

    def _calibrated(self, name: str) -> RGPR:
        model = self.method(name).model
        assert model is not None
        return model

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


_TUNINGS: dict[str, Callable[[Contestants], dict[str, Any]]] = {
    "-LL": lambda c: {"objective": "likelihood"},
    "-OOD": lambda c: {"objective": "ood", "ood_weight": 0.5, "ood": c.noise},
    "-OOD-natural": lambda c: {"objective": "ood", "ood_weight": 0.5, "ood": c.natural},
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


# -- bases ---------------------------------------------------------------------------------------


def _last_layer(c: Contestants) -> Posterior:
    """Last-layer Laplace, its prior precision the best of a grid for the validation data."""
    la = fit_laplace(c.network, c.train, subset="last_layer")
    size = 3 if c.context.small else 41
    return choose_prior_precision(la, c.validation, grid_size=size, progress=False)


def _swag(c: Contestants) -> Posterior:
    """Goes on from the trained network by SGD with a constant rate; an iterate each epoch."""
    network = copy.deepcopy(c.network)
    collector = SWAGCollector(network)
    recipe = SETTINGS[c.name].recipes["fast"]
    recipe = Recipe(
        optimizer="sgd",
        lr=SETTINGS[c.name].swag_lr,
        milestones=(),
        epochs=3 if c.context.small else 10 if c.context.recipe == "fast" else 20,
        augment=recipe.augment,
        batch_size=recipe.batch_size,
        bf16=recipe.bf16,
    )
    assert c.train.y is not None
    train(
        network,
        (c.train.x, c.train.y),
        recipe,
        device=c.context.device,
        seed=c.seed,
        callback=lambda epoch, _: collector.collect(),
    )
    statistics = Loader(some(c.train.x, STATISTICS, c.seed))
    return collector.posterior(statistics, n_samples=SAMPLES, progress=False)


def _kfl(c: Contestants) -> Posterior:
    return KFL.fit(
        c.network,
        c.train,
        val_loader=c.validation,
        n_samples=SAMPLES,
        backend_kwargs={"stochastic": c.context.recipe == "fast"},
    )


def _svdkl(c: Contestants) -> Posterior:
    extractor: nn.Module = SVDKL.split(c.network)
    epochs = 2 if c.context.small else None
    return SVDKL.fit(extractor, c.train, classes=c.classes, epochs=epochs, progress=False)


def _gp_dscs(c: Contestants) -> Posterior:
    return GPDSCS.fit(c.network, c.train, epochs=2 if c.context.small else None, progress=False)


BASES: dict[str, Callable[[Contestants], Posterior]] = {
    "MAP": lambda c: MAP(c.network),
    "TS": lambda c: Temperature(c.network).fit(c.validation, progress=False),
    "DE": lambda c: Ensemble(ensemble(c.context, c.name, c.seed)),
    "GP-DSCS": _gp_dscs,
    "LLL": _last_layer,
    "KFL": _kfl,
    "SWAG": _swag,
    "SVDKL": _svdkl,
}


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
