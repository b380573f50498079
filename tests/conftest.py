from __future__ import annotations

import contextlib
import os
import warnings

import pytest
import torch
from hypothesis import Phase, settings

from networks import Task, train_digits

if not torch.cuda.is_available():
    # Triton's kernels on a CPU; to be set before anything imports it.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Derandomised: a failure in CI is a failure at home. Examples take as long as they take.
settings.register_profile("rgpr", derandomize=True, deadline=None, max_examples=30)
settings.register_profile("nightly", derandomize=True, deadline=None, max_examples=100)
# For `make mutants`, where a test runs often and only whether it fails counts.
settings.register_profile(
    "mutants",
    derandomize=True,
    deadline=None,
    max_examples=10,
    phases=[Phase.explicit, Phase.generate],
)
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
