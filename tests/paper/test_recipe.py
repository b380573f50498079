"""The paper's training beside the short one: its small run, and what its page says of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rgpr_paper.experiments import recipe
from rgpr_paper.networks import SETTINGS
from rgpr_paper.recipe_answer import answer
from rgpr_paper.recipe_gap import RECIPES, Gap, gaps_of
from rgpr_paper.section import Section, Table
from rgpr_paper.units import Unit, read_units, write_json

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def out(run_small: Callable[[Iterable[str]], Path]) -> Path:
    return run_small(["recipe"])


def test_both_trainings_are_measured_in_the_same_way(out: Path) -> None:
    units = read_units(out / "recipe")
    assert [unit.name for unit in units] == ["digits-fast-seed0", "digits-paper-seed0"]
    assert [unit.settings["recipe"] for unit in units] == list(RECIPES)
    for unit in units:
        assert tuple(unit.result["methods"]) == recipe.METHODS
        assert unit.result["plan"]["epochs"] == 3
    kept = sorted(path.name for path in (out / "checkpoints").glob("*.safetensors"))
    assert kept == [f"digits-{word}-small-seed0.safetensors" for word in RECIPES]
    # The digits have one plan by both words, so the networks are the same and so are the numbers.
    assert units[0].result["methods"]["MAP"] == units[1].result["methods"]["MAP"]


def test_the_page_of_digits_has_no_gap_to_the_paper(out: Path) -> None:
    page = (out / "recipe" / "recipe.md").read_text()
    assert "Is the higher FPR95 on digits the recipe's, the outliers' or ours?" in page
    assert "The paper printed no numbers of these sets of outliers." in page
    assert "no deep ensemble" in page
    assert "| LLL-RGPR-score |" in page
    assert "| epochs | 3 | 3 | yes |" in page


def test_the_papers_plan_is_that_of_its_text() -> None:
    """Appendix "additional experiments": optimisers, rates, decay, epochs and milestones."""
    for name, optimizer, rate in (("mnist", "adam", 1e-3), ("cifar10", "sgd", 0.1)):
        plan = SETTINGS[name].plans["paper"]
        assert (plan.optimizer, plan.lr, plan.weight_decay) == (optimizer, rate, 5e-4)
        assert (plan.epochs, plan.schedule, plan.milestones) == (100, "milestones", (50, 75, 90))
        assert (plan.momentum, plan.nesterov, plan.bf16) == (0.9, False, False)
        rates = [plan.learning_rate(10 * epoch, 10) for epoch in (49, 50, 75, 90, 99)]
        assert rates == pytest.approx([rate, rate / 10, rate / 100, rate / 1000, rate / 1000])


# -- what is said of numbers ---------------------------------------------------------------------


def gap(fast: float, own: float, stand_in: float, method: str = "MAP") -> Gap:
    """Two sets of outliers with 50 % each in the paper; ours are so many points above it."""
    printed = {"same": 50.0, "other": 50.0}
    ours = {
        "fast": {"same": 50 + fast, "other": 50 + fast},
        "paper": {"same": 50 + own, "other": 50 + stand_in},
    }
    return Gap(method, printed, ours, frozenset({"other"}))


def said(*gaps: Gap) -> str:
    return " ".join(text.text for text in answer("X", {each.method: each for each in gaps}))


def test_the_shares_of_a_gap_add_up() -> None:
    found = gap(20, 8, 14)
    assert found.left("fast") == pytest.approx(20)
    assert found.left("paper") == pytest.approx(11)
    assert found.closed() == pytest.approx(9)
    assert found.share("paper", found.own) + found.share("paper", found.others) == pytest.approx(11)
    assert found.each("paper", found.own) == pytest.approx(8)


def test_a_gap_that_the_recipe_closes_in_part() -> None:
    text = said(gap(20, 8, 14))
    assert "70.0 % with the short recipe, 61.0 % with the paper's and 50.0 % in the" in text
    assert "closes 9.0 of 20.0 points of the gap, 45%." in text
    assert "The +11.0 points" in text
    assert "+4.0 are on sets with the paper's own images (same)" in text
    assert "+7.0 on stand-ins (other)." in text
    assert "exceed that, 3.0 points of the mean" in text
    assert "The 4.0 points on the same images with the same recipe are neither" in text
    assert "cannot tell these apart" in text


def test_a_gap_that_the_recipe_does_not_close() -> None:
    text = said(gap(10, 16, 12))
    assert "closes nothing of the gap of 10.0 points; it is 4.0 points wider." in text
    assert "stand-ins are no further above the paper's numbers than its own sets" in text


def test_a_gap_that_the_recipe_closes_whole() -> None:
    text = said(gap(10, 0, 0))
    assert "closes 10.0 of 10.0 points of the gap, 100%." in text
    assert "MAP is not above the printed values: +0.0 points" in text
    assert "cannot tell these apart" not in text
    assert "more than closes the gap of 10.0 points: MAP is 4.0 points below" in said(
        gap(10, -4, -4)
    )


def test_no_gap_at_all() -> None:
    text = said(gap(0.2, -3, -3))
    assert "it is level with the paper's already, so there is no higher FPR95" in text
    assert "with the paper's it is 3.0 points below the paper's." in text


def test_the_set_that_adds_most_is_named() -> None:
    printed = {"noise": 20.0, "images": 50.0, "objects": 50.0}
    ours = {word: {"noise": 80.0, "images": 49.0, "objects": 47.0} for word in RECIPES}
    text = said(Gap("MAP", printed, ours, frozenset()))
    assert "noise alone adds +20.0: MAP has 80.0 % and the paper 20.0 %." in text
    assert "The others (images, objects) are -2.0 points from the printed values" in text


def test_what_base_and_residual_add_to_maps_gap() -> None:
    gaps = gap(9, 9, 9), gap(12, 12, 12, "LLL"), gap(17, 17, 17, "LLL-RGPR-OOD")
    text = said(*gaps)
    assert "LLL-RGPR-OOD: of its +17.0 points, +9.0 are MAP's, +3.0 come with the base" in text
    assert "+5.0 with the residual. So the residual takes 5.0 points less" in text
    text = said(*gaps[:2], gap(8, 8, 8, "LLL-RGPR-OOD"))
    assert "-4.0 with the residual. So the residual takes from the base at least" in text


# -- pages of real sets, made of stored numbers ---------------------------------------------------


def stored(name: str) -> list[Unit]:
    """Stored units of the experiment `detection`, and better ones as those of the paper's plan."""
    units = []
    for found in read_units(RESULTS / "detection"):
        if found.result["set"] != name:
            continue
        for word, factor in (("fast", 1.0), ("paper", 0.9)):
            result = deepcopy(found.result) | {"recipe": word}
            result["plan"] = asdict(SETTINGS[name].plans[word])
            for measured in result["methods"].values():
                measured["fpr95"] = {k: factor * v for k, v in measured["fpr95"].items()}
            unit = f"{name}-{word}-seed{result['seed']}"
            units.append(replace(found, result=result, name=unit))
    return units


def shown(units: list[Unit], folder: Path) -> Section:
    for unit in units:
        content = {"settings": unit.settings, "about": unit.about, "result": unit.result}
        write_json(folder / f"{unit.name}.json", content)
    return recipe.render(folder)


def test_the_page_of_cifar10(tmp_path: Path) -> None:
    units = stored("cifar10")
    section = shown(units, tmp_path)
    texts = [getattr(block, "text", "") for block in section.blocks]
    assert texts[1].startswith("Is the higher FPR95 on CIFAR10 the recipe's")
    tables = {block.head[0]: block for block in section.blocks if isinstance(block, Table)}
    rates = tables["FPR95, CIFAR10"]
    assert "SVHN (stand-in)" in rates.head
    assert "LSUN (stand-in)" in rates.head
    assert "CIFAR100" in rates.head
    assert all("(paper: " in cell for cell in rates.rows[0][1:])
    (row,) = (row for row in tables["CIFAR10: FPR95"].rows if row[0] == "MAP")
    by_recipe = {word: [u for u in units if u.result["recipe"] == word] for word in RECIPES}
    found = gaps_of("CIFAR10", by_recipe)["MAP"]
    assert row[1] == "43.0"
    assert row[2:5] == [
        f"{v:+.1f}" for v in (found.left("fast"), found.left("paper"), found.closed())
    ]
    assert float(row[5]) + float(row[6]) == pytest.approx(found.left("paper"), abs=0.11)
    assert {claim.statement.split(":")[0] for claim in section.claims} == {
        "CIFAR10",
        "CIFAR10, the paper's training",
    }
    assert all(claim.holds or claim.discussion for claim in section.claims)


def test_a_page_with_one_training_says_so(tmp_path: Path) -> None:
    units = [unit for unit in stored("mnist") if unit.result["recipe"] == "fast"]
    section = shown(units, tmp_path)
    texts = [getattr(block, "text", "") for block in section.blocks]
    assert "Gap: MNIST was not run by the recipe `paper`." in texts
    assert section.claims == []
    assert any(isinstance(block, Table) for block in section.blocks)
