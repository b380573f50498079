"""The measures of OOD detection and calibration, and the short form in which tunings are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from rgpr.answers import Calibration
from rgpr.metrics import accuracy, auprc, auroc, confidence, ece, fpr95, nll
from rgpr.tuning import TuningResult

from .data import ImageSet, Loader

__all__ = ["measure", "shortened"]

_Predict = Callable[[Tensor], Tensor]


@torch.no_grad()
def measure(predict: _Predict, test: Loader, outliers: dict[str, ImageSet]) -> dict[str, Any]:
    """All metrics of one method.

    Args:
        predict: Gives probabilities ``(B, C)``, or scores ``(B,)`` that are higher for inputs more
            like the data.
        test: Test images of the in-distribution set, with labels.
        outliers: Sets of outliers by name.

    Returns:
        FPR95, AUROC and AUPRC for each set of outliers and their mean; where the method has
        probabilities, also its mean confidences, ECE, NLL and accuracy.
    """
    p = torch.cat([predict(x) for x, _ in test])
    inside = _certainty(p)
    outside = {
        kind: _certainty(torch.cat([predict(x) for x in Loader(images.x)]))
        for kind, images in outliers.items()
    }
    result: dict[str, Any] = {}
    for metric, value in (("fpr95", fpr95), ("auroc", auroc), ("auprc", auprc)):
        values = {kind: value(inside, scores) for kind, scores in outside.items()}
        result[metric] = {**values, "mean": mean(values.values())}
    if p.dim() == 2:
        assert test.y is not None
        confidences = {"test": inside, **outside}
        result["mmc"] = {kind: float(c.double().mean()) for kind, c in confidences.items()}
        result |= {"ece": ece(p, test.y), "nll": nll(p, test.y), "accuracy": accuracy(p, test.y)}
    return result


def _certainty(output: Tensor) -> Tensor:
    """Scores as they are, and the confidence of probabilities."""
    return output if output.dim() == 1 else confidence(output)


def shortened(result: TuningResult | Calibration) -> dict[str, Any]:
    """The parts of a tuning, or of a calibration, that a unit keeps."""
    if isinstance(result, Calibration):
        return asdict(result)
    names = ("objective", "sigma2", "ood_weight", "metrics", "converged", "warnings")
    return {name: getattr(result, name) for name in names}
