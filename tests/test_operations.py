"""Faster versions of operations come from outside, and one file adds a device."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import rgpr._backend
from rgpr._backend import arithmetic

NEW_DEVICE = """
import torch
from rgpr._backend.arithmetic import register

tried = []

def works(device):
    tried.append(device)
    return {works}

@register("meta")
def pooled(h):
    return torch.zeros(7, device="cpu")
"""


def called(h: Tensor) -> bool:
    """Whether a registered function answers; all of those below return seven zeros."""
    return arithmetic.pooled(h).shape == (7,)


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what a test registers."""
    for table in (arithmetic.FASTER, arithmetic._IN_GRAPHS):
        monkeypatch.setitem(table, "cpu", {})
        monkeypatch.delitem(table, "meta", raising=False)


def seven(name: str, **options: bool) -> None:
    """Register a function for the CPU that returns seven zeros."""

    def answer(*arguments: object) -> Tensor:
        return torch.zeros(7)

    answer.__name__ = name
    arithmetic.register("cpu", **options)(answer)


def test_a_version_from_outside_is_called() -> None:
    h = torch.ones(2, 3, 4)
    assert not called(h)
    seven("pooled")
    assert called(h)
    assert called(h.requires_grad_().detach())


def test_derivatives_are_those_of_the_reference() -> None:
    seven("pooled")
    h = torch.ones(2, 3, 4)
    assert not called(h.clone().requires_grad_())
    with torch.no_grad():
        assert called(h.clone().requires_grad_())
    assert torch.func.jvp(arithmetic.pooled, (h,), (h,))[1].shape == (2, 3)
    assert torch.func.vmap(arithmetic.pooled)(h[None]).shape == (1, 2, 3)


def test_graphs_call_what_is_registered_for_graphs_alone() -> None:
    seven("pooled")
    h = torch.ones(2, 3, 4)

    class Pooled(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return arithmetic.pooled(x)

    assert torch.export.export(Pooled(), (h,)).module()(h).shape == (2, 3)
    with torch.no_grad(), arithmetic.kernels_in_graphs(h) as kernels:
        assert not kernels
    seven("pooled", in_graphs=True)
    with arithmetic.kernels_in_graphs(h) as kernels:
        assert not kernels  # Gradients are enabled.
    with torch.no_grad(), arithmetic.kernels_in_graphs(h) as kernels:
        assert kernels
        exported = torch.export.export(Pooled(), (h,))
    assert exported.module()(h).shape == (7,)


def test_unknown_operations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'pooling' is no operation; expected .*'pooled'"):
        seven("pooling")


@pytest.mark.parametrize("works", [True, False])
def test_a_file_adds_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    (tmp_path / "meta.py").write_text(NEW_DEVICE.format(works=works))
    monkeypatch.setattr(rgpr._backend, "__path__", [*rgpr._backend.__path__, str(tmp_path)])
    arithmetic._works.cache_clear()
    try:
        h = torch.ones(2, 3, 4, device="meta")
        assert called(h) == works
        assert called(h) == works
        assert sys.modules["rgpr._backend.meta"].tried == [h.device]
    finally:
        sys.modules.pop("rgpr._backend.meta", None)
        arithmetic._works.cache_clear()


def test_kernels_that_do_not_work_leave_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="no Triton on this platform")
    cuda = importlib.import_module("rgpr._backend.cuda")
    distances = importlib.import_module("rgpr._backend.cuda.distances")

    def fail(error: Exception) -> None:
        def raising(*_: object) -> None:
            raise error

        monkeypatch.setattr(distances, "mean_cubes", raising)

    fail(RuntimeError("no compiler"))
    with pytest.warns(UserWarning, match=r"do not work here \(RuntimeError: no compiler\)"):
        assert not cuda.works(torch.device("cpu"))
    fail(torch.OutOfMemoryError("full"))
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        cuda.works(torch.device("cpu"))
