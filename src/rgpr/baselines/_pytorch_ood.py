"""The one place that imports pytorch-ood's detectors."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["pytorch_ood"]


def pytorch_ood(kind: str) -> Any:
    """A class of pytorch-ood by its name.

    Raises:
        ModuleNotFoundError: pytorch-ood is not installed.
    """
    try:
        detectors = import_module("pytorch_ood.detector")
    except ModuleNotFoundError as error:
        text = f"{kind} is computed by pytorch-ood: pip install '.[ood]' or pytorch-ood"
        raise ModuleNotFoundError(text, name=error.name) from error
    return getattr(detectors, kind)
