"""The zoo: a slice of it, what its checks would notice, and the page that shows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rgpr import RGPR
from rgpr.cli import main
from rgpr_paper.experiments import zoo
from rgpr_paper.units import read_units
from rgpr_paper.zoo import Entry, all_entries
from rgpr_paper.zoo.batches import redrawn, scrambled
from rgpr_paper.zoo.checks import CHECKS, Subject
from rgpr_paper.zoo.entry import register
from rgpr_paper.zoo.measure import measure
from rgpr_paper.zoo.samples import images, table, tokens
from rgpr_paper.zoo.widths import representations

RESULTS = Path(__file__).parents[2] / "results" / "zoo"
SLICE = [entry for entry in all_entries().values() if entry.small]


@pytest.mark.parametrize("entry", SLICE, ids=lambda entry: entry.unit)
def test_the_slice(entry: Entry) -> None:
    """Every check holds or is excused, and no excuse is there for nothing."""
    pytest.importorskip("sklearn", reason="needs the extra demo")
    row = measure(entry, but=("onnx",))
    assert "error" not in row, row["error"]
    failing = {name: found for name, found in row["checks"].items() if found["holds"] is False}
    assert set(failing) == set(entry.excuses) - {"onnx"}, failing


def test_the_zoo_is_large_and_the_families_are_there() -> None:
    entries = all_entries().values()
    assert len(entries) >= 60
    assert {entry.family for entry in entries} >= {"timm", "torchvision", "transformers"}
    for entry in entries:
        assert set(entry.excuses) <= {"fit", *CHECKS}, entry.unit


def test_the_results_have_every_entry() -> None:
    """``make zoo`` runs them anew after an entry was added."""
    assert {unit.name for unit in read_units(RESULTS)} == set(all_entries())


def test_every_row_is_right_or_says_why() -> None:
    for unit in read_units(RESULTS):
        row, excuses = unit.result, all_entries()[unit.name].excuses
        assert row["excuses"] == excuses, f"{unit.name} was run with other excuses"
        found = {name for name, check in row["checks"].items() if check["holds"] is False}
        failing = found | ({"fit"} if "error" in row else set())
        assert failing == set(excuses), unit.name


def test_a_network_that_cannot_be_wrapped_is_a_row(tmp_path: Path) -> None:
    """The row names the error, the claim counts it, and the run goes on."""
    pytest.importorskip("sklearn", reason="needs the extra demo")

    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(13, 3)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(x)
            return logits if self.training else logits[:, None]

    entry = Entry("ours", "sequences", lambda classes: Sequences(), table("wine"))
    row = measure(entry)
    assert row["error"].startswith("ValueError: the network returned shape (")
    assert row["checks"] == {}


def test_the_same_name_twice_is_refused() -> None:
    first = next(iter(all_entries().values()))
    with pytest.raises(ValueError, match=f"has '{first.unit}' already"):
        register(replace(first))


class ChannelsLast(nn.Module):
    """A convolution whose output is turned to (B, H, W, C), and a block without a count."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3)
        self.block = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 20), nn.GELU())
        self.head = nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.block(self.conv(x).permute(0, 2, 3, 1))
        logits: Tensor = self.head(h.mean((1, 2)))
        return logits


def test_declared_widths_are_channels_wherever_they_are() -> None:
    x = torch.randn(2, 3, 8, 8)
    names = ["conv", "block.0", "block", "block.2", "head:input"]
    found = representations(ChannelsLast(), x, names)
    assert [layer.declared for layer in found] == [(12,), (12,), (20,), (20,), (20,)]
    assert found[2].shape == (6, 6, 20)


def test_a_width_that_is_none_of_the_networks_is_noticed() -> None:
    pytest.importorskip("sklearn", reason="needs the extra demo")

    def network(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(13, width), nn.ReLU(), nn.Linear(width, 3))

    samples = table("wine")()
    model = RGPR(network(6)).fit([samples.train], progress=False)
    subject = Subject(model, model.posterior.network, samples, {}, lambda: network(6))
    assert CHECKS["widths"](subject)[1]
    with pytest.raises(AssertionError, match=r"1 is read by 6 units of \(20,\)"):
        CHECKS["widths"](replace(subject, network=network(20)))


def test_scrambling_keeps_pixels_and_padding() -> None:
    pytest.importorskip("sklearn", reason="needs the extra demo")
    pixels = images(8)().test[0]
    mixed = scrambled(pixels)
    assert isinstance(pixels, Tensor)
    assert isinstance(mixed, Tensor)
    assert not torch.equal(mixed, pixels)
    assert torch.equal(mixed[:, 0], mixed[:, 1])  # the channels of a pixel stay together
    assert torch.equal(mixed.flatten(1).sort(1).values, pixels.flatten(1).sort(1).values)
    words = tokens()().test[0]
    assert isinstance(words, dict)
    moved = scrambled(words)
    assert isinstance(moved, dict)
    assert torch.equal(moved["attention_mask"], words["attention_mask"])
    assert ((moved["input_ids"] == 0) == (words["attention_mask"] == 0)).all()
    assert torch.equal(moved["input_ids"].sort(1).values, words["input_ids"].sort(1).values)
    drawn = redrawn(words)
    assert isinstance(drawn, dict)
    assert ((drawn["input_ids"] == 0) == (words["attention_mask"] == 0)).all()
    assert not torch.equal(moved["input_ids"], words["input_ids"])


def test_a_missing_package_is_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its entries are left out, with the command that installs it."""
    pytest.importorskip("sklearn", reason="needs the extra demo")

    def build(classes: int) -> nn.Module:
        raise ModuleNotFoundError("No module named 'timm'", name="timm")

    entry = Entry("timm", "away", build, table("wine"), small=True)
    monkeypatch.setattr(zoo, "all_entries", lambda: {entry.unit: entry})
    assert main(["paper", "run", "zoo", "--small", "--out", str(tmp_path)]) == 1
    assert "pip install '.[zoo]'" in (tmp_path / "zoo" / "gaps.json").read_text()
