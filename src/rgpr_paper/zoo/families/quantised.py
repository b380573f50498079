"""Networks quantised by ``torch.ao`` after training."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.ao import quantization as _quantization

from ..entry import Entry, register
from ..samples import Samples, images, rows, table
from .sequences import Recurrent
from .tabular import mlp

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


register(Entry("quantised", "mlp-dynamic", lambda c: mlp(64, c), table("digits"), after=_dynamic))
register(
    Entry("quantised", "lstm-dynamic", lambda c: Recurrent(nn.LSTM, c), rows(), after=_dynamic)
)
register(Entry("quantised", "mlp-static", lambda c: mlp(64, c), table("digits"), after=_static))
register(Entry("quantised", "cnn-static", _convolutions, images(16, 1), after=_static))
