from __future__ import annotations

import contextlib
import os
import warnings

import pytest
import torch
from hypothesis import settings

from networks import Task, train_digits

if not torch.cuda.is_available():
    # Triton's kernels on a CPU; to be set before anything imports it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Derandomised: a failure in CI is a failure at home. Examples take as long as they take.
settings.register_profile("rgpr", derandomize=True, deadline=None, max_examples=30)
settings.register_profile("nightly", derandomize=True, deadline=None, max_examples=100)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "rgpr"))

with warnings.catch_warnings(), contextlib.suppress(ModuleNotFoundError):
    warnings.simplefilter("ignore")
    import laplace  # noqa: F401  its dependencies warn once, on first import


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def digits() -> Task:
    """A ReLU network trained on scikit-learn's digits. Not to be changed by a test."""
    return train_digits()
