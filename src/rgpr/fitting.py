"""One pass over the training inputs: coordinates of every representation, and harmless scales."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .coordinates import Collector, ResidualRecipe, Strategy
from .data import (
    Reservoir,
    check_batch,
    check_logits,
    check_rows,
    check_target,
    inputs_and_targets,
    network_dtype_device,
    not_finite,
    on_device,
)
from .distributed import together
from .gaussian import Gaussian
from .hooks import evaluating
from .posteriors import Posterior
from .posteriors.base import outputs_of
from .representations import INPUT, LayerChoice, capture
from .residual import Residual

__all__ = ["fit"]

# Untuned scales: all layers together add about this much variance at the 95 % quantile of the
# training data, where the probit then shrinks logits by 2 %.
_UNTUNED_VARIANCE = 0.1
_PROBE = 256
# Batches between looks at their values on a GPU, which has to wait for each.
_LOOK = 64


def fit(
    posterior: Posterior,
    choice: LayerChoice,
    recipe: ResidualRecipe,
    likelihood: str,
    train_loader: Iterable[Any],
    r: float,
    progress: bool,
) -> tuple[list[str], torch.Size, Residual]:
    """Names of the representations, shape of one input, and the residual; see :meth:`RGPR.fit`."""
    if not r > 0:
        raise ValueError(f"r = {r} must be positive: it scales standard deviations")
    device = network_dtype_device(posterior.network)[1]
    shards = together(
        lambda: _pass(posterior, choice, recipe, likelihood, train_loader, progress), device
    )
    full = [shard for shard in shards if shard["layers"]]
    if sum(shard["probe"][0] for shard in full) < 2:
        raise ValueError("the loader gave fewer than two inputs; nothing can be standardised")
    layers, shape = full[0]["layers"], torch.Size(full[0]["shape"])
    collectors = [Collector(strategy, r) for strategy in _strategies(recipe, layers)]
    probe = Reservoir(_PROBE)
    for shard in full:
        probe.merge(shard["probe"])
        for collector, state in zip(collectors, shard["collectors"], strict=True):
            collector.merge(state)
    residual = Residual([collector.finish() for collector in collectors])
    # In batches that the network is known to take.
    rows = probe.items[0].to(residual.sigma2.device)
    batches = torch.split(rows, max(shard["batch"] for shard in full))
    residual.sigma2 = _harmless(posterior, layers, residual, likelihood, batches)
    return layers, shape, residual


def _strategies(recipe: ResidualRecipe, layers: Sequence[str]) -> list[Strategy]:
    return [recipe.input] + [recipe.hidden] * (len(layers) - 1)


def _pass(
    posterior: Posterior,
    choice: LayerChoice,
    recipe: ResidualRecipe,
    likelihood: str,
    train_loader: Iterable[Any],
    progress: bool,
) -> dict[str, Any]:
    """The statistics of one shard."""
    network = posterior.network
    device = network_dtype_device(network)[1]
    layers: list[str] = []
    collectors: list[Collector] = []
    shape: torch.Size | None = None
    probe = Reservoir(_PROBE)
    waiting: list[tuple[Collector, Tensor]] = []
    step = _LOOK if device is not None and device.type == "cuda" else 1
    largest = number = unseen = 0

    def consume(index: int, h: Tensor) -> None:
        check_rows(layers[index], h, x)
        collector = collectors[index]
        if collector.needs_classes:
            waiting.append((collector, collector.reduce(h)))
        else:
            collector.update(collector.reduce(h), None, 1)

    with evaluating(network):
        for number, (batch, target) in enumerate(
            inputs_and_targets(train_loader, progress=progress, description="rgpr fit")
        ):
            x = on_device(batch, device)
            check_batch(number, x, network, shape, values=False)
            if len(x) == 0:
                continue
            if shape is None:
                layers = posterior.choose_layers(choice, x)
                collectors = [Collector(strategy) for strategy in _strategies(recipe, layers)]
                shape = x.shape[1:]
            consume(0, x)
            with capture(network, layers, consume):
                output = network(x.clone())  # it may change its input in place
            # A loader's rows are looked at where they are, while a GPU is at work.
            probe.add(batch)
            largest = max(largest, len(x))
            if probe.seen == len(x) and likelihood == "classification":
                check_logits(output)
            if waiting:
                y, classes = _classes(outputs_of(output, x), target, likelihood, number)
                for collector, h in waiting:
                    collector.update(h, y, classes)
                waiting.clear()
            if number + 1 - unseen >= step:
                _check_finite(collectors, layers, unseen, number)
                unseen = number + 1
    if collectors:
        _check_finite(collectors, layers, unseen, number)
    return {
        "layers": layers,
        "shape": list(shape or ()),
        "collectors": [collector.state for collector in collectors],
        "probe": probe.state,
        "batch": largest,
    }


def _check_finite(
    collectors: Sequence[Collector], layers: Sequence[str], first: int, last: int
) -> None:
    """Refuse sums that became infinite or NaN with one of these batches."""
    finite = torch.stack([collector.total for collector in collectors]).isfinite().tolist()
    if all(finite):
        return
    layer = layers[finite.index(False)]
    which = f"batch {last}" if first >= last else f"one of the batches {first} to {last}"
    if layer == INPUT:
        raise not_finite(which)
    raise ValueError(
        f"{which}: layer '{layer}' gives values that are not finite; the network overflows on its "
        "own training data"
    )


def _classes(
    outputs: Tensor, target: Tensor | None, likelihood: str, number: int
) -> tuple[Tensor, int]:
    """The class of each row and how many there are: labels, or the network's predictions."""
    if likelihood == "regression":
        return torch.zeros(len(outputs), dtype=torch.long, device=outputs.device), 1
    classes = max(2, outputs.shape[1])
    if target is not None and not target.is_floating_point():
        try:
            checked = check_target(target, outputs, likelihood, number)
            return on_device(checked, outputs.device), classes
        except ValueError as error:
            warnings.warn(
                f"these targets are not classes ({error}); the network's own predictions are "
                "taken instead",
                stacklevel=7,
            )
    predicted = outputs.argmax(1) if outputs.shape[1] > 1 else (outputs[:, 0] > 0).long()
    return predicted, classes


def _harmless(
    posterior: Posterior,
    layers: Sequence[str],
    residual: Residual,
    likelihood: str,
    batches: Sequence[Tensor],
) -> Tensor:
    """Scales that add little at the data; see :meth:`RGPR.fit`."""

    def mean(x: Tensor) -> Tensor:
        if likelihood == "classification":
            posterior.network(x)
            return x.new_zeros(0)
        gaussian: Gaussian = posterior(x)
        return gaussian.mean

    def read(x: Tensor) -> tuple[Tensor, Tensor]:
        outputs, u = residual.read(posterior, layers, x, mean)
        return outputs, torch.stack([residual.unit_variance(0, x), *u], 1)

    parts = [read(x) for x in batches]
    variance = _UNTUNED_VARIANCE
    if likelihood == "regression":
        spread = torch.cat([outputs for outputs, _ in parts]).double().var(0, correction=0)
        variance *= float(spread.mean()) or 1.0
    typical = torch.cat([u for _, u in parts]).quantile(0.95, dim=0)
    share = variance / len(layers)
    return torch.where(typical > 0, share / typical, share)
