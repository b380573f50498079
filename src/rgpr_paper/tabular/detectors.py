"""Everything that ranks rows, and how well it tells strange rows from test rows.

- ``score``: that of this library, of a model that was fitted on the training rows.
- ``confidence``, ``energy`` and ``ViM`` read the logits, so they are for classes alone; ``KNN`` and
  ``Mahalanobis`` read the penultimate features. For numbers as targets all rows are of one class.
- ``isolation forest`` and ``LOF`` are scikit-learn's with their defaults, on the inputs; ``nearest
  rows`` is the distance of the inputs to the fifth nearest training row.

``KNN`` takes the fifth neighbour, too: its default of 50, which is meant for 50000 examples, is
more than some of these sets have in training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rgpr.baselines.detectors import KNN, Energy, Mahalanobis, MaxSoftmax, ViM
from rgpr.metrics import auroc, fpr95, fpr95_openood
from rgpr.model import RGPR

__all__ = ["METRICS", "OURS", "Ranking", "measured", "rankings"]

OURS = "score"
NEIGHBOUR = 5
METRICS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "auroc": auroc,
    "fpr95": fpr95,
    "fpr95_openood": fpr95_openood,
}

# Gives one number for each row, higher for rows that are more like the data.
Ranking = Callable[[Tensor], Tensor]


def rankings(
    model: RGPR, network: nn.Module, x: Tensor, y: Tensor, seed: int
) -> dict[str, Ranking]:
    """Every detector by its name, fitted on the training rows.

    Args:
        model: The fitted model, whose score is ours.
        network: The trained network.
        x: Training inputs ``(N, D)``.
        y: Training targets: classes ``(N,)``, or numbers, which leave out what reads logits.
        seed: The seed of the isolation forest.
    """
    classes = not y.is_floating_point()
    labels = y if classes else torch.zeros(len(x), dtype=torch.long)
    reading: dict[str, Any] = {
        "KNN": KNN(network, k=NEIGHBOUR),
        "Mahalanobis": Mahalanobis(network),
    }
    if classes:
        logits = {"confidence": MaxSoftmax(network), "energy": Energy(network)}
        reading = {**logits, **reading, "ViM": ViM(network)}
    for detector in reading.values():
        detector.fit([(x, labels)], progress=False)
    found: dict[str, Ranking] = {OURS: lambda z: -model.score(z)}
    for name, detector in reading.items():
        found[name] = _negative(detector.score)
    return {**found, **_on_inputs(x, seed)}


def _negative(strangeness: Ranking) -> Ranking:
    return lambda z: -strangeness(z)


def _on_inputs(x: Tensor, seed: int) -> dict[str, Ranking]:
    """Detectors that know no network."""
    from sklearn.ensemble import IsolationForest
    from sklearn.neighbors import LocalOutlierFactor, NearestNeighbors

    forest = IsolationForest(random_state=seed).fit(x.numpy())
    factor = LocalOutlierFactor(novelty=True).fit(x.numpy())
    near = NearestNeighbors(n_neighbors=NEIGHBOUR).fit(x.numpy())
    return {
        "isolation forest": lambda z: torch.from_numpy(forest.score_samples(z.numpy())),
        "LOF": lambda z: torch.from_numpy(factor.score_samples(z.numpy())),
        "nearest rows": lambda z: -torch.from_numpy(near.kneighbors(z.numpy())[0][:, -1]),
    }


@torch.no_grad()
def measured(
    found: dict[str, Ranking], test: Tensor, outliers: Tensor
) -> dict[str, dict[str, float]]:
    """Each detector's measures, where higher ranks are meant for the test rows."""
    result = {}
    for name, rank in found.items():
        inside, outside = rank(test), rank(outliers)
        result[name] = {metric: value(inside, outside) for metric, value in METRICS.items()}
    return result
