"""What other parts take from coordinates: anchors and spreads, rows that wait, saved tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rgpr.residual.collecting import Collector
from rgpr.residual.coordinates import Coordinates, Standardizer
from rgpr.residual.prototypes import Prototypes
from rgpr.residual.recipes import Strategy


def fitted_coordinates(kind: str, h: Tensor, y: Tensor) -> Coordinates:
    collector = Collector(Strategy(kind, "pooled"))
    collector.update(h, y, classes=3)
    return collector.finish()


@pytest.mark.parametrize("kind", ["moments", "whitened", "prototypes"])
def test_a_direction_grows_with_the_distance_as_fast_as_its_spread(kind: str) -> None:
    """A bound for every deviation from an anchor, and reached by one of them."""
    h, y = torch.randn(90, 4).double() * torch.tensor([1.0, 5.0, 0.2, 3.0]), torch.arange(90) % 3
    h = h + 10 * torch.nn.functional.one_hot(y, 4)
    coordinates: Any = fitted_coordinates(kind, h, y)
    directions = torch.randn(5, 4).double()
    spread = coordinates.spread_of(directions)
    anchor = coordinates.anchors()[-1]
    # The deviation that the direction grows along fastest: the covariance times the direction.
    own = h - torch.stack([h[y == k].mean(0) for k in range(3)])[y]
    inverse = 0.9 * own.T @ own / 90 + 0.1 * own.square().mean() * torch.eye(4)
    if kind != "prototypes":
        covariance = (h - h.mean(0)).T @ (h - h.mean(0)) / 90
        inverse = 0.9 * covariance + 0.1 * covariance.diagonal().mean() * torch.eye(4)
    if kind == "moments":
        inverse = h.var(0, correction=0).diag()
    for w, bound in zip(directions, spread, strict=True):
        for lead in (inverse.double() @ w, *torch.randn(20, 4).double()):
            step = 1e-3 * lead / lead.norm()  # so short that this anchor stays the nearest
            distance = coordinates((anchor + step)[None]).square().mean().sqrt()
            assert abs(w @ step) <= bound * distance * (1 + 1e-6)
        step = 1e-3 * (inverse.double() @ w) / (inverse.double() @ w).norm()
        distance = coordinates((anchor + step)[None]).square().mean().sqrt()
        assert float(abs(w @ step)) == pytest.approx(float(bound * distance), rel=1e-4)


def test_anchors_are_the_points_at_distance_zero() -> None:
    h, y = 7 + torch.randn(90, 4).double(), torch.arange(90) % 3
    means = torch.stack([h[y == k].mean(0) for k in range(3)])
    for kind, expected in (("prototypes", means), ("moments", h.mean(0)[None])):
        coordinates: Any = fitted_coordinates(kind, h, y)
        torch.testing.assert_close(coordinates.anchors(), expected)
        torch.testing.assert_close(
            coordinates(coordinates.anchors()), torch.zeros_like(coordinates(expected))
        )


def test_prototypes_save_what_they_cannot_do_without_and_pool() -> None:
    prototypes = Prototypes(torch.randn(3, 4), torch.eye(4))
    assert set(prototypes.state_dict()) == {"axes", "centers", "origin"}
    h = torch.randn(5, 4, 6, 6)
    torch.testing.assert_close(prototypes(h), prototypes(h.mean((2, 3))))


def test_rows_that_wait_are_not_overwritten() -> None:
    """A network may change in place what it gave to be measured at the end of the pass."""
    prototypes, h = Prototypes(torch.randn(3, 4), torch.eye(4)), torch.randn(5, 4)
    rows, before = prototypes.rows(h), h.clone()
    h.zero_()
    assert torch.equal(rows, before)


def test_packed_layers_keep_their_offset() -> None:
    prototypes = Prototypes(torch.randn(3, 4), torch.eye(4))
    prototypes.offset = torch.tensor([2.5])
    assert prototypes.parts is not None
    assert prototypes.parts.offset is prototypes.offset


def test_units_are_estimated_jointly_by_prototypes_alone() -> None:
    """Each unit's own spread takes few examples, and a covariance takes many for each unit."""
    assert Standardizer(torch.zeros(7), torch.ones(7)).joint_units == 1
    assert Prototypes(torch.randn(3, 7), torch.eye(7)).joint_units == 7


def test_autocast_does_not_round_what_is_made_of_prototypes() -> None:
    means, covariance = torch.randn(4, 6), torch.eye(6).double() * torch.arange(1, 7)
    plain = Prototypes(means, covariance)
    with torch.autocast("cpu", torch.bfloat16):
        cast = Prototypes(means, covariance)
    for name, buffer in plain.named_buffers():
        assert torch.equal(cast.get_buffer(name), buffer), name
