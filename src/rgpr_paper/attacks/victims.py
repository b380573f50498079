"""The networks under attack, each with the default residual and without any.

- ``digits``: 8 x 8 digits of scikit-learn as rows of 64 numbers, and a ReLU network with two hidden
  layers of 100. A third of the held-out rows calibrates.
- ``mnist``: 28 x 28 images and a convolutional network after LeNet, with 8 and 16 channels and 64
  hidden units, five epochs over 20 000 images. 2000 images split off the test set calibrate. The
  small version has the digits as images of 16 x 16 instead.

Over each network stand ``MAP``, the network itself, and ``LLL``, last-layer Laplace with the prior
precision of the marginal likelihood. Validation data choose no variance on MNIST, which would be
MAP once more.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from rgpr import _demo
from rgpr.model import RGPR
from rgpr.posteriors import fit_laplace

from ..context import Context
from ..data import Loader, read_split, some
from ..networks import Setting, trained_on
from ..training import TrainingPlan
from .aims import ALPHA, answers

__all__ = ["BASES", "SETS", "Data", "Victim", "small_lenet", "victim"]

BASES = ("MAP", "LLL")
TRAINING, VALIDATION = 20_000, 2000


def small_lenet(size: int = 28) -> nn.Module:
    """Two 5 x 5 convolutions with pooling and one hidden layer, ten classes."""
    pooled = ((size - 4) // 2 - 4) // 2
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 8, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(8, 16, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            hidden=nn.Linear(16 * pooled**2, 64),
            relu3=nn.ReLU(),
            last=nn.Linear(64, 10),
        )
    )


@dataclass(frozen=True)
class Data:
    """A trained network and its data, inputs between 0 and 1.

    Attributes:
        network: In evaluation mode.
        train: What it was trained on.
        validation: What calibrates.
        test: What is attacked.
    """

    network: nn.Module
    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    def double(self) -> Data:
        """The same in float64."""
        parts = ((x.double(), y) for x, y in (self.train, self.validation, self.test))
        return Data(copy.deepcopy(self.network).double(), *parts)


@lru_cache(maxsize=4)
def _rows(context: Context, seed: int) -> Data:
    torch.manual_seed(seed)
    task, held_out = _demo.digits(seed).split()
    network = _demo.train(task, 10 if context.small else 100)
    x, y = held_out.dataset.tensors  # type: ignore[attr-defined]
    features, labels = task.train.tensors
    return Data(network, (features, labels), (x, y), task.test)


@lru_cache(maxsize=4)
def _images(context: Context, seed: int) -> Data:
    context = replace(context, device="cpu")  # attacks take minutes there, and compare dtypes
    name = "digits" if context.small else "mnist"
    training, test = read_split(context.data, name, context.device, context.download)
    training = replace(training, x=training.x[:TRAINING], y=training.y[:TRAINING])
    plan = TrainingPlan(
        lr=2e-3, weight_decay=0.0, epochs=150 if context.small else 5, schedule="one-cycle"
    )
    build = partial(small_lenet, training.x.shape[-1])
    setting = Setting(build, dict.fromkeys(("fast", "paper"), plan))
    network = trained_on(context, training, setting, f"attacked-{name}", seed)
    order = some(torch.arange(len(test.x)), len(test.x), seed)
    held_out, rest = order.tensor_split([min(VALIDATION, len(order) // 3)])
    parts = ((training.x, training.y), *((test.x[i], test.y[i]) for i in (held_out, rest)))
    return Data(network.eval(), *((_between_0_and_1(x), y) for x, y in parts))


def _between_0_and_1(x: Tensor) -> Tensor:
    return x.float() / 255 if x.dtype == torch.uint8 else x


SETS: dict[str, Callable[[Context, int], Data]] = {"digits": _rows, "mnist": _images}


@dataclass(frozen=True)
class Victim:
    """A calibrated model, its base alone, and inputs to start from.

    Attributes:
        model: With the default residual.
        base: Without residual; its score is that of the input alone, and means nothing.
        data: What it was trained on and is attacked from.
    """

    model: RGPR
    base: RGPR
    data: Data

    @property
    def shape(self) -> torch.Size:
        """The shape of one input."""
        return self.data.test[0].shape[1:]

    def place(self, rows: Tensor) -> Tensor:
        """Inputs of the network from flat rows in its own units."""
        return rows.reshape(-1, *self.shape).to(self.data.test[0].dtype)

    def from_standardised(self, rows: Tensor) -> Tensor:
        """Inputs of the network from rows in standard deviations around the training mean."""
        mean, scale = self.standards
        return self.place(mean + scale * rows)

    def standardised(self, x: Tensor) -> Tensor:
        """Rows in standard deviations around the training mean, ``(B, N)`` in float64."""
        mean, scale = self.standards
        return (x.flatten(1).double() - mean) / scale

    @property
    def standards(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of every entry of the input, in float64."""
        inputs = self.model._fitted().at(0)
        mean, scale = inputs.mean, inputs.scale
        assert isinstance(mean, Tensor)
        assert isinstance(scale, Tensor)
        return mean.double(), scale.double()

    @property
    def threshold(self) -> float:
        """The largest reference score that is not flagged."""
        references = self.model._reference_scores()
        rank = math.ceil((1 - ALPHA) * (len(references) + 1) - 1e-9)
        return float(references[min(rank, len(references)) - 1])

    @torch.no_grad()
    def accuracy(self) -> float:
        """The share of test inputs that are classified correctly."""
        x, y = self.data.test
        found = [answers(self.model, part).log_p.argmax(1) for part in Loader(x)]
        return float((torch.cat(found) == y).double().mean())

    @torch.no_grad()
    def right(self, flagged: bool, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """Correctly classified test inputs that are flagged, or not, and their labels."""
        x, y = self.data.test
        said = [answers(self.model, part) for part in Loader(x)]
        good = torch.cat([a.log_p.argmax(1) for a in said]) == y
        chosen = good & (torch.cat([a.flagged for a in said]) == flagged)
        index = some(chosen.nonzero()[:, 0], count, seed)
        return x[index], y[index]


def victim(data: Data, base: str) -> Victim:
    """A model over the network, fitted and calibrated, and its base.

    Args:
        data: The network and its data.
        base: ``"MAP"`` or ``"LLL"``.
    """
    loader = Loader(*data.train)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # laplace-torch's advice about its own defaults
        posterior: Any = data.network
        if base == "LLL":
            posterior = fit_laplace(data.network, loader, subset="last_layer")
            posterior.optimize_prior_precision(pred_type="glm", method="marglik")
        model = RGPR(posterior).fit(loader, progress=False)
        model.calibrate([data.validation], progress=False)
    plain = RGPR(posterior, layers="input").fit(loader, progress=False)
    plain.sigma2 = 0.0
    return Victim(model, plain, data)
