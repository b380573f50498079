"""Networks of several families, and what the layers that are read change about the score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from rgpr.cli import main
from rgpr_paper.data import made_sequences
from rgpr_paper.experiments import families
from rgpr_paper.families import CHOICES, FAMILIES
from rgpr_paper.training import TrainingPlan, convnext, mobilenet, vit
from rgpr_paper.training.augment import strong
from rgpr_paper.units import read_units


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    options = ["--small", "--seeds", "0", "--sets", "vit", "sequences", "--out", str(folder)]
    assert main(["paper", "run", "families", *options]) == 0
    return folder


def test_every_choice_of_layers_is_measured(out: Path) -> None:
    units = {unit.name: unit.result for unit in read_units(out / "families")}
    assert set(units) == {"vit-seed0", "conv1d-seed0", "lstm-seed0"}
    for result in units.values():
        assert tuple(result["choices"])[:3] == CHOICES
        assert len(result["choices"]["input and head"]["layers"]) == 2
        for found in result["choices"].values():
            assert found["layers"][0] == "input"
            assert found["fit seconds"] > 0
    blocks = [f"blocks.{number}" for number in range(6)]
    by_hand = units["conv1d-seed0"]["choices"]["every block"]["layers"]
    assert by_hand == ["input", *blocks, "head:input"]
    section = families.render(out / "families")
    assert len(section.claims) == 3
    assert all(claim.holds or claim.discussion for claim in section.claims)
    page = (out / "families" / "families.md").read_text()
    assert "| Conv1d, every block | 8 |" in page
    assert (out / "families" / "families.png").exists()


def test_the_kept_numbers_give_the_score(out: Path) -> None:
    """Offline, the formula of the score finds as much as the model did."""
    for unit in read_units(out / "families"):
        name = unit.result["family"]
        with np.load(out / "checkpoints" / f"families-{name}-fast-small-seed0.npz") as file:
            kept = dict(file)
        for choice, found in unit.result["choices"].items():
            assert kept[f"layers|{choice}"].tolist() == found["layers"]
            for where in ("near", "far"):
                for kind, expected in found[where]["auroc"].items():
                    if kind != "mean":
                        inside, outside = (
                            score(kept, each, choice) for each in ("test", f"{where}:{kind}")
                        )
                        labels = np.repeat([0, 1], [len(inside), len(outside)])
                        auroc = roc_auc_score(labels, np.concatenate([inside, outside]))
                        # Kept in float32, two scores may change places.
                        assert auroc == pytest.approx(expected, abs=5e-3)


def score(kept: dict[str, Any], name: str, choice: str) -> Any:
    """Half the logarithm of the joint strangeness, less that of the evidence, in float64."""
    u = kept[f"{name}|{choice}"].astype(np.float64)
    logits = kept[f"{name}|logits"].astype(np.float64)
    joint = np.exp(np.log(u[:, 1:]).mean(1)) + 2.0**-10 * u.mean(1)
    evidence = np.log(np.exp(logits).sum(1)) - logits.mean(1)
    return np.log(joint) / 2 - np.log(evidence)


def test_sequences_are_the_same_at_every_call() -> None:
    first, again = (made_sequences(50, 40, 30) for _ in range(2))
    assert first.train.x.shape == (50, 4, 128)
    assert torch.equal(first.train.x, again.train.x)
    assert torch.equal(first.far["shuffled"].x, again.far["shuffled"].x)
    torch.testing.assert_close(first.far["times four"].x, 4 * first.test.x[:30])
    both = zip(first.far["shuffled"].x, first.test.x[:30], strict=True)
    for shuffled, original in both:
        torch.testing.assert_close(shuffled.sort(1).values, original.sort(1).values)


def test_near_sequences_share_the_band_and_far_ones_do_not() -> None:
    data = made_sequences(10, 500, 500)

    def low(x: torch.Tensor) -> float:
        power = torch.fft.rfft(x.double()).abs().square().mean((0, 1))
        return float(power[1:9].sum() / power[1:].sum())

    known = low(data.test.x)
    for near in data.near.values():
        assert low(near.x) == pytest.approx(known, abs=0.01)
    assert low(data.far["other band"].x) < known - 0.03


def test_networks_keep_the_resolution_that_small_images_need() -> None:
    x = torch.rand(2, 3, 32, 32)
    for network, last, shape in (
        (mobilenet(), "features.12", (2, 576, 4, 4)),
        (convnext(), "features.7", (2, 512, 2, 2)),
        (vit(), "encoder.layers.encoder_layer_6", (2, 65, 256)),
    ):
        shapes: list[torch.Size] = []
        network.get_submodule(last).register_forward_hook(
            lambda m, a, h, shapes=shapes: shapes.append(h.shape)
        )
        with torch.no_grad():
            assert network.eval()(x).shape == (2, 10)
        assert shapes == [shape]


def test_blocks_named_by_hand_are_in_the_networks() -> None:
    counts = {}
    for name, family in FAMILIES.items():
        network = family.setting.build()
        counts[name] = len(family.choices(network)["every block"]) - 1
        assert isinstance(network.get_submodule(family.head), torch.nn.Linear)
    expected = {"resnet18": 8, "mobilenet": 13, "convnext": 14, "vit": 7, "conv1d": 6, "lstm": 2}
    assert counts == expected


def test_strongly_changed_images() -> None:
    x = torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8)
    made = strong(x, torch.Generator().manual_seed(0))
    assert made.shape == x.shape
    assert made.dtype == torch.float32
    assert float(made.min()) >= 0
    assert float(made.max()) <= 1
    assert torch.equal(made, strong(x, torch.Generator().manual_seed(0)))
    assert not torch.equal(made, strong(x, torch.Generator().manual_seed(1)))
    grey = torch.full((50, 3, 16, 16), 0.5)
    ones = strong(grey, torch.Generator().manual_seed(0))
    assert float((ones - 0.5).abs().mean()) > 0.02  # brightness alone changes a flat image
    torch.testing.assert_close(ones[:, 0], ones[:, 1])  # no saturation to change


def test_adamw_shrinks_weights_apart_from_the_gradient() -> None:
    network = torch.nn.Linear(2, 2)
    optimizer = TrainingPlan.modern().build_optimizer(network)
    before = network.weight.detach().clone()
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(network.weight.detach(), before * (1 - 1e-3 * 0.05))
