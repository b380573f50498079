r"""Detectors of strange inputs, to compare with: one score per input, higher is stranger.

With logits :math:`f(x)`, penultimate features :math:`h(x)` (what goes into the last linear layer)
and the nearest of the class means :math:`\mu_c`:

- :class:`MaxSoftmax`: :math:`1 - \max_c \text{softmax}(f)_c`
- :class:`Energy`: :math:`-T \log \sum_c \exp(f_c / T)`
- :class:`Mahalanobis`: :math:`\min_c (h - \mu_c)^\top \Sigma^{-1} (h - \mu_c)`, summed over layers
- :class:`KNN`: distance of :math:`h/\|h\|` to the :math:`k`-th nearest in the training data
- :class:`ViM`: :math:`\alpha \|P^\perp (h - o)\| - \log \sum_c \exp f_c`

Each reads what it needs in the one forward pass that makes the logits. pytorch-ood's detectors
take a network that the user has cut in two and put into evaluation mode; where its arithmetic is
what we want, it is used underneath (ViM), and each of the others says why not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._backend.precision import full_precision
from .._network.checks import check_batch, check_input, check_logits, network_dtype_device
from .._network.layers import LayerChoice, check_layers, choose_layers
from .._network.loaders import labelled, on_device
from .._network.moments import ClassMoments
from .._network.running import INPUT, capture, evaluating, plain_module, watching

__all__ = ["DETECTORS", "KNN", "Detector", "Energy", "Mahalanobis", "MaxSoftmax", "ViM"]


class Detector(ABC):
    """One score per input, higher for stranger ones; the network is never changed.

    Args:
        network: A trained classifier that returns logits ``(B, C)``.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = plain_module(network)

    def fit(self, train_loader: Iterable[Any], *, progress: bool = True) -> Self:
        """Learn from the training data where the detector needs to; here it does not.

        Args:
            train_loader: Yields ``(x, y)``; batches are moved to the network's device.
            progress: Show a progress bar where there is a terminal.

        Returns:
            The detector itself.
        """
        return self

    @torch.no_grad()
    def score(self, x: Tensor) -> Tensor:
        """How strange each input is: ``(B,)`` in float64.

        Raises:
            RuntimeError: The detector must be fitted first.
            TypeError: ``x`` is not of the network's dtype.
            ValueError: ``x`` is on another device, or the features cannot be read.
        """
        check_input(x, self.network, None)
        with evaluating(self.network):
            return self._score(x)

    @abstractmethod
    def _score(self, x: Tensor) -> Tensor:
        """Scores, in evaluation mode and without gradients."""
        raise NotImplementedError

    def _logits(self, x: Tensor) -> Tensor:
        output = self.network(x.clone())  # it may change its input in place
        if not isinstance(output, Tensor) or output.dim() != 2:
            raise TypeError("the network must return logits (B, C), one tensor; wrap one that does")
        return output.double()

    def _batches(self, loader: Iterable[Any], progress: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Checked batches of the training data, on the network's device."""
        device = network_dtype_device(self.network)[1]
        description = f"{type(self).__name__} fit"
        shape: torch.Size | None = None
        pairs = labelled(loader, progress=progress, description=description)
        for number, (x, y) in enumerate(pairs):
            x, y = on_device(x, device), on_device(y, device)
            check_batch(number, x, self.network, shape)
            if y.shape != x.shape[:1] or y.is_floating_point():
                raise ValueError(
                    f"batch {number}: labels have dtype {y.dtype} and shape {tuple(y.shape)}; "
                    f"expected one class index for each of {len(x)} inputs"
                )
            shape = x.shape[1:]
            if len(x):
                yield x, y


class MaxSoftmax(Detector):
    r""":math:`1 - \max_c p_c`, by Hendrycks and Gimpel (2017).

    Ours, and not pytorch-ood's, because in float32 a probability near one is exactly one: its
    scores of confident inputs are ties. Here the sum over the other classes is kept.
    """

    def _score(self, x: Tensor) -> Tensor:
        logits = self._logits(x)
        check_logits(logits)
        top, index = logits.max(1, keepdim=True)
        others = (logits - top).exp().scatter(1, index, 0.0).sum(1)
        return others / (1 + others)


class Energy(Detector):
    r"""The free energy :math:`-T \log \sum_c \exp(f_c / T)`, by Liu et al. (2020).

    Ours, and not pytorch-ood's, which computes the same: one line of torch is not worth a package.

    Args:
        network: A trained classifier that returns logits.
        temperature: The :math:`T` above.
    """

    def __init__(self, network: nn.Module, temperature: float = 1.0) -> None:
        super().__init__(network)
        if not temperature > 0:
            raise ValueError(f"temperature = {temperature} must be positive")
        self.temperature = temperature

    def _score(self, x: Tensor) -> Tensor:
        return -self.temperature * (self._logits(x) / self.temperature).logsumexp(1)


class Mahalanobis(Detector):
    r"""Squared Mahalanobis distance to the nearest class mean, by Lee et al. (2018).

    The covariance is shared by the classes, :math:`\Sigma = (1 - \lambda) S + \lambda\,
    \text{tr}(S)/D\, I` with :math:`S` the within-class covariance. Feature maps are averaged over
    their positions; the distances of several layers are added up.

    Ours, and not pytorch-ood's, because that keeps all features in memory and sums their products
    in float32 without dividing by their number, has no shrinkage beyond ``1e-6``, which a dead
    unit turns into the whole score, and reads several layers only of a list of consecutive
    modules, by a pass each. Here one pass reads all layers of any network.

    Args:
        network: A trained classifier that returns logits.
        layers: Hidden layers to read, as in :class:`rgpr.RGPR`, ``"auto"`` for the same stages;
            by default the penultimate features alone.
        shrinkage: The :math:`\lambda` above, between 0 and 1.
    """

    def __init__(
        self, network: nn.Module, layers: LayerChoice | None = None, *, shrinkage: float = 1e-3
    ) -> None:
        super().__init__(network)
        if layers is not None:
            check_layers(self.network, layers)
        if not 0 <= shrinkage <= 1:
            raise ValueError(f"shrinkage = {shrinkage}; expected a share between 0 and 1")
        self.choice, self.shrinkage = layers, shrinkage
        self.layers: list[str] = []
        self.means: list[Tensor] = []
        self.whitenings: list[Tensor] = []

    @torch.no_grad()
    def fit(self, train_loader: Iterable[Any], *, progress: bool = True) -> Self:
        """Class means and within-class covariance of each layer, in one pass in float64.

        Raises:
            ValueError: A class has no example, labels and logits do not agree, or the covariance
                has no inverse.
        """
        layers: list[str] = []
        moments: list[ClassMoments] = []
        with evaluating(self.network):
            for number, (x, y) in enumerate(self._batches(train_loader, progress)):
                if number == 0:
                    layers = self._choose(x)
                features, logits = self._read(x, layers)
                classes = logits.shape[1]
                if int(y.min()) < 0 or int(y.max()) >= classes:
                    raise ValueError(
                        f"batch {number}: labels lie between {int(y.min())} and {int(y.max())}; "
                        f"with {classes} logits they must lie between 0 and {classes - 1}"
                    )
                moments = moments or [ClassMoments(classes) for _ in features]
                for moment, h in zip(moments, features, strict=True):
                    moment.update(h, y)
        if not moments:
            raise ValueError("the loader gave no example; is it empty?")
        missing = (moments[0].counts == 0).nonzero().flatten().tolist()
        if missing:
            raise ValueError(
                f"no training example is of the classes {missing}, so they have no mean; fit on "
                "data with every class that the network knows"
            )
        whitenings = [
            self._whitening(name, moment)
            for name, moment in zip(layers or ["penultimate"], moments, strict=True)
        ]
        self.layers, self.whitenings = layers, whitenings
        self.means = [moment.means for moment in moments]
        return self

    def _choose(self, x: Tensor) -> list[str]:
        """Names of the hidden layers; none stands for the penultimate features."""
        if self.choice is None:
            return []
        layers = choose_layers(self.network, self.choice, x)[1:]
        if not layers:
            raise ValueError(
                f"layers={self.choice!r} chooses no hidden layer of this network; name some, or "
                "leave it out for the penultimate features"
            )
        return layers

    def _read(self, x: Tensor, layers: list[str]) -> tuple[list[Tensor], Tensor]:
        if not layers:
            features, logits = _penultimate(self, x)
            return [features.double()], logits

        def pooled(h: Tensor) -> Tensor:
            h = h.double()
            return h.flatten(2).mean(2) if h.dim() > 2 else h.clone()

        takes = [pooled] * (1 + len(layers))
        with capture(self.network, [INPUT, *layers], takes, x) as found:
            logits = self._logits(x)
        return found[1:], logits

    def _whitening(self, layer: str, moment: ClassMoments) -> Tensor:
        """Inverse of the Cholesky factor of the covariance."""
        covariance = moment.scatter / moment.counts.sum()
        scale = covariance.diagonal().mean()
        covariance = (1 - self.shrinkage) * covariance
        covariance.diagonal().add_(self.shrinkage * scale)
        factor, failed = torch.linalg.cholesky_ex(covariance)
        if bool(failed) or not bool(factor.isfinite().all()):
            raise ValueError(
                f"the covariance of the {len(covariance)} features of layer '{layer}' has no "
                f"inverse with shrinkage = {self.shrinkage}; raise it, or fit on more data"
            )
        identity = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
        whitening: Tensor = torch.linalg.solve_triangular(factor, identity, upper=False)
        return whitening

    def _score(self, x: Tensor) -> Tensor:
        if not self.means:
            raise RuntimeError("this Mahalanobis detector is not fitted; call fit(train_loader)")
        features, _ = self._read(x, self.layers)
        scores = torch.zeros(len(x), dtype=torch.float64, device=x.device)
        for h, means, whitening in zip(features, self.means, self.whitenings, strict=True):
            # One class at a time: all at once would take (B, C, D).
            distances = [((h - mean) @ whitening.T).square().sum(1) for mean in means]
            scores += torch.stack(distances).amin(0)
        return scores


class KNN(Detector):
    r"""Distance to the :math:`k`-th nearest training example, by Sun et al. (2022).

    Penultimate features are scaled to length one. The search is exact.

    Ours, and not pytorch-ood's, because that searches on the CPU, through scikit-learn; the
    features are on the device, where a matrix product and a top-k find the neighbours.

    Args:
        network: A trained classifier that returns logits.
        k: Which neighbour counts.
    """

    # Distances held at a time: 2^26 float32 numbers are 256 MiB.
    _AT_ONCE = 2**26

    def __init__(self, network: nn.Module, k: int = 50) -> None:
        super().__init__(network)
        if k < 1:
            raise ValueError(f"k = {k}; expected the number of a neighbour, 1 or more")
        self.k = k
        self.bank: Tensor | None = None

    @torch.no_grad()
    def fit(self, train_loader: Iterable[Any], *, progress: bool = True) -> Self:
        """Keep the normalised features of all training examples.

        Raises:
            ValueError: Fewer examples than ``k``.
        """
        with evaluating(self.network):
            rows = [self._features(x) for x, _ in self._batches(train_loader, progress)]
        bank = torch.cat(rows) if rows else torch.zeros(0)
        if len(bank) < self.k:
            raise ValueError(
                f"{len(bank)} training examples have no {self.k}-th neighbour; lower k"
            )
        self.bank = bank
        return self

    def _features(self, x: Tensor) -> Tensor:
        features = _penultimate(self, x)[0]
        return F.normalize(features.to(torch.promote_types(features.dtype, torch.float32)))

    def _score(self, x: Tensor) -> Tensor:
        if self.bank is None:
            raise RuntimeError("this KNN detector is not fitted; call fit(train_loader)")
        bank = self.bank
        scores = []
        for z in torch.split(self._features(x), max(1, self._AT_ONCE // len(bank))):
            with full_precision(z):
                nearest = (z @ bank.T).topk(self.k, dim=1).indices[:, -1]
            # The product loses the digits of a small distance; the difference does not.
            scores.append((z.double() - bank[nearest].double()).norm(dim=1))
        return torch.cat(scores)


class ViM(Detector):
    r"""Virtual-logit matching, by Wang et al. (2022): pytorch-ood's, on features read here.

    :math:`o = -W^+ b` is the point at which the last layer gives zero logits, :math:`P^\perp` the
    projection off the ``dim`` leading directions of the features around it, and :math:`\alpha`
    makes the virtual logit as large as the largest logit on average.

    Args:
        network: A trained classifier that returns logits and ends in an ``nn.Linear``.
        dim: Dimension of the principal space; by default 1000 for more than 1500 features, else
            512, as in the paper, but at most half of the features.

    Raises:
        ImportError: pytorch-ood is not installed.
    """

    def __init__(self, network: nn.Module, dim: int | None = None) -> None:
        super().__init__(network)
        if dim is not None and dim < 1:
            raise ValueError(f"dim = {dim}; the principal space needs a dimension of 1 or more")
        self.dim = dim
        self._build = _pytorch_ood("ViM")
        self._fitted: Any = None

    @torch.no_grad()
    def fit(self, train_loader: Iterable[Any], *, progress: bool = True) -> Self:
        """The principal space and the scale, from the features of all training examples.

        Raises:
            ValueError: ``dim`` leaves no direction for the residual.
        """
        rows, labels = [], []
        with evaluating(self.network):
            for x, y in self._batches(train_loader, progress):
                head, features, _ = _watch_head(self, x)
                rows.append(features.float())
                labels.append(y)
        if not rows:
            raise ValueError("the loader gave no example; is it empty?")
        features = torch.cat(rows)
        width = features.shape[1]
        dim = self.dim or max(1, min(1000 if width > 1500 else 512, width // 2))
        if dim >= width:
            raise ValueError(
                f"dim = {dim} of {width} features leaves no residual; choose a smaller one"
            )
        weight = head.weight.clone()  # what is trained later must not reach what is fitted now
        bias = weight.new_zeros(len(weight)) if head.bias is None else head.bias.clone()
        fitted = self._build(None, d=dim, w=weight, b=bias)
        self._fitted = fitted.fit_features(features, torch.cat(labels))
        return self

    def _score(self, x: Tensor) -> Tensor:
        if self._fitted is None:
            raise RuntimeError("this ViM detector is not fitted; call fit(train_loader)")
        scores: Tensor = self._fitted.predict_features(_penultimate(self, x)[0])
        return scores.double()


def _pytorch_ood(name: str) -> Any:
    try:
        return getattr(import_module("pytorch_ood.detector"), name)
    except ImportError as error:
        raise ImportError(
            f"{name} is computed by pytorch-ood: pip install 'rgpr[ood]' or pytorch-ood"
        ) from error


def _penultimate(detector: Detector, x: Tensor) -> tuple[Tensor, Tensor]:
    """Input of the last linear layer, ``(B, D)``, and the logits, in one pass."""
    return _watch_head(detector, x)[1:]


def _watch_head(detector: Detector, x: Tensor) -> tuple[nn.Linear, Tensor, Tensor]:
    """The last linear layer, what goes into it, and the logits that come out."""
    last: tuple[nn.Linear, Tensor, Tensor] | None = None

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        nonlocal last
        if isinstance(module, nn.Linear):
            last = (module, args[0], output)

    network = detector.network
    linear = [module for module in network.modules() if isinstance(module, nn.Linear)]
    with watching(network, dict.fromkeys(linear, after)):
        logits = detector._logits(x)
    if last is None or not _same(last[2].double(), logits):
        raise ValueError(
            f"{type(detector).__name__} reads what goes into the last nn.Linear, and this "
            "network's outputs do not come straight out of one; use a network that ends in an "
            "nn.Linear" + (", or choose layers" if isinstance(detector, Mahalanobis) else "")
        )
    head, features, _ = last
    return head, features, logits


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


DETECTORS: dict[str, type[Detector]] = {
    "max-softmax": MaxSoftmax,
    "energy": Energy,
    "mahalanobis": Mahalanobis,
    "knn": KNN,
    "vim": ViM,
}
