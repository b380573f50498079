"""Networks quantised by ``torch.ao`` after training."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.ao import quantization as _quantization

from ..entry import Entry, register
from ..samples import Samples, images, rows, table
from .sequences import ONE_LAYER, Recurrent
from .tabular import COLUMNS, mlp

quantization: Any = _quantization  # whose functions have no types


def _dynamic(network: nn.Module, samples: Samples) -> nn.Module:
    """Weights of linear and recurrent layers in eight bits, activations in float."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao says that it will move to another package
        quantised: nn.Module = quantization.quantize_dynamic(
            network.eval(), {nn.Linear, nn.LSTM}, dtype=torch.qint8
        )
    return quantised


def _static(network: nn.Module, samples: Samples) -> nn.Module:
    """Weights and activations in eight bits, between a quantising and a dequantising module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = quantization.QuantWrapper(network.eval())
        wrapped.qconfig = quantization.get_default_qconfig("x86")
        prepared = quantization.prepare(wrapped)
        with torch.no_grad():
            prepared(samples.train[0])
        quantised: nn.Module = quantization.convert(prepared)
    return quantised


_EXCUSES = {
    "certificate": "no bound is known for layers of eight-bit numbers",
    "file": "packed weights are objects of torch, and not tensors that a file could hold",
}


def _convolutions(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, classes),
    )


def _add(name: str, build: Any, data: Any, after: Any, excuses: dict[str, str] = _EXCUSES) -> None:
    register(Entry("quantised", name, build, data, after=after, excuses=excuses))


_TABLE = {**_EXCUSES, **COLUMNS}
_add("mlp-dynamic", lambda classes: mlp(64, classes), table("digits"), _dynamic, _TABLE)
_add("mlp-static", lambda classes: mlp(64, classes), table("digits"), _static, _TABLE)
_add("cnn-static", _convolutions, images(16, 1), _static)
_add(
    "lstm-dynamic",
    lambda classes: Recurrent(nn.LSTM, classes),
    rows(),
    _dynamic,
    {**_EXCUSES, **ONE_LAYER},
)
