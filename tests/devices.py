"""Tests that need a GPU, or use one where there is one: `make test-gpu` runs both."""

from __future__ import annotations

import pytest
import torch

USES_GPU = pytest.mark.gpu
NEEDS_GPU = [USES_GPU, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def needs_gpu(test):
    """Decorates a test that is skipped where there is no GPU."""
    for mark in NEEDS_GPU:
        test = mark(test)
    return test
