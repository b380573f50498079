"""Shifted test images: the methods of all seeds at once, in as few passes as they need.

Of each seed one pass through the network gives MAP, TS, LLL, LLL-RGPR-LL and LLL-RGPR-OOD, which
differ in what is done to the same outputs; GP-DSCS and the default residual have one each, and
the members of the ensembles, which seeds share, have theirs.

Images are those of the test set that no seed was validated on: of 10000 and with three seeds some
5100. All seeds see the same ones, so that they differ by their networks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from rgpr.answers.examples import Examples, Parameters
from rgpr.metrics import accuracy, brier, confidence, ece, nll
from rgpr.model import RGPR

from .context import Context
from .data import Loader, read_split
from .methods import COMPARED, Contestants, contestants
from .networks import MEMBERS, trained
from .units import Unit

__all__ = [
    "METHODS",
    "METRICS",
    "choices",
    "images_of_all",
    "measured",
    "methods_of",
    "notes",
    "predictions",
]

METHODS = COMPARED
METRICS = ("NLL", "ECE", "Brier", "confidence", "accuracy")


def images_of_all(context: Context, name: str) -> Tensor:
    """Rows of the test set that no seed was validated on."""
    _, test = read_split(context.data, name, context.device, context.download)
    counts = torch.zeros(len(test.x), dtype=torch.long, device=test.x.device)
    for seed in context.seeds:
        counts[contestants(context, name, seed).test_rows] += 1
    return (counts == len(context.seeds)).nonzero().flatten()


def predictions(context: Context, name: str, images: Tensor) -> list[dict[str, Tensor]]:
    """Probabilities ``(N, C)`` of each method, for each seed of the context.

    Args:
        context: How to run.
        name: The in-distribution set.
        images: ``(N, C, H, W)`` on the context's device.
    """
    members = _members(context, name)
    votes = {seed: _softmax(network, images) for seed, network in members.items()}
    found = []
    for seed in context.seeds:
        p = _of_one_network(contestants(context, name, seed), images)
        p["DE"] = torch.stack([votes[seed + i] for i in range(MEMBERS)]).mean(0)
        found.append({method: p[method] for method in METHODS})
    return found


def methods_of(units: Sequence[Unit]) -> list[str]:
    """The methods that these units have: those of an earlier version may lack some."""
    return [method for method in METHODS if method in units[0].result["methods"]]


def measured(p: Tensor, y: Tensor) -> dict[str, float]:
    """Every metric, by the paper's names."""
    return {
        "NLL": nll(p, y),
        "ECE": ece(p, y),
        "Brier": brier(p, y),
        "confidence": float(confidence(p).double().mean()),
        "accuracy": accuracy(p, y),
    }


def notes(context: Context, name: str) -> dict[str, str]:
    """What the set really is, where that is not what its name says."""
    found: dict[str, str] = contestants(context, name, context.seeds[0]).notes
    return found


def choices(context: Context, name: str) -> list[dict[str, Any]]:
    """What the validation images chose for the bases of each seed; ask after predicting."""
    return [contestants(context, name, seed).choices for seed in context.seeds]


@lru_cache(maxsize=2)
def _members(context: Context, name: str) -> dict[int, nn.Module]:
    """The networks of all ensembles, by seed; these share most of them."""
    seeds = {seed + member for seed in context.seeds for member in range(MEMBERS)}
    return {seed: trained(context, name, seed) for seed in sorted(seeds)}


@torch.no_grad()
def _softmax(network: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([network(x).double().softmax(1) for x in Loader(images)])


def _of_one_network(competing: Contestants, images: Tensor) -> dict[str, Tensor]:
    """All but the ensemble."""
    tuned = {name: competing.method(name).model for name in ("LLL-RGPR-LL", "LLL-RGPR-OOD")}
    others = [competing.method(name) for name in ("GP-DSCS", "LLL-RGPR-onset")]
    temperature = float(competing.posterior("TS").get_buffer("temperature"))
    scales = {name: model.sigma2 for name, model in tuned.items() if model is not None}
    model = tuned["LLL-RGPR-LL"]
    assert model is not None
    with torch.no_grad():
        outputs = _outputs(model, images)
        logits, one = outputs.first, outputs.first.new_ones(())
        found = {"MAP": logits.softmax(1), "TS": (logits / temperature).softmax(1)}
        for name, sigma2 in {"LLL": torch.zeros_like(model.sigma2), **scales}.items():
            found[name] = outputs.probabilities(Parameters(sigma2, one, one))
        for method in others:
            found[method.name] = torch.cat([method.predict(x) for x in Loader(images)])
    return found


def _outputs(model: RGPR, images: Tensor) -> Examples:
    """The base's Gaussians and ``u``, from which every ``sigma2`` can predict."""
    parts = []
    for x in Loader(images):
        reading = model._extension().read(x)
        gaussian, u = reading.output, reading.u
        parts.append((u, gaussian.mean.double(), gaussian.variance))
    u, mean, variance = (torch.cat(column) for column in zip(*parts, strict=True))
    return Examples(u, mean, variance, None, len(u))
