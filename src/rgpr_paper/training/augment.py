"""Shifted and mirrored images, a whole batch in one gather on the device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["crop_flip"]


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
