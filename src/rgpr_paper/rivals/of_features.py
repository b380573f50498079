"""pytorch-ood's detectors that read penultimate features, and some of them the head too."""

from __future__ import annotations

from typing import Any

from rgpr.baselines._pytorch_ood import pytorch_ood

from .base import Bench, Fitted, Rival, register_rival


def _fitted(bench: Bench, detector: Any, setting: str) -> Fitted:
    # Some of them keep a copy of the head on the CPU unless they are told where to work.
    detector.to(bench.device)
    detector.fit_features(bench.train.features, bench.train.y)
    return Fitted(detector.predict_features, setting)


def _mahalanobis(bench: Bench) -> Fitted:
    return _fitted(bench, pytorch_ood("Mahalanobis")(None), "penultimate features alone")


def _relative(bench: Bench) -> Fitted:
    return _fitted(bench, pytorch_ood("RMD")(None), "none")


def _dice(bench: Bench) -> Fitted:
    detector = pytorch_ood("DICE")(None, bench.weight, bench.bias, p=0.9)
    return _fitted(bench, detector, "sparsity 0.9")


def _she(bench: Bench) -> Fitted:
    return _fitted(bench, pytorch_ood("SHE")(None, bench.head), "inner products")


def _nn_guide(bench: Bench) -> Fitted:
    detector = pytorch_ood("NNGuide")(None, bench.head, k=10)
    return _fitted(bench, detector, "k = 10; all training images")


def _nci(bench: Bench) -> Fitted:
    return _fitted(bench, pytorch_ood("NCI")(None, bench.head, alpha=1e-4), "alpha 1e-4")


def _fdbd(bench: Bench) -> Fitted:
    return _fitted(bench, pytorch_ood("fDBD")(None, bench.head), "none")


_PAPERS = {
    "Mahalanobis, pytorch-ood": (
        "Lee et al. 2018",
        _mahalanobis,
        "pytorch-ood's defaults; the paper reads several layers",
    ),
    "relative Mahalanobis": ("Ren et al. 2021", _relative, ""),
    "DICE": ("Sun & Li 2022", _dice, "OpenOOD's"),
    "SHE": ("Zhang et al. 2023", _she, "the paper's"),
    "NNGuide": ("Park et al. 2023", _nn_guide, "pytorch-ood's default"),
    "NCI": ("Liu & Qin 2025", _nci, "the value with which OpenOOD starts"),
    "fDBD": ("Liu & Qin 2024", _fdbd, ""),
}
for _name, (_paper, _fit, _source) in _PAPERS.items():
    register_rival(
        Rival(_name, _paper, "pytorch-ood", "features", trains=True, fit=_fit, source=_source)
    )
