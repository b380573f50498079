r"""Bounds of layers, and of the tensor operations between them.

- linear: the spectral norm of the weights;
- convolution: the bound in :mod:`rgpr.guarantee.norms`, times the root of how often padding can
  repeat a pixel;
- batch normalisation in evaluation mode: the largest factor of a channel,
  :math:`\max_c |\gamma_c| / \sqrt{\mathrm{var}_c + \epsilon}`;
- average pooling: the root of the largest row sum times the largest column sum, which is Schur's
  test for the non-negative matrix that pooling is;
- maximum pooling: the root of how many windows share a pixel, because a change of one pixel reaches
  every window that holds it;
- sum: the sum of the constants, and concatenation: the root of the sum of their squares;
- mean: the root of how many entries come out for each that goes in;
- flattening, transposing, dropout in evaluation mode and the like: one.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .norms import Windows, convolution_norm, least_norm, matrix_norm
from .operations import Bound, Call, by_factor

__all__ = ["LAYERS"]


def _linear(call: Call) -> float:
    weight: Tensor = call.read("weight", 1).double()
    weight, before = weight.reshape(-1, weight.shape[-1]), call.constants[0]
    if call.scale is not None and call.shapes[0][1:] == (call.scale.numel(),):
        # Each column is multiplied by its own entry's scale, instead of all by the largest scale.
        weight, before = weight * call.scale.double().reshape(1, -1), 1.0
    return (least_norm(weight) if call.quick else matrix_norm(weight)) * before


def _convolution(call: Call) -> float:
    weight: Tensor = call.read("weight", 1).detach().double()
    windows = Windows(
        kernel=tuple(weight.shape[2:]),
        stride=call.read("stride", 3, 1),
        dilation=call.read("dilation", 5, 1),
        dimensions=weight.dim() - 2,
    )
    bound = convolution_norm(weight, call.read("groups", 6, 1), windows, quick=call.quick)
    return bound if call.quick else bound * math.sqrt(_copies(call.module, windows.dimensions))


def _copies(module: Any, dimensions: int) -> int:
    """Returns how often padding can repeat a pixel; zeros repeat none."""
    mode = getattr(module, "padding_mode", "zeros")
    if mode == "zeros":
        return 1
    sides = module._reversed_padding_repeated_twice
    pairs = [sides[2 * i] + sides[2 * i + 1] for i in range(dimensions)]
    # Every padded pixel repeats the edge; wrapping or mirroring repeats a pixel at most twice.
    return math.prod(1 + both if mode == "replicate" else min(1 + both, 3) for both in pairs)


def _batch_norm(call: Call) -> float:
    module: Any = call.module
    factor = (module.running_var.double() + module.eps).rsqrt()
    if module.weight is not None:
        factor = factor * module.weight.double().abs()
    return float(factor.max())


def _max_pool(call: Call) -> float:
    kernel = call.read("kernel_size", 1)
    stride, dilation = call.read("stride", 2) or kernel, call.read("dilation", 4, 1)
    return math.sqrt(Windows(kernel, stride, dilation, len(call.made) - 2).sharing())


def _average_pool(call: Call) -> float:
    x = torch.ones(call.shapes[0], dtype=torch.float64, requires_grad=True)
    options = {name: value for name, value in call.kwargs.items() if name != "input"}
    pool: Any = call.module or call.function
    with torch.enable_grad():
        rows = pool(x, *call.args[1:], **options)
        [columns] = torch.autograd.grad(rows.sum(), x)
    return math.sqrt(float(rows.abs().max()) * float(columns.abs().max()))


def _sum(call: Call) -> float | None:
    if len(call.args) + len(call.kwargs) != 2 or "alpha" in call.kwargs:
        return None  # a factor on the second operand
    # An operand that is repeated to fit the other counts as often as it is repeated.
    repeated = [math.sqrt(call.made.numel() / max(1, shape.numel())) for shape in call.shapes]
    return sum(k * often for k, often in zip(call.constants, repeated, strict=True))


def _concatenation(call: Call) -> float:
    return math.hypot(*call.constants)


def _numbers(call: Call) -> list[float]:
    return [float(a) for a in (*call.args, *call.kwargs.values()) if isinstance(a, int | float)]


def _product(call: Call) -> float | None:
    numbers = _numbers(call)
    return abs(numbers[0]) if len(numbers) == 1 else None


def _quotient(call: Call) -> float | None:
    numbers = _numbers(call)
    by_number = len(numbers) == 1 and isinstance(call.args[0], Tensor)
    return 1 / abs(numbers[0]) if by_number and "rounding_mode" not in call.kwargs else None


def _mean(call: Call) -> float:
    return math.sqrt(call.made.numel() / max(1, call.shapes[0].numel()))


def _dropout(call: Call) -> float | None:
    # The walk switches modules to evaluation mode. Functions have no mode and drop by default.
    return None if call.module is None and call.read("training", 2, True) else 1.0


def _reshaped(call: Call) -> float | None:
    # view(dtype) reads the same memory as other numbers.
    reads_bits = any(isinstance(a, torch.dtype) for a in (*call.args, *call.kwargs.values()))
    return None if reads_bits else 1.0


# Operations that share a bound stand together. A string is the name of a tensor's method.
_GROUPS: list[tuple[tuple[Any, ...], Bound]] = [
    ((nn.Linear, F.linear), Bound(_linear)),
    (
        (nn.Conv1d, nn.Conv2d, nn.Conv3d, F.conv1d, F.conv2d, F.conv3d),
        by_factor(_convolution),
    ),
    ((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), by_factor(_batch_norm)),
    (
        (
            *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
            *(F.max_pool1d, F.max_pool2d, F.max_pool3d),
            *(torch.max_pool1d, torch.max_pool2d, torch.max_pool3d),
        ),
        by_factor(_max_pool),
    ),
    (
        (
            *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
            *(F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
            *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
            *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
        ),
        by_factor(_average_pool),
    ),
    (
        (operator.add, operator.iadd, operator.sub, operator.isub, torch.add, torch.sub),
        Bound(_sum, joins=True),
    ),
    ((torch.cat,), Bound(_concatenation, joins=True)),
    ((operator.mul, torch.mul), by_factor(_product)),
    ((operator.truediv, torch.div), by_factor(_quotient)),
    ((torch.mean, "mean"), by_factor(_mean)),
    (
        (
            *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
            *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d),
        ),
        by_factor(_dropout, keeps_order=True),
    ),
    (
        (
            *(nn.Identity, nn.Flatten, nn.Unflatten),
            *(torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze),
            *("flatten", "reshape", "squeeze", "unsqueeze", "view", "contiguous", "float"),
        ),
        by_factor(_reshaped, keeps_order=True),
    ),
    ((torch.permute, torch.transpose, "permute", "transpose"), by_factor(1.0)),
]
LAYERS: dict[Any, Bound] = {
    operation: bound for operations, bound in _GROUPS for operation in operations
}
