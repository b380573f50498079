r"""The steepest slope of every activation that is known.

An activation works on each entry alone, so its Euclidean Lipschitz constant is
:math:`L = \sup_x |f'(x)|`. One line here makes the activation known as a module, as a function and
as a tensor's method, because :mod:`rgpr.guarantee.table` looks up all of torch's names for it.
Where the supremum is no short number, the decimals are rounded up:

====================  =====================================  ==============
activation            supremum                               entry
====================  =====================================  ==============
GELU (exact)          :math:`\frac12(1 + \mathrm{erf}(1))    1.13
                      + e^{-1} / \sqrt\pi` = 1.12890...
GELU (tanh)           1.12899...                             1.13
SiLU                  1.09984...                             1.1
Mish                  1.08850...                             1.09
SELU                  :math:`\lambda \alpha` = 1.75809...    1.7581
====================  =====================================  ==============
"""

from __future__ import annotations

from torch import nn

from .operations import Bound, Call, by_factor

__all__ = ["ACTIVATIONS"]

# Beyond this threshold torch replaces softplus by the identity.
_SOFTPLUS_THRESHOLD = 20


def _leaky_relu(call: Call) -> float:
    return max(1.0, abs(float(call.read("negative_slope", 1, 0.01))))


def _prelu(call: Call) -> float:
    return max(1.0, float(call.read("weight", 1).abs().max()))


def _elu(call: Call) -> float:
    return max(1.0, abs(float(call.read("alpha", 1, 1.0))))


def _celu(call: Call) -> float | None:
    # With a negative alpha the exponential grows instead of falling, and no slope bounds it.
    return 1.0 if float(call.read("alpha", 1, 1.0)) > 0 else None


def _softplus(call: Call) -> float | None:
    # The slope is a sigmoid, but torch's function jumps by log(1 + exp(-threshold)) / beta where it
    # becomes the identity. From a threshold of 20 on, the jump is below the rounding of float32.
    return 1.0 if float(call.read("threshold", 2, 20.0)) >= _SOFTPLUS_THRESHOLD else None


ACTIVATIONS: dict[type[nn.Module], Bound] = {
    nn.ReLU: by_factor(1.0),
    nn.ReLU6: by_factor(1.0),
    nn.Hardtanh: by_factor(1.0),
    nn.Hardsigmoid: by_factor(1 / 6),
    nn.LeakyReLU: by_factor(_leaky_relu),
    nn.PReLU: by_factor(_prelu),
    nn.ELU: by_factor(_elu, piecewise_affine=False),
    nn.CELU: by_factor(_celu, piecewise_affine=False),
    nn.SELU: by_factor(1.7581, piecewise_affine=False),
    nn.GELU: by_factor(1.13, piecewise_affine=False),
    nn.SiLU: by_factor(1.1, piecewise_affine=False),
    nn.Mish: by_factor(1.09, piecewise_affine=False),
    nn.Hardswish: by_factor(1.5, piecewise_affine=False),
    nn.Tanh: by_factor(1.0, piecewise_affine=False),
    nn.Sigmoid: by_factor(0.25, piecewise_affine=False),
    nn.LogSigmoid: by_factor(1.0, piecewise_affine=False),
    nn.Softplus: by_factor(_softplus, piecewise_affine=False),
    nn.Softsign: by_factor(1.0, piecewise_affine=False),
}
