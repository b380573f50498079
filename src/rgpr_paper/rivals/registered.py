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
from .base import Bench, Fitted, Rival, register_rival

__all__ = ["mahalanobis_plus_plus"]

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
    return Fitted(Energy(bench.head).predict_logits, "temperature 1, as in the paper")


def _knn(bench: Bench) -> Fitted:
    k = _NEIGHBOURS.get(bench.competing.name, 50)
    whose = "the paper's" if bench.competing.name.startswith("cifar") else "OpenOOD's first"
    setting = f"k = {k}, {whose} value; all training images"
    return _fitted(bench, lambda head: KNN(head, k=k), setting)


def _mahalanobis(bench: Bench) -> Fitted:
    setting = "penultimate features alone, covariance shrunk by 1e-3, this library's default"
    return _fitted(bench, Mahalanobis, setting)


def _vim(bench: Bench) -> Fitted:
    dim = bench.train.features.shape[1] // 2
    setting = f"principal space of {dim} dimensions: half of the features, 256 of 512 in OpenOOD"
    return _fitted(bench, lambda head: ViM(head, dim), setting)


def mahalanobis_plus_plus(bench: Bench) -> Fitted:
    """Mahalanobis distances between features of length one, by Mueller and Hein (2025)."""
    setting = "penultimate features of length one, covariance shrunk by 1e-6 for its inverse"
    return _fitted(bench, lambda head: Mahalanobis(head, shrinkage=1e-6), setting, F.normalize)


register_rival(
    Rival("MaxSoftmax", "Hendrycks & Gimpel 2017", "rgpr", "logits", trains=False, fit=_max_softmax)
)
register_rival(Rival("Energy", "Liu et al. 2020", "rgpr", "logits", trains=False, fit=_energy))
register_rival(Rival("KNN", "Sun et al. 2022", "rgpr", "features", trains=True, fit=_knn))
register_rival(
    Rival("Mahalanobis", "Lee et al. 2018", "rgpr", "features", trains=True, fit=_mahalanobis)
)
register_rival(
    Rival("ViM", "Wang et al. 2022", "rgpr, pytorch-ood", "features", trains=True, fit=_vim)
)
register_rival(
    Rival(
        "Mahalanobis++",
        "Mueller & Hein 2025",
        "rgpr",
        "features",
        trains=True,
        fit=mahalanobis_plus_plus,
    )
)
