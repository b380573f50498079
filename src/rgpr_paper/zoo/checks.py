"""What is checked of every architecture: one function each, with its bound beside it.

A check returns a number and whether it is as it should be, raises :class:`NotApplicable`, or raises
whatever the library raised, which is a failure with the first line of the error as its reason.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rgpr
from rgpr.metrics import auroc

from .batches import Batch, call, changed, scrambled, taken
from .samples import Samples
from .widths import representations

__all__ = ["CHECKS", "NotApplicable", "Subject"]

FEWEST, MOST = 3, 12
ROWS = 1e-5
FAR = 0.01
SCALED = 0.95
HIGHER = 0.5
ONNX = 1e-4

Found = tuple[Any, bool]
CHECKS: dict[str, Callable[[Subject], Found]] = {}


class NotApplicable(Exception):  # noqa: N818, it is no error
    """The architecture has nothing that this check could look at; the message says why."""


@dataclass
class Subject:
    """A fitted model with what was known about its network before.

    Attributes:
        model: The fitted model.
        network: The trained network.
        samples: Its data.
        before: The network's state before the fit.
        fresh: Makes another network of the same architecture, with other weights.
    """

    model: Any
    network: nn.Module
    samples: Samples
    before: dict[str, Any]
    fresh: Callable[[], nn.Module]

    @property
    def x(self) -> Batch:
        """Held-out inputs."""
        return self.samples.test[0]

    def scaled(self, factor: float) -> Batch:
        """Held-out inputs times a factor."""
        if self.samples.tokens:
            raise NotApplicable("tokens cannot be scaled")
        return changed(self.x, lambda x: factor * x)

    @cached_property
    def scores(self) -> dict[str, Tensor]:
        """Scores of held-out inputs, and of the same scaled by ten and scrambled."""
        with torch.no_grad():
            scores = {"data": self.model.score(self.x)}
            scores["scrambled"] = self.model.score(scrambled(self.x))
            if not self.samples.tokens:
                scores["scaled"] = self.model.score(self.scaled(10.0))
        return scores

    def told_apart(self, kind: str) -> float:
        """AUROC of the score, held-out inputs against outliers of this kind."""
        if kind not in self.scores:
            raise NotApplicable("tokens cannot be scaled")
        return auroc(-self.scores["data"], -self.scores[kind])


def state_of(network: nn.Module) -> dict[str, Any]:
    """All of a network that must come back as it was."""
    return {
        "tensors": {name: t.clone() for name, t in _tensors(network).items()},
        "modes": [module.training for module in network.modules()],
        "hooks": [
            len(module._forward_hooks) + len(module._forward_pre_hooks)
            for module in network.modules()
        ],
    }


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers; packed weights of quantised layers are not tensors."""
    return {name: t for name, t in network.state_dict().items() if isinstance(t, Tensor)}


def _check(name: str) -> Callable[[Callable[[Subject], Found]], Callable[[Subject], Found]]:
    def add(function: Callable[[Subject], Found]) -> Callable[[Subject], Found]:
        CHECKS[name] = function
        return function

    return add


@_check("widths")
def _widths(subject: Subject) -> Found:
    """The residual's units are the channels that the network's layers declare."""
    described = representations(
        subject.network, taken(subject.x, slice(2)), subject.model.layers[1:]
    )
    found, wrong = [], []
    for index, layer in enumerate(described, start=1):
        width = subject.model.residual.at(index).anchors().shape[1]
        found.append([layer.name, layer.kind, list(layer.shape), width])
        if layer.declared and width not in layer.declared:
            wrong.append(f"{layer.name} is read by {width} units of {layer.shape}")
    if wrong:
        raise AssertionError("; ".join(wrong))
    return found, True


@_check("count")
def _count(subject: Subject) -> Found:
    """There are three to twelve representations, the input one of them."""
    count = len(subject.model.layers)
    return count, FEWEST <= count <= MOST


@_check("table")
def _table(subject: Subject) -> Found:
    """`rgpr.layers` names the layers that are read before anything is fitted."""
    example: Any = taken(subject.x, slice(4))
    table = rgpr.layers(subject.network, example)
    return None, table.taken == subject.model.layers


@_check("rows")
def _rows(subject: Subject) -> Found:
    """Probabilities of held-out inputs, and of scrambled ones, sum to one."""
    batches = [subject.x, scrambled(subject.x)]
    worst = max(float((subject.model(x).double().sum(1) - 1).abs().max()) for x in batches)
    return worst, worst <= ROWS


@_check("base")
def _base(subject: Subject) -> Found:
    """With all scales zero the answers are the network's own, bit by bit."""
    model = subject.model
    kept = model.sigma2.clone()
    model.sigma2 = 0.0
    difference = model(subject.x) - call(subject.network, subject.x).softmax(-1)
    model.sigma2 = kept
    worst = float(difference.abs().max())
    return worst, worst == 0


@_check("far")
def _far(subject: Subject) -> Found:
    """At a million times their size the confidence of held-out inputs is 1/C."""
    p = subject.model(subject.scaled(1e6))
    worst = float((p.amax(1) - 1 / subject.samples.classes).max())
    return worst, worst <= FAR


@_check("scaled")
def _scaled(subject: Subject) -> Found:
    """The score tells held-out inputs from the same scaled by ten."""
    value = subject.told_apart("scaled")
    return value, value >= SCALED


@_check("scrambled")
def _scrambled(subject: Subject) -> Found:
    """The score tells held-out inputs from the same with pixels, columns or words scrambled."""
    value = subject.told_apart("scrambled")
    return value, value >= subject.samples.scrambled


@_check("higher")
def _higher(subject: Subject) -> Found:
    """Most examples have a higher score when scaled, and when scrambled, than they have."""
    scores = subject.scores
    shares = [
        float((scores[kind] > scores["data"]).double().mean())
        for kind in ("scaled", "scrambled")
        if kind in scores
    ]
    return min(shares), min(shares) > HIGHER


@_check("certificate")
def _certificate(subject: Subject) -> Found:
    """There is a finite distance beyond which every input is below 1/C + 0.05."""
    if subject.samples.tokens:
        raise NotApplicable("no text is far away in every direction")
    certificate = subject.model.certify(eps=0.05)
    return [certificate.radius, certificate.by], math.isfinite(certificate.radius)


@_check("file")
def _file(subject: Subject) -> Found:
    """What is loaded into another network of the same kind gives the same answers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        subject.model.save(path)
        loaded: Any = rgpr.load(path, subject.fresh())
    pairs = [
        (subject.model(subject.x), loaded(subject.x)),
        (subject.scores["data"], loaded.score(subject.x)),
    ]
    worst = max(float((one - other).abs().max()) for one, other in pairs)
    return worst, worst == 0


@_check("onnx")
def _onnx(subject: Subject) -> Found:
    """ONNX Runtime gives the same probabilities, where the network itself becomes a graph."""
    import onnxruntime

    x, example = taken(subject.x, slice(20)), taken(subject.x, slice(2))
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = rgpr.export.onnx(subject.model, Path(folder) / "model.onnx", example)
        except Exception:
            _refuse_if_alone_too(subject.network, example, Path(folder) / "network.onnx")
            raise
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        given = {"x": x} if isinstance(x, Tensor) else x
        arrays = {name: part.numpy() for name, part in given.items()}
        answers = session.run(["probabilities"], arrays)
    worst = float((torch.tensor(answers[0]) - subject.model(x)).abs().max())
    return worst, worst <= ONNX


def _refuse_if_alone_too(network: nn.Module, example: Batch, path: Path) -> None:
    """Raise :class:`NotApplicable` where the bare network cannot be exported either."""
    sizes = {0: torch.export.Dim("batch")}
    arguments: tuple[Any, ...] = (example,) if isinstance(example, Tensor) else ()
    keywords = {} if isinstance(example, Tensor) else example
    try:
        torch.onnx.export(
            copy.deepcopy(network).eval(),  # an export that fails may leave something in it
            arguments,
            path,
            kwargs=keywords,
            dynamic_shapes=(sizes,) if arguments else dict.fromkeys(keywords, sizes),
            dynamo=True,
            verbose=False,
        )
    except Exception:
        raise NotApplicable("the network alone does not become a graph either") from None


@_check("unchanged")
def _unchanged(subject: Subject) -> Found:
    """The network has the weights, modes and hooks that it had before the fit."""
    now, before = state_of(subject.network), subject.before
    same = now["modes"] == before["modes"] and now["hooks"] == before["hooks"]
    tensors = all(torch.equal(t, before["tensors"][name]) for name, t in now["tensors"].items())
    return None, same and tensors
