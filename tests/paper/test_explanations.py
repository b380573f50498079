"""Explanations that stand beside numbers are there only where the numbers say so."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

from rgpr_paper.experiments import natural_images, tabular, two_answers
from rgpr_paper.methods import OUTLIERS_TO_TUNE
from rgpr_paper.tabular import page
from rgpr_paper.units import Unit, read_units

RESULTS = Path(__file__).parents[2] / "results"


def changed(experiment: str, name: str, change: Callable[[dict[str, Any]], None]) -> list[Unit]:
    """The stored units of a set, each with a change to its result."""
    units = [u for u in read_units(RESULTS / experiment) if u.result["set"] == name]
    units = deepcopy(units)
    for unit in units:
        change(unit.result)
    return units


def test_a_set_of_ten_classes_is_not_explained_by_a_hundred() -> None:
    def worse(result: dict[str, Any]) -> None:
        result["outliers"]["score"]["near"]["auroc"] = {"CIFAR100": 0.5, "mean": 0.6}

    claim = two_answers._claims("cifar10", changed("two-answers", "cifar10", worse))[-1]
    assert not claim.holds
    assert "hundred" not in claim.discussion
    assert "CIFAR100 50.0 % against" in claim.discussion


def test_natural_images_are_counted_and_named_as_the_units_have_them() -> None:
    units = changed("natural-images", "mnist", lambda result: None)
    failing = next(c for c in natural_images._claims("MNIST", units) if not c.holds)
    assert f"{OUTLIERS_TO_TUNE} images" in failing.discussion
    assert "Tiny ImageNet, in place of ImageNet32" in failing.discussion
    units = changed("natural-images", "mnist", lambda result: result["notes"].clear())
    failing = next(c for c in natural_images._claims("MNIST", units) if not c.holds)
    assert "Tiny ImageNet" not in failing.discussion


def sets_of(task: str, change: Callable[[dict[str, Any]], None]) -> page.Sets:
    units = deepcopy(page.sets_of(read_units(RESULTS / "tabular"), task))
    for unit in page.units_of(units):
        change(unit.result)
    return units


def test_shuffled_rows_explain_a_loss_only_where_they_make_it() -> None:
    def shifted_instead(result: dict[str, Any]) -> None:
        kinds = result["kinds"]
        kinds["shuffled"]["score"]["auroc"] = kinds["shuffled"]["Mahalanobis"]["auroc"]
        kinds["shifted"]["score"]["auroc"] = 0.5

    claim = tabular._level(sets_of("regression", lambda result: None), "regression")
    assert "Shuffling leaves" in claim.discussion
    claim = tabular._level(sets_of("regression", shifted_instead), "regression")
    assert not claim.holds
    assert "Shuffling" not in claim.discussion


def test_evidence_explains_a_loss_only_where_the_network_is_surer() -> None:
    def unsure(result: dict[str, Any]) -> None:
        for kind in result["kinds"].values():
            kind["confidence"]["auroc"] = 0.9

    (text,) = tabular._evidence(sets_of("classification", lambda result: None))
    assert "wine (scaled, noisy), breast cancer (scaled, noisy)" in text.text
    assert tabular._evidence(sets_of("classification", unsure)) == []


def test_a_broken_budget_names_the_sets_and_their_rows() -> None:
    claim = tabular._budget(sets_of("classification", lambda result: None))
    assert "iris with 30 validation and 50 test rows" in claim.discussion
    assert "wine" not in claim.discussion
