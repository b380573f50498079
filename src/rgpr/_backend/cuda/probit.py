"""From the outputs of one pass to probabilities: one program takes one row."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arithmetic import ProbitScales, register
from .layout import power_of_two

__all__ = ["fused_probit"]

# A row of up to this many probabilities fits the registers of one program.
_MOST_CLASSES = 4096


@register("cuda")
def fused_probit(mean: Tensor, variance: Tensor, u: Tensor, scales: ProbitScales) -> Tensor | None:
    """See :func:`rgpr._backend.arithmetic.fused_probit`; ``None`` for one class or too many."""
    rows, classes = mean.shape
    if not 1 < classes <= _MOST_CLASSES:
        return None
    out = torch.empty_like(mean, memory_format=torch.contiguous_format)
    onset = scales.onset
    if rows:
        with torch.cuda.device_of(mean):
            _probit[(rows,)](
                mean.contiguous(), variance.contiguous(), u.contiguous(), scales.sigma2,
                scales.temperature if onset is None else onset, scales.slope, scales.typical,
                scales.temperature, out, scales.share, scales.far, classes, u.shape[1],
                onset is not None, power_of_two(classes), power_of_two(u.shape[1]),
            )  # fmt: skip
    return out


@triton.jit
def _probit(
    mean, variance, u, sigma2, onset, slope, typical, temperature, out, share, far, classes,
    layers,
    ONSET: tl.constexpr, CLASSES: tl.constexpr, LAYERS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    # The contribution of each layer, as in rgpr.residual.variance.Residual.contributions.
    layer = tl.arange(0, LAYERS)
    units = tl.load(u + row * layers + layer, layer < layers, 0)
    scales = tl.load(sigma2 + layer, layer < layers, 0)
    first = tl.load(u + row * layers)
    beyond = tl.where(first > far, 1, 0)
    known = tl.where((1 - _finite(units)) * beyond == 1, float("inf"), units)
    added = tl.where(scales > 0, known, 0) * scales
    if ONSET:  # The variance is that of rgpr.residual.variance.Residual.beyond.
        # The hidden layers that count have equal weights. If none counts, the input has it all.
        varied = tl.load(typical + layer, layer < layers, 0)
        counts = ((varied > 0) & (scales > 0) & (layer > 0)).to(tl.float64)
        powers = tl.where(tl.sum(counts) > 0, counts, (layer == 0).to(tl.float64))
        powers = powers / tl.sum(powers)
        # One silent layer silences the product. An infinite one counts in the sum alone: beside a
        # silent one it would be NaN. A NaN stays a NaN.
        left_out = (added == 0) | (added == float("inf"))
        logs = tl.where(left_out, -float("inf"), tl.log(tl.where(left_out, 1, added)))
        logs = tl.where(powers > 0, logs * powers, 0)
        total = tl.exp(tl.sum(logs)) + share * tl.sum(added) / layers
        v = total - tl.load(onset)
        v = tl.where(v < 0, 0, v) * tl.load(slope)
    else:
        v = tl.sum(added)
    v = tl.where(first != first, first, v)
    # Whether the row gets the limit, as in rgpr.answers.probabilities.at_limit.
    column = tl.arange(0, CLASSES)
    inside = column < classes
    m = tl.load(mean + row * classes + column, inside, 0).to(tl.float64)
    s = tl.load(variance + row * classes + column, inside, 0)
    outputs = tl.min(_finite(m) * _finite(s))
    everything = outputs * tl.min(_finite(units))
    limit = _infinite(first) + outputs * _infinite(v) + (1 - everything) * beyond > 0
    v = tl.where(limit, 0, v)
    # The probabilities of rgpr.posteriors.links.twice_probit with an onset, of probit without.
    heat = tl.load(temperature)
    # This is pi / 8. It is made a tensor because Triton would read the literal as a float32.
    factor = tl.full([], 0.39269908169872414, tl.float64)
    if ONSET:
        logits = m / tl.sqrt(1 + factor * s) / tl.sqrt(1 + v) / heat
    else:
        logits = m / tl.sqrt(1 + factor * (s + v)) / heat
    p = _softmax(logits, inside)
    p = tl.where(limit, 1 / classes.to(tl.float64), p)
    tl.store(out + row * classes + column, p.to(out.dtype.element_ty), inside)


@triton.jit
def _finite(value):
    """One where the value is finite, else zero."""
    return tl.where(value - value == 0, 1, 0)


@triton.jit
def _infinite(value):
    """One where the value is plus or minus infinity, else zero."""
    return tl.where(tl.abs(value) == float("inf"), 1, 0)


@triton.jit
def _softmax(logits, inside):
    """The softmax over the logits that are inside; the others have zero."""
    exponentials = tl.where(
        inside, tl.exp(logits - tl.max(tl.where(inside, logits, -float("inf")))), 0
    )
    return exponentials / tl.sum(exponentials)
