"""Changed copies of images, a whole batch at a time on the device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["crop_flip", "strong"]


def crop_flip(x: Tensor, generator: torch.Generator, *, padding: int = 4, flip: bool) -> Tensor:
    """Each image shifted by up to ``padding`` pixels, black coming in, and mirrored or not.

    Args:
        x: Images ``(B, C, H, W)`` of any dtype.
        generator: Source of the shifts, on the device of ``x``.
        padding: The largest shift.
        flip: Whether half of the images, on average, are mirrored left to right.

    Returns:
        Images of the same shape and dtype.
    """
    B, C, H, W = x.shape
    device = x.device
    shifts = torch.randint(2 * padding + 1, (2, B, 1), generator=generator, device=device)
    rows = shifts[0] + torch.arange(H, device=device)
    columns = torch.arange(W, device=device).expand(B, W)
    if flip:
        mirrored = torch.rand(B, 1, generator=generator, device=device) < 0.5
        columns = torch.where(mirrored, W - 1 - columns, columns)
    columns = columns + shifts[1]
    padded = F.pad(x, (padding, padding, padding, padding))
    image = torch.arange(B, device=device)[:, None, None, None]
    channel = torch.arange(C, device=device)[:, None, None]
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]


def strong(x: Tensor, generator: torch.Generator) -> Tensor:
    """Each image shifted and mirrored, turned, stretched and recoloured, a square of it missing.

    Turns are up to 20 degrees, each side is stretched or squeezed by up to a quarter, and shears
    are up to 0.2. Brightness, contrast and saturation are multiplied by 0.6 to 1.4. The square has
    between none and half of the image's side and is grey.

    Args:
        x: Images ``(B, C, H, W)`` in uint8, or in floating point between 0 and 1.
        generator: Source of the changes, on the device of ``x``.

    Returns:
        Images of the same shape in floating point, between 0 and 1.
    """
    x = crop_flip(x, generator, flip=True)
    x = x.float() / 255 if x.dtype == torch.uint8 else x
    B, _, H, W = x.shape

    def drawn(low: float, high: float, columns: int) -> Tensor:
        uniform = torch.rand(B, columns, generator=generator, device=x.device, dtype=x.dtype)
        return low + (high - low) * uniform

    angle, shear = drawn(-0.35, 0.35, 1), drawn(-0.2, 0.2, 1)
    width, height = drawn(0.75, 1.25, 1), drawn(0.75, 1.25, 1)
    zero = torch.zeros_like(angle)
    rows = [
        torch.cat([width * angle.cos(), shear - angle.sin(), zero], 1),
        torch.cat([angle.sin(), height * angle.cos(), zero], 1),
    ]
    grid = F.affine_grid(torch.stack(rows, 1), list(x.shape), align_corners=False)
    x = F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)

    brightness, contrast, saturation = drawn(0.6, 1.4, 3)[:, :, None, None, None].unbind(1)
    x = x * brightness
    x = x.lerp(x.mean((1, 2, 3), keepdim=True), 1 - contrast)
    x = x.lerp(x.mean(1, keepdim=True), 1 - saturation).clamp(0, 1)

    half = drawn(0, 0.25, 1) * H
    middle = drawn(0, 1, 2)
    across = (torch.arange(W, device=x.device) + 0.5 - W * middle[:, :1]).abs() < half
    down = (torch.arange(H, device=x.device) + 0.5 - H * middle[:, 1:]).abs() < half
    return x.masked_fill((down[:, :, None] & across[:, None, :])[:, None], 0.5)
