"""Inputs that are not data: what a model should not be confident about.

Every function takes a batch of real inputs ``(B, ...)`` and gives noise of the same shape, dtype
and device. :class:`NoiseLoader` makes a loader of any of them from a loader of real inputs, and
:func:`like_data` is the default set of outliers for tuning.

Example:
    >>> images = torch.rand(8, 3, 32, 32)
    >>> smoothed(images, generator=torch.Generator().manual_seed(0)).shape
    torch.Size([8, 3, 32, 32])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ._network.batches import Batch, mapped, numbers, rows_of
from ._network.kept import joined
from ._network.loaders import inputs
from ._network.sources import as_batches

__all__ = ["NoiseLoader", "far_away", "like_data", "permuted", "smoothed", "uniform"]

Noise = Callable[..., Tensor]

# Rows that noise is made of at the least, where there are as many.
_POOL = 256


def uniform(
    x: Tensor,
    *,
    low: float | Tensor = 0.0,
    high: float | Tensor = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Every entry independent and uniform between ``low`` and ``high``.

    Args:
        x: ``(B, ...)``; only its shape, dtype and device matter.
        low: A number, or a tensor that broadcasts, e.g. ``(C, 1, 1)`` for each channel.
        high: Likewise.
        generator: Source of the noise.
    """
    return (low + (high - low) * _random(x.shape, x, generator)).to(x.dtype)


def smoothed(
    x: Tensor,
    *,
    low: float | Tensor = 0.0,
    high: float | Tensor = 1.0,
    blur: tuple[float, float] = (1.0, 2.5),
    gain: tuple[float, float] = (5.0, 30.0),
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Images without their content, as in the paper: permuted, blurred, with new contrast.

    The pixels of each image change places (all channels of one together), a Gaussian blur joins
    them to blobs, and the contrast becomes :math:`1 / (1 + e^{-g (x - 1/2)})`. Colours are the
    data's, shapes are not.

    Args:
        x: Images ``(B, C, H, W)``.
        low: The smallest value a pixel can take, a number or ``(C, 1, 1)``.
        high: The largest. Images that were normalised have other bounds than 0 and 1.
        blur: Range of the blur's standard deviation in pixels, drawn for each image.
        gain: Range of the contrast's gain, drawn for each image.
        generator: Source of all that is random.

    Raises:
        ValueError: Not images, or values outside the bounds.
    """
    if x.dim() != 4:
        raise ValueError(
            f"the inputs have shape {tuple(x.shape)}; smoothed noise is made of images "
            "(B, C, H, W). For other data use rgpr.noise.permuted"
        )
    span = torch.as_tensor(high, device=x.device) - torch.as_tensor(low, device=x.device)
    images = ((x - low) / span).to(torch.promote_types(x.dtype, torch.float32))
    if len(x) and not bool(((images > -1e-3) & (images < 1 + 1e-3)).all()):
        raise ValueError(
            f"the images have values from {float(x.min()):.3g} to {float(x.max()):.3g}, outside "
            "the bounds given; pass low= and high=, a number or (C, 1, 1) for each channel"
        )
    count, channels, height, width = x.shape
    order = _random((count, 1, height * width), images, generator).argsort(-1)
    images = images.flatten(2).gather(2, order.expand(-1, channels, -1)).reshape(x.shape)
    sigma = _between(blur, count, images, generator)
    rows, columns = _blur_matrix(height, sigma), _blur_matrix(width, sigma)
    images = rows[:, None] @ images @ columns[:, None].mT
    contrast = _between(gain, count, images, generator)[:, None, None, None]
    images = torch.sigmoid(contrast * (images - 0.5))
    return (low + span * images).to(x.dtype)


def permuted(
    x: Tensor,
    *,
    scale: tuple[float, float] = (1.0, 30.0),
    generator: torch.Generator | None = None,
) -> Tensor:
    """Each entry from another example, and the whole stretched away from the mean.

    The marginals are the data's, the dependence between entries is gone, and every example lies
    ``scale`` times as far from the mean, drawn log-uniformly for each. Needs no knowledge of what
    the entries mean.

    Args:
        x: ``(B, ...)``, as large a batch as there is.
        scale: Range of the stretch.
        generator: Source of all that is random.
    """
    if len(x) == 1:
        raise ValueError("one row has no others to take entries from; give a larger batch")
    low, high = scale
    if not 0 < low <= high:
        raise ValueError(f"scale = {scale} must be two positive numbers, the smaller one first")
    flat = x.flatten(1)
    order = _random(flat.shape, flat, generator).argsort(0)
    mean = flat.mean(0, dtype=torch.promote_types(x.dtype, torch.float32))
    bounds = (torch.tensor(low).log().item(), torch.tensor(high).log().item())
    stretch = _between(bounds, len(x), mean, generator).exp()[:, None]
    return (mean + stretch * (flat.gather(0, order) - mean)).reshape(x.shape).to(x.dtype)


def far_away(
    x: Tensor, *, alpha: float = 2000.0, generator: torch.Generator | None = None
) -> Tensor:
    """Inputs scaled by ``alpha``: the direction along which confidence must go to 1/C.

    Args:
        x: ``(B, ...)``.
        alpha: The factor.
        generator: Not used, since nothing is random; all noise takes one.
    """
    return alpha * x


def like_data(x: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """The default set of outliers: smoothed noise for images, permuted and stretched otherwise.

    Images are inputs ``(B, C, H, W)`` with one to four channels and at least eight pixels a side;
    each channel's bounds are those of the batch.
    """
    if x.dim() != 4 or x.shape[1] > 4 or min(x.shape[2:]) < 8 or len(x) == 0:
        return permuted(x, generator=generator)
    low, high = x.amin((0, 2, 3)), x.amax((0, 2, 3))
    high = torch.where(high > low, high, low + 1)
    return smoothed(x, low=low[:, None, None], high=high[:, None, None], generator=generator)


class NoiseLoader:
    """A loader of noise made from a loader of real inputs; the same noise at every pass.

    Small batches are put together, so that entries can be taken from many others.

    Args:
        noise: One of this module's functions, or any ``f(x, generator=...)``.
        loader: Yields ``(x, y)``, ``x`` or dicts.
        seed: Seed of the noise.
        network: The network that the inputs are for, if it takes more than one tensor. Noise is
            made of each part of real numbers; ids and masks travel along.
        **options: Passed on to ``noise``.

    Example:
        >>> noise = NoiseLoader(uniform, [torch.zeros(5, 2)], high=3.0)
        >>> len(next(iter(noise)))
        5
    """

    def __init__(
        self,
        noise: Noise,
        loader: Iterable[Any],
        *,
        seed: int = 0,
        network: nn.Module | None = None,
        **options: Any,
    ) -> None:
        self.noise, self.loader, self.seed, self.options = noise, loader, seed, options
        self.network = network

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.seed)
        waiting: list[Batch] = []
        data = as_batches(self.loader, self.network)
        for x in inputs(data, self.network, progress=False, description="noise"):
            waiting.append(x)
            if sum(map(rows_of, waiting)) >= 2 * _POOL:
                # Half stays behind, so that the last one is no smaller.
                whole = joined(waiting)
                yield self._made(mapped(whole, lambda t: t[:-_POOL]), generator)
                waiting = [mapped(whole, lambda t: t[-_POOL:])]
        if waiting:
            yield self._made(joined(waiting), generator)

    def _made(self, x: Batch, generator: torch.Generator) -> Batch:
        if isinstance(x, Tensor):
            return self.noise(x, generator=generator, **self.options)
        real = {id(part) for part in numbers(self.network or nn.Identity(), x).values()}
        return mapped(  # type: ignore[no-any-return]
            x,
            lambda part: (
                self.noise(part, generator=generator, **self.options) if id(part) in real else part
            ),
        )


def _random(
    shape: Iterable[int],
    like: Tensor,
    generator: torch.Generator | None,
) -> Tensor:
    """Numbers drawn where the generator lives, moved to where ``like`` is."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    device = like.device if generator is None else generator.device
    return torch.rand(tuple(shape), generator=generator, device=device, dtype=dtype).to(like.device)


def _between(
    bounds: tuple[float, float], count: int, like: Tensor, generator: torch.Generator | None
) -> Tensor:
    low, high = bounds
    return low + (high - low) * _random((count,), like, generator)


def _blur_matrix(size: int, sigma: Tensor) -> Tensor:
    """Gaussian blur of ``size`` pixels as a matrix, ``(B, size, size)``, mirrored at the edges."""
    reach = int(4 * float(sigma.max()) + 0.5) if len(sigma) else 0
    steps = torch.arange(-reach, reach + 1, device=sigma.device)
    weights = torch.exp(-0.5 * (steps / sigma[:, None]).square())
    weights = torch.where(steps.abs() <= (4 * sigma[:, None] + 0.5).floor(), weights, 0.0)
    weights = weights / weights.sum(1, keepdim=True)
    pixel = torch.arange(size, device=sigma.device)
    # (d c b a | a b c d | d c b a): position modulo twice the size, folded back.
    position = (pixel[:, None] + steps) % (2 * size)
    position = torch.where(position < size, position, 2 * size - 1 - position)
    matrix = sigma.new_zeros(len(sigma), size, size)
    index = position.expand(len(sigma), -1, -1)
    return matrix.scatter_add_(2, index, weights[:, None, :].expand(-1, size, -1).contiguous())
