"""The base posteriors over a trained image network, by the paper's names.

With the recipe ``fast`` KFL's curvature is estimated by one sampled label an image instead of the
sum over all classes, and SWAG goes on for 10 epochs instead of 20. Batch normalisation of its
samples has the statistics of 10000 training images.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from torch import nn

from rgpr.baselines.gp_residual import GPDSCS
from rgpr.posteriors import (
    KFL,
    MAP,
    SVDKL,
    Ensemble,
    Posterior,
    SWAGCollector,
    Temperature,
    fit_laplace,
)
from rgpr.posteriors.prior_precision import find_prior_precision

from .data import Loader, some
from .networks import SETTINGS, ensemble
from .training import RunOptions, TrainingPlan, train

if TYPE_CHECKING:
    from .methods import Contestants

__all__ = ["BASES", "SAMPLES"]

# Samples of weights for each prediction, as in the paper.
SAMPLES = 10
STATISTICS = 10_000


def _last_layer(c: Contestants) -> Posterior:
    """Last-layer Laplace, its prior precision the best for the validation data; it is recorded."""
    la = fit_laplace(c.network, c.train, subset="last_layer")
    size = 3 if c.context.small else 41
    posterior, choice = find_prior_precision(la, c.validation, grid_size=size, progress=False)
    c.choices["LLL"] = {
        **asdict(choice),
        "at_an_end": choice.at_an_end,
        "equals_map": choice.equals_map,
        "verdict": choice.verdict,
    }
    return posterior


def _swag(c: Contestants) -> Posterior:
    """Goes on from the trained network by SGD with a constant rate; an iterate each epoch."""
    network = copy.deepcopy(c.network)
    collector = SWAGCollector(network)
    fast = SETTINGS[c.name].plans["fast"]
    plan = TrainingPlan(
        optimizer="sgd",
        lr=SETTINGS[c.name].swag_lr,
        milestones=(),
        epochs=3 if c.context.small else 10 if c.context.recipe == "fast" else 20,
        augment=fast.augment,
        batch_size=fast.batch_size,
        bf16=fast.bf16,
    )
    assert c.train.y is not None
    train(
        network,
        (c.train.x, c.train.y),
        plan,
        RunOptions(
            seed=c.seed,
            device=c.context.device,
            callback=lambda epoch, _: collector.collect(),
        ),
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
