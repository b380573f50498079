from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rgpr_paper.context import Context
from rgpr_paper.data import MissingDataError
from rgpr_paper.hardware import processor
from rgpr_paper.units import _finite, gaps, read_units, run_units


def test_a_unit_is_run_once_and_read_back(tmp_path: Path) -> None:
    context = Context(tmp_path, seeds=(3,))
    calls = []

    def unit() -> dict[str, Any]:
        calls.append(1)
        return {"value": 0.5, "loss": float("inf"), "arrays": {"x": torch.arange(3.0)}}

    for _ in range(2):
        run_units(context, "made", {"seed3": unit}, recipe="fast")
    assert calls == [1]
    (found,) = read_units(tmp_path / "made")
    assert found.result == {"value": 0.5, "loss": None}
    assert torch.equal(found.arrays["x"], torch.arange(3.0))
    assert found.settings == {"small": False, "recipe": "fast"}
    assert {"torch", "numpy", "rgpr", "python"} <= set(found.about["versions"])
    assert processor() in found.about["hardware"]
    assert found.about["seconds"] >= 0
    assert found.about["command"].startswith("rgpr paper run made --device cpu --seeds 3")
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == [
        "seed3.json",
        "seed3.safetensors",
    ]


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    made: list[str] = []

    def unit(name: str, broken: bool) -> Callable[[], dict[str, Any]]:
        def make() -> dict[str, Any]:
            if broken:
                raise KeyboardInterrupt
            made.append(name)
            return {"name": name}

        return make

    names = ["seed0", "seed1", "seed10", "seed2"]
    context = Context(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_units(context, "made", {name: unit(name, name == "seed10") for name in names})
    assert made == ["seed0", "seed1"]
    run_units(context, "made", {name: unit(name, False) for name in names})
    assert made == ["seed0", "seed1", "seed10", "seed2"]
    # In the order of their numbers, not of their letters.
    found = [unit.name for unit in read_units(tmp_path / "made")]
    assert found == ["seed0", "seed1", "seed2", "seed10"]


def test_other_settings_are_refused(tmp_path: Path) -> None:
    units: dict[str, Callable[[], dict[str, Any]]] = {"only": lambda: {"value": 1}}
    run_units(Context(tmp_path), "made", units, recipe="fast", sizes=(1, 2))
    run_units(Context(tmp_path), "made", units, recipe="fast", sizes=(1, 2))
    with pytest.raises(ValueError, match="recipe was 'fast' and is 'paper'"):
        run_units(Context(tmp_path), "made", units, recipe="paper", sizes=(1, 2))
    with pytest.raises(ValueError, match="small was False and is True"):
        run_units(Context(tmp_path, small=True), "made", units, recipe="fast", sizes=(1, 2))
    with pytest.raises(ValueError, match="recipe='slow'"):
        Context(tmp_path, recipe="slow")
    with pytest.raises(ValueError, match="no seeds"):
        Context(tmp_path, seeds=())


def test_missing_data_leave_a_gap_until_they_are_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> dict[str, Any]:
        raise MissingDataError("SVHN (train)", "/somewhere/svhn.npz", "Get it by `magic`.")

    context, folder = Context(tmp_path), tmp_path / "made"
    run_units(context, "made", {"svhn": missing, "mnist": lambda: {"value": 1}})
    assert [unit.name for unit in read_units(folder)] == ["mnist"]
    assert gaps(folder) == ["svhn: SVHN (train) is missing. Get it by `magic`."]
    assert "looked for /somewhere/svhn.npz" in capsys.readouterr().err
    # Another set's run leaves the gap alone; the set's own fills it.
    run_units(context, "made", {"mnist": lambda: {"value": 1}})
    assert len(gaps(folder)) == 1
    run_units(context, "made", {"svhn": lambda: {"value": 2}})
    assert gaps(folder) == []
    assert [unit.name for unit in read_units(folder)] == ["mnist", "svhn"]


def test_the_sets_and_the_command_of_a_context(tmp_path: Path) -> None:
    assert Context(tmp_path).image_sets("mnist", "cifar10") == ("mnist", "cifar10")
    assert Context(tmp_path, small=True).image_sets("mnist") == ("digits",)
    chosen = Context(tmp_path / "res", data=tmp_path, small=True, sets=("mnist",))
    assert chosen.image_sets("cifar10") == ("mnist",)
    assert chosen.command("detection") == (
        "rgpr paper run detection --small --data ROOT --device cpu --seeds 0 1 2 --recipe fast "
        "--sets mnist --out res"
    )


values = st.recursive(
    st.floats() | st.integers() | st.text() | st.none() | st.booleans(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(values)
def test_what_is_written_is_strict_json(content: Any) -> None:
    """No infinity and no NaN, and nothing else is changed."""
    written = json.loads(json.dumps(_finite(content), allow_nan=False))

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, dict):
            return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
        if isinstance(a, list):
            return len(a) == len(b) and all(map(same, a, b))
        finite = not isinstance(a, float) or abs(a) < float("inf")
        return bool(a == b) if finite else b is None

    assert same(content, written)
