"""Collectors: what several of them saw is what one would have seen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import rgpr
from networks import mlp, noise
from rgpr.residual.collecting import Collector
from rgpr.residual.leave_one_out import PrototypesWithout

STRATEGIES = {
    "moments": rgpr.Strategy("moments"),
    "moments from their maximum on": rgpr.Strategy("moments", offset=1.0),
    "moments from a quantile on": rgpr.Strategy("moments", offset=0.9),
    "whitened": rgpr.Strategy("whitened", "pooled", offset=0.9),
    "prototypes": rgpr.Strategy("prototypes", "pooled"),
}


def collected(strategy: rgpr.Strategy, x: Tensor, y: Tensor) -> Collector:
    collector = Collector(strategy)
    for rows in torch.arange(len(x)).split(7):
        collector.update(x[rows], y[rows], classes=3)
    return collector


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_collectors_of_shards_merge_to_that_of_all_data(
    strategy: rgpr.Strategy, dtype: torch.dtype
) -> None:
    x, y = 3 + torch.randn(60, 5, dtype=dtype), torch.arange(60) % 3
    merged = Collector(strategy)
    for shard in (slice(0, 11), slice(11, 60)):
        merged.merge(collected(strategy, x[shard], y[shard]).state())
    ours = dict(merged.finish().named_buffers())
    expected = dict(collected(strategy, x, y).finish().named_buffers())
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert ours[name].dtype == tensor.dtype
        if name in ("axes", "centers", "onto"):  # axes may point either way
            ours[name], tensor = ours[name].abs(), tensor.abs()
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)


def test_rows_that_are_kept_fit_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rgpr.residual.collecting._KEPT", 100 * 40 * 4)
    collector = Collector(rgpr.Strategy("moments", offset=0.9))
    collector.update(torch.randn(200, 40))
    assert collector.rows is not None
    assert collector.rows.size == 100


def test_an_example_counts_where_its_class_has_another() -> None:
    y = torch.tensor([0, 1, 1, 2, 2, 2])
    without = collected(STRATEGIES["prototypes"], torch.randn(6, 4), y).without_each()
    assert isinstance(without, PrototypesWithout)
    assert without.counted(y).tolist() == [False, True, True, True, True, True]


def test_labels_may_be_written_over_after_a_batch() -> None:
    """Loaders may fill the same tensors again, while small batches wait to be taken in."""
    network, x = mlp(), noise(300, seed=0)
    y = torch.arange(300) % 3

    def reusing() -> Iterator[tuple[Tensor, Tensor]]:
        labels = torch.empty(100, dtype=torch.long)
        for start in (0, 100, 200):
            yield x[start : start + 100], labels.copy_(y[start : start + 100])

    expected = rgpr.RGPR(network).fit(list(zip(x.split(100), y.split(100), strict=True)))
    assert torch.equal(rgpr.RGPR(network).fit(reusing()).score(x), expected.score(x))
