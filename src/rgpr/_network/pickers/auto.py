"""``layers="auto"``, which :class:`rgpr.RGPR` uses by default: the output of every hidden stage.

A stage is a block (a submodule made of submodules, like the ``layer1`` .. ``layer4`` of a ResNet)
or a layer with weights together with the normalisation, activation and pooling that follow it. The
last stage makes the outputs and is left out, and so is a stem before the first block. Plain
``nn.Sequential`` containers are looked through. Where the activation is a function call, the
representation is what goes into it: hooks see modules only.

If the outputs are those of an ``nn.Linear`` as it made them, what goes into that layer is always
read: all that the network knows about an input passes there. It is the last stage's output itself,
or takes its place under the name ``"fc:input"`` (for a head called ``fc``) where something lies
between the two, such as the pooling of a ResNet, a functional activation, or the choice of a class
token. A subclass with a ``forward`` of its own may do anything, and is no such layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..batches import Batch
from ..running import GOES_IN, INPUT
from ..trace import Call, label, sampled, trace
from .base import register_layer_picker

__all__ = ["auto"]

_SILENT = (
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.modules.dropout._DropoutNd,
    nn.Softmax,
    nn.LogSoftmax,
)
_NORMALISATIONS = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.LocalResponseNorm,
    nn.RMSNorm,
)


def auto(network: nn.Module, x: Batch, keep_last: bool) -> list[str]:
    """Names of the representations, the input first."""
    root = trace(network, x)
    runs: Counter[nn.Module] = Counter(call.module for call in root.every)
    hidden = _hidden(root, keep_last)
    names = [INPUT, *(label(call, runs) for call in hidden)]
    if keep_last or root.head is None or not _adds_features(root.head, hidden, x):
        return names
    if hidden and _width(hidden[-1].output_shape) == _width(root.head.input_shape):
        names.pop()  # the head's input is the same stage, further on
    return [*names, label(root.head, runs) + GOES_IN]


def _adds_features(head: Call, hidden: Sequence[Call], x: Batch) -> bool:
    """Whether what goes into the head is neither the input nor one of these outputs.

    An image that is flattened before the head holds the same numbers, but the residual reads the
    means over its positions, so it is not the same representation.
    """
    features = head.given
    if features is None or head.input_problem or features.dim() != 2:
        return False
    known = [(x.shape, sampled(x))] if isinstance(x, Tensor) and x.is_floating_point() else []
    known += [
        (call.output_shape, call.made)
        for call in hidden
        if call.output_shape is not None and call.made is not None
    ]
    ours = sampled(features)
    return not any(
        shape.numel() == features.numel()
        and shape[1:].numel() == _width(shape)
        and made.dtype == ours.dtype
        and torch.equal(made, ours)
        for shape, made in known
    )


def _width(shape: torch.Size | None) -> int | None:
    """How many units there are in a row once positions are pooled."""
    return None if shape is None else shape[2 if len(shape) == 3 else 1]


@dataclass
class _Stage:
    """A block or a layer with weights, and the last informative output before the next one."""

    start: Call
    output: Call

    @property
    def is_block(self) -> bool:
        return bool(self.start.calls)


def _hidden(root: Call, keep_last: bool) -> list[Call]:
    """The outputs of the hidden stages; see the head of this file for the rule."""
    calls = _flatten(root)
    stages = _stages(calls)
    # One stage that is itself a network (a wrapper, a backbone below a head): look inside.
    while len(stages) <= 2 and any(stage.is_block for stage in stages):
        calls = [inner for call in calls for inner in (_flatten(call) if call.calls else [call])]
        stages = _stages(calls)
    hidden = stages if keep_last else stages[:-1]
    first_block = next((i for i, stage in enumerate(hidden) if stage.is_block), 0)
    outputs = [stage.output for stage in hidden[first_block:]]
    return [call for call in outputs if not call.problem]


def _flatten(call: Call) -> list[Call]:
    """The runs inside ``call``, looking through sequences that hold layers directly."""
    flat: list[Call] = []
    for child in call.calls:
        sequence = isinstance(child.module, nn.Sequential) and child.calls
        if sequence and any(not grandchild.calls for grandchild in child.calls):
            flat.extend(_flatten(child))
        else:
            flat.append(child)
    return flat


def _stages(calls: Iterable[Call]) -> list[_Stage]:
    stages: list[_Stage] = []
    for call in calls:
        if call.calls or _has_weights(call.module):
            stages.append(_Stage(call, call))
        elif stages and (_refines(call) or (_pools(call) and not stages[-1].is_block)):
            stages[-1].output = call
    return stages


def _has_weights(module: nn.Module) -> bool:
    refinement = isinstance(module, (*_NORMALISATIONS, nn.PReLU))
    return not refinement and next(module.parameters(), None) is not None


def _pools(call: Call) -> bool:
    return type(call.module).__module__ == nn.modules.pooling.__name__


def _refines(call: Call) -> bool:
    """Normalisations and activations, also a user's own: same shape in and out, no weights."""
    if _pools(call) or isinstance(call.module, _SILENT):
        return False
    return call.input_shape is not None and call.input_shape == call.output_shape


register_layer_picker("auto", auto)
