from __future__ import annotations

from typing import Any

from rgpr_paper.comparison import equal_to_map
from rgpr_paper.section import Text
from rgpr_paper.units import Unit


def unit(name: str, *choices: dict[str, Any]) -> Unit:
    """A unit with the records of some networks; one without any is of an earlier version."""
    result: dict[str, Any] = {"set": name}
    if choices:
        result["choices"] = list(choices)
    return Unit(name, {}, {}, result, {})


def lll(precision: float, variance: float) -> dict[str, Any]:
    record = {"precision": precision, "variance": variance, "equals_map": variance <= 1e-4}
    return {"LLL": record}


def test_where_lll_equals_map_is_said_once_for_each_network() -> None:
    chosen = lll(1e7, 3e-5), lll(2e7, 8e-5), lll(30.0, 2.0)
    (said,) = equal_to_map([unit("mnist", *chosen), unit("mnist", *chosen), unit("cifar10")])
    assert isinstance(said, Text)
    assert said.text.startswith("MNIST: LLL equals MAP over 2 of 3 networks.")
    assert "a prior precision of 1e+07 or more" in said.text
    assert "no logit of theirs has a variance above 8e-05" in said.text


def test_nothing_is_said_without_a_record_or_with_variance() -> None:
    assert equal_to_map([unit("mnist"), unit("mnist", {}), unit("mnist", lll(30.0, 2.0))]) == []
