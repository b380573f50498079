"""The detectors of :mod:`rgpr.baselines.detectors`, and Mahalanobis++ by one of them.

They take a network and its inputs. Here the last linear layer alone is the network, and the
penultimate features are its inputs, so that the detectors run on stored outputs. Where pytorch-ood
has the same formula (max softmax, energy, KNN, ViM), the test ``tests/paper/test_openood.py`` shows
that both agree, and the formula has one row in the tables.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from rgpr.baselines.detectors import KNN, Detector, Energy, Mahalanobis, MaxSoftmax, ViM

from ..data import Loader
from .base import Bench, Fitted, Reads, Rival, register_rival

__all__ = ["mahalanobis", "mahalanobis_plus_plus"]

# The paper of KNN has these values for its networks on CIFAR; for other sets OpenOOD starts at 50.
_NEIGHBOURS = {"cifar100": 200}


def _fitted(
    bench: Bench,
    build: Callable[[nn.Module], Detector],
    setting: str,
    change: Callable[[Tensor], Tensor] = lambda h: h,
) -> Fitted:
    """A detector over the head, fitted on changed features."""
    detector = build(nn.Sequential(bench.head))
    detector.fit(Loader(change(bench.train.features), bench.train.y), progress=False)
    return Fitted(lambda h: detector.score(change(h)), setting)


def _max_softmax(bench: Bench) -> Fitted:
    return Fitted(MaxSoftmax(bench.head).predict_logits, "none")


def _energy(bench: Bench) -> Fitted:
    return Fitted(Energy(bench.head).predict_logits, "temperature 1")


def _knn(bench: Bench) -> Fitted:
    k = _NEIGHBOURS.get(bench.competing.name, 50)
    return _fitted(bench, lambda head: KNN(head, k=k), f"k = {k}; all training images")


def mahalanobis(bench: Bench) -> Fitted:
    """Squared distances to the nearest class mean of the penultimate features."""
    setting = "penultimate features alone, covariance shrunk by 1e-3"
    return _fitted(bench, Mahalanobis, setting)


def _vim(bench: Bench) -> Fitted:
    dim = bench.train.features.shape[1] // 2
    return _fitted(bench, lambda head: ViM(head, dim), f"principal space of {dim} dimensions")


def mahalanobis_plus_plus(bench: Bench) -> Fitted:
    """Mahalanobis distances between features of length one, by Mueller and Hein (2025)."""
    setting = "penultimate features of length one, covariance shrunk by 1e-6 for its inverse"
    return _fitted(bench, lambda head: Mahalanobis(head, shrinkage=1e-6), setting, F.normalize)


_DETECTORS: dict[str, tuple[str, str, Reads, Callable[[Bench], Fitted], str]] = {
    "MaxSoftmax": ("Hendrycks & Gimpel 2017", "rgpr", "logits", _max_softmax, ""),
    "Energy": ("Liu et al. 2020", "rgpr", "logits", _energy, "the paper's"),
    "KNN": (
        "Sun et al. 2022",
        "rgpr",
        "features",
        _knn,
        "the paper's for CIFAR-10 and CIFAR-100, that with which OpenOOD starts on other sets",
    ),
    "Mahalanobis": (
        "Lee et al. 2018",
        "rgpr",
        "features",
        mahalanobis,
        "this library's defaults; the paper reads several layers",
    ),
    "ViM": (
        "Wang et al. 2022",
        "rgpr, pytorch-ood",
        "features",
        _vim,
        "half of the features, as OpenOOD has it for ResNet-18",
    ),
    "Mahalanobis++": (
        "Mueller & Hein 2025",
        "rgpr",
        "features",
        mahalanobis_plus_plus,
        "the paper's features; the shrinkage is this experiment's, for the inverse",
    ),
}
for _name, (_paper, _code, _reads, _fit, _source) in _DETECTORS.items():
    register_rival(
        Rival(
            _name,
            _paper,
            _code,
            _reads,
            trains=_reads == "features",
            fit=_fit,
            source=_source,
        )
    )
