"""From one pass through the network to an answer: probabilities, samples, or mean and variance.

Every function here takes an extension and a reading, changes neither, and gives what it is called
after. Most of the code is about inputs so far away that numbers overflow. ``u`` is float64, and no
float32 value overflows it, but the network may overflow on the way. Where the input itself is
plainly far away, what overflowed counts as infinite, and the row gets the *limit*: the uniform
distribution (1/2 for each label), an infinite variance, an infinite score. A network that gives
NaN near its data is broken, and its NaN is shown, not covered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._backend.arithmetic import FASTER, ProbitScales, all_finite, can_look, fused_probit
from .._backend.precision import at_least_float32, full_precision
from .._network.batches import Batch
from .._network.checks import check_counts
from ..extension import Extension, Reading
from ..likelihoods import LabelLikelihood, Likelihood
from ..likelihoods.classification import softmax, two_columns
from ..posteriors.gaussian import Gaussian, standard_normal, symmetric_normal
from ..posteriors.links import LINKS
from ..residual.variance import SHARE

__all__ = [
    "answer",
    "check_link",
    "deviations",
    "draw",
    "flatness",
    "log_probabilities",
    "monte_carlo",
    "symmetric_noise",
    "variance",
]


# -- what a plain call returns -------------------------------------------------------------------


def answer(
    extension: Extension, reading: Reading[Gaussian], link: str = "probit", diagonal: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Probabilities ``(B, C)`` in the input's dtype, or a regression's mean and covariance.

    Args:
        extension: The base, its residual and the temperature.
        reading: The base's Gaussian and ``u``, from one pass.
        link: One of :data:`rgpr.posteriors.links.LINKS`, for probabilities.
        diagonal: For regression, give variances ``(B, C)`` instead of covariances.
    """
    u, dtype = reading.u, reading.dtype
    if torch.is_autocast_enabled(u.device.type):
        with full_precision(u):  # variances need their digits
            return answer(extension, reading, link, diagonal)
    gaussian = reading.output
    if gaussian.mean.dtype != dtype:
        gaussian = gaussian.with_mean(gaussian.mean.to(dtype))
    likelihood = extension.likelihood
    # The kernel is that of a softmax.
    if link == "probit" and not likelihood.independent and FASTER.get(u.device.type, True):
        at_once = fused_probit(gaussian.mean, gaussian.variance, u, _scales(extension, dtype))
        if at_once is not None:
            return at_once
    v, limit = measured(reading, gaussian, extension.residual)
    if not isinstance(likelihood, LabelLikelihood):
        return _regression(gaussian, v, limit, diagonal)
    logits = _logits(extension, gaussian, v, limit, link)
    # Half precision rounds the probabilities and not the logits, whose differences from the largest
    # it cannot hold. Torch's own softmax computes in float32, too, so the base's answer stays.
    wide = at_least_float32(dtype)
    if likelihood.independent:
        return torch.sigmoid(logits.to(wide)).to(dtype)
    logits = two_columns(logits)
    # The largest is subtracted before the cast and not by the softmax alone: the compiler of torch
    # 2.15 loses a cast that stands between a product and a softmax. The result is the same.
    logits = logits - logits.amax(1, keepdim=True)
    return torch.softmax(logits.to(wide), 1).to(dtype)


def _scales(extension: Extension, dtype: torch.dtype) -> ProbitScales:
    """What a kernel takes that does at once all that follows a pass."""
    residual = extension.residual
    return ProbitScales(
        sigma2=residual.sigma2,
        onset=residual.onset,
        slope=residual.slope,
        typical=residual.typical,
        share=SHARE,
        temperature=extension.temperature,
        far=far(dtype),
    )


def log_probabilities(extension: Extension, reading: Reading[Gaussian]) -> Tensor:
    """By the probit, in float64, as :class:`rgpr.likelihoods.LabelLikelihood` gives them.

    Rows at the limit get the uniform distribution. Conformal ranks need more digits than
    :func:`answer` has.
    """
    likelihood = extension.likelihood
    assert isinstance(likelihood, LabelLikelihood)
    gaussian = reading.output.with_mean(reading.output.mean.double())
    v, limit = measured(reading, gaussian, extension.residual)
    return likelihood.log_probabilities(_logits(extension, gaussian, v, limit, "probit"))


def deviations(extension: Extension, reading: Reading[Gaussian]) -> Tensor:
    """Standard deviations ``(B, C)`` that intervals are proportional to; infinite at the limit.

    Their squares are the base's variance, the residual's, and its unit: the last keeps them away
    from zero where a point estimate knows no variance at all.
    """
    v, limit = measured(reading, reading.output, extension.residual)
    total = reading.output.variance + (v + extension.residual.unit)[:, None]
    return replaced(limit, torch.inf, total).sqrt()


def variance(extension: Extension, reading: Reading[Any]) -> Tensor:
    """The residual's ``v``, ``(B,)`` in float64."""
    v: Tensor = extension.residual(known(reading.u, reading.dtype))
    return v


def check_link(name: str, likelihood: Likelihood, *, diagonal: bool = False) -> None:
    """Refuse a link that is not known or not for this likelihood.

    Args:
        name: The link.
        likelihood: What the outputs stand for.
        diagonal: Whether it must do with variances alone.

    Raises:
        ValueError: The message names those that there are.
    """
    labels = isinstance(likelihood, LabelLikelihood) and likelihood.independent
    if labels and name in LINKS and LINKS[name].needs_covariance:
        raise ValueError(
            f"link_approx={name!r} is for classes of which one is right, and the labels of "
            f"likelihood={likelihood.name!r} are independent; use 'probit' or 'mc'"
        )
    names = [n for n, link in LINKS.items() if not (diagonal and link.needs_covariance)]
    if name not in (*names, "mc"):
        known_ones = ", ".join(map(repr, (*names, "mc")))
        raise ValueError(f"link_approx={name!r} is not one of {known_ones}")


def _logits(
    extension: Extension, gaussian: Gaussian, v: Tensor, limit: Tensor | None, link: str
) -> Tensor:
    """What goes into the softmax: by one link, with the residual as its recipe combines it.

    Equal logits are the limit: the uniform distribution, or 1/2 for each label.
    """
    logits, v = LINKS[link].logits, replaced(limit, 0.0, v)
    if extension.residual.onset is None:
        return replaced(limit, 0.0, logits(gaussian, v, extension.temperature))
    factor = flatness(v / extension.residual.unit)
    usual = logits(gaussian, torch.zeros_like(v), extension.temperature)
    return replaced(limit, 0.0, usual * factor)


def flatness(beyond: Tensor) -> Tensor:
    r"""The factor on the base's logits that averages over the residual: :math:`1 / \sqrt{1 + w}`.

    Averaging over the base's posterior first and over the residual afterwards divides all of the
    base's logits by one number. So the order of the classes is the base's, equal ones stay equal,
    and without variance the answer is the base's, bit by bit.

    Args:
        beyond: ``w``, the residual's variance in its unit, ``(B,)``, non-negative.

    Returns:
        One number for each row, ``(B, 1)``.
    """
    return (1 + beyond)[:, None].rsqrt()


def _regression(
    gaussian: Gaussian, v: Tensor, limit: Tensor | None, diagonal: bool
) -> tuple[Tensor, Tensor]:
    v = replaced(limit, torch.inf, v)
    # An infinite variance is around no mean, and neither is that of a row with a NaN.
    mean = torch.where((v < torch.inf)[:, None], gaussian.mean, torch.nan)
    if diagonal:
        return mean, replaced(limit, 0.0, gaussian.variance) + v[:, None]
    covariance = replaced(limit, 0.0, gaussian.covariance)
    covariance = covariance + torch.diag_embed(v[:, None].expand_as(mean))
    # Of a row with a NaN nothing is known, not even how its outputs go together.
    return mean, torch.where(v.isnan()[:, None, None], torch.nan, covariance)


# -- by samples ----------------------------------------------------------------------------------


def draw(
    extension: Extension,
    x: Batch,
    n_samples: int,
    generator: torch.Generator | None,
    *,
    symmetric: bool = True,
) -> tuple[Tensor, Tensor]:
    """Samples with the residual's noise ``(S, B, C)``, and which rows are at the limit, ``(B,)``.

    At the limit the samples are plus and minus infinity.

    Args:
        extension: The base, its residual and the temperature.
        x: ``(B, ...)``.
        n_samples: How many samples are drawn.
        generator: Source of the samples.
        symmetric: Spread the noise evenly over the alternatives that labels have.
    """
    check_counts(n_samples=n_samples)
    posterior = extension.posterior
    reading: Reading[Tensor]
    reading = extension.read(x, lambda clean: posterior.sample(clean, n_samples, generator))
    drawn, labels = reading.output, isinstance(extension.likelihood, LabelLikelihood)
    v = variance(extension, reading)
    limit = at_limit(reading, v, (drawn.abs() < torch.inf).all(2).all(0))
    v = torch.where(limit, torch.inf, v)
    if labels and symmetric:
        noise = symmetric_noise(extension.likelihood, drawn, generator)
    else:
        noise = standard_normal(tuple(drawn.shape), drawn, generator)
    # Zero times noise is exactly zero, so without variance these are the base's own samples.
    noise = v.sqrt()[:, None] * noise
    # The noise alone at the limit: infinity minus infinity would be NaN.
    drawn = torch.where(limit[:, None], 0.0, drawn) + noise
    return drawn / extension.temperature if labels else drawn, limit


def symmetric_noise(
    likelihood: Likelihood, drawn: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Standard normal noise for samples ``(S, B, C)`` that prefers no class, and no label or none.

    Labels that are independent of each other are single outputs of their own.
    """
    samples, rows, outputs = drawn.shape
    shape = (rows * outputs, 1) if likelihood.independent else (rows, outputs)
    return symmetric_normal(samples, shape, drawn, generator).reshape(drawn.shape)


def monte_carlo(likelihood: LabelLikelihood, drawn: Tensor, limit: Tensor) -> Tensor:
    """The mean of probabilities over samples: the last line of the paper's Algorithm 1.

    Args:
        likelihood: What the outputs stand for.
        drawn: Samples ``(S, B, C)`` of the logits, divided by the temperature.
        limit: Rows that are at the limit, ``(B,)``.

    Returns:
        ``(B, C)`` probabilities in float64, uniform at the limit.
    """
    finite = torch.where(limit[:, None], 0.0, drawn)
    each = torch.sigmoid(finite) if likelihood.independent else softmax(finite)
    # At the limit all samples say the same, and a mean would round it.
    return torch.where(limit[:, None], each[0], each.mean(0))


# -- rows at the limit ---------------------------------------------------------------------------


def far(dtype: torch.dtype) -> float:
    """The ``u`` of the input beyond which a network that overflows was plainly driven too far.

    A mean of |z|^3 / 3 of 1e12 is some ten thousand standard deviations in every coordinate. Half
    precision overflows far earlier; there it is 1e3, fourteen of them.
    """
    return 1e12 if torch.finfo(dtype).max > 1e30 else 1e3


def known(u: Tensor, dtype: torch.dtype) -> Tensor:
    """``u`` ``(B, L)`` with infinity where a far-away input made a layer overflow.

    A row whose input holds a NaN is NaN throughout.
    """
    first = u[:, :1]
    overflowed = torch.where((first > far(dtype)) & u.isnan(), torch.inf, u)
    return torch.where(first.isnan(), torch.nan, overflowed)


def measured(
    reading: Reading[Gaussian], gaussian: Gaussian, measure: Callable[..., Tensor]
) -> tuple[Tensor, Tensor | None]:
    """The residual's ``v``, or the strangeness, and the rows to answer with the limit.

    Most batches have no such row. Where values can be looked at, one look saves such a batch
    everything that the others need.

    Args:
        reading: Its ``u`` as the pass through the network gave it.
        gaussian: The outputs that the answer is made of.
        measure: Gives the variance or the strangeness for ``u``. Told that all of ``u`` is
            ``finite``, it gives no finite number for a row that is not.

    Returns:
        ``(B,)`` in float64, and ``(B,)`` booleans or ``None`` if no row is at the limit.
    """
    u = reading.u
    if can_look(u):
        found = measure(u, finite=True)
        if all_finite(found, gaussian.mean, gaussian.variance):
            return found, None
    found = measure(known(u, reading.dtype))
    return found, at_limit(reading, found, finite_outputs(gaussian))


def replaced(limit: Tensor | None, value: float, usual: Tensor) -> Tensor:
    """``usual`` ``(B, ...)`` with another value in the rows that are at the limit."""
    if limit is None:
        return usual
    return torch.where(limit.view(-1, *[1] * (usual.dim() - 1)), value, usual)


def at_limit(reading: Reading[Any], v: Tensor, good: Tensor) -> Tensor:
    """Rows to answer with the limit, ``(B,)``.

    Args:
        reading: Its ``u`` as the pass through the network gave it.
        v: The residual's variance, or the strangeness, ``(B,)``.
        good: Rows whose outputs are finite, ``(B,)``.
    """
    u = reading.u
    first = u[:, 0]
    broken = ~good | ~(u.abs() < torch.inf).all(1)
    # Not isinf or isfinite, which ONNX knows for float32 alone: beyond it all would be infinite.
    boundless = v.abs() == torch.inf
    return (good & boundless) | (broken & (first > far(reading.dtype)))


def finite_outputs(gaussian: Gaussian) -> Tensor:
    """Rows whose outputs are finite, ``(B,)``."""
    mean, spread = gaussian.mean.abs() < torch.inf, gaussian.variance.abs() < torch.inf
    return mean.all(1) & spread.all(1)
