"""The operations of :mod:`rgpr._backend.arithmetic` as Triton kernels.

Every file holds the kernels of one idea, and beside each kernel the function that launches it and
registers itself. Functions with ``@triton.jit`` take as many parameters as they need, because
Triton passes tensors and numbers to a kernel but no dataclass.
"""

from __future__ import annotations

import warnings

import torch

__all__ = ["works"]


def works(device: torch.device) -> bool:
    """Register all kernels, and return whether they work on this device; warn if they do not.

    Raises:
        torch.OutOfMemoryError: The device has no memory left, which says nothing about Triton.
    """
    try:
        from . import (  # noqa: F401
            distances,
            moments,
            pooling,
            probit,
            small_layers,
            torch_operators,
            weighted_squares,
        )

        one = torch.ones(1, 1, device=device)
        distances.mean_cubes(one, one[0], one[0], None)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton, its compiler or the GPU may fail in many ways.
        warnings.warn(
            f"Triton kernels do not work here ({type(error).__name__}: {error}); plain torch is "
            "used, which is slower on a GPU",
            stacklevel=6,
        )
        return False
    return True
