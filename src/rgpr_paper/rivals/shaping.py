"""pytorch-ood's detectors that change features and take the energy of the logits they then give.

They change pooled features here, as OpenOOD has it for ResNets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from rgpr.baselines._pytorch_ood import pytorch_ood

from .base import Bench, Fitted, Rival, register_rival


def _shaping(kind: str, setting: str, **options: Any) -> Callable[[Bench], Fitted]:
    def fit(bench: Bench) -> Fitted:
        tail = nn.Sequential(nn.Flatten(), bench.head)
        detector = pytorch_ood(kind)(None, tail, **options).to(bench.device)
        if detector.requires_fit:
            detector.fit_feature_maps(_maps(bench.train.features), bench.train.y)
        return Fitted(lambda h: detector.predict_feature_maps(_maps(h)), setting)

    return fit


def _maps(features: Tensor) -> Tensor:
    """Features ``(B, D)`` as maps of one position each, which these detectors insist on."""
    return features[:, :, None, None]


_STARTS = "that with which OpenOOD starts"
_DETECTORS = {
    "ReAct": (
        "Sun et al. 2021",
        True,
        _shaping("ReAct", "percentile 90", percentile=0.9),
        "the paper's",
    ),
    "SCALE": (
        "Xu et al. 2024",
        False,
        _shaping("SCALE", "percentile 85", percentile=0.85),
        _STARTS,
    ),
    **{
        variant: (
            "Djurisic et al. 2023",
            False,
            _shaping("ASH", "percentile 90", variant=variant.lower(), percentile=0.9),
            _STARTS,
        )
        for variant in ("ASH-S", "ASH-P", "ASH-B")
    },
}
for _name, (_paper, _trains, _fit, _source) in _DETECTORS.items():
    register_rival(
        Rival(_name, _paper, "pytorch-ood", "features", trains=_trains, fit=_fit, source=_source)
    )
