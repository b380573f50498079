"""Other forms of the score: the small run, distances by hand, and which goals a form reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rgpr.metrics import auroc, fpr95
from rgpr_paper.context import Context
from rgpr_paper.experiments import score_forms
from rgpr_paper.goals import GOALS, Goal
from rgpr_paper.outputs import Outputs
from rgpr_paper.rivals import Bench
from rgpr_paper.score_forms import FORMS, PRESENT, Parts
from rgpr_paper.score_forms_page import page
from rgpr_paper.section import Table, Text
from rgpr_paper.subject import Subject
from rgpr_paper.units import Unit, read_units

CLASSES, WIDTH = 4, 12


@pytest.fixture(scope="module")
def out(run_small: Callable[[Iterable[str]], Path]) -> Path:
    return run_small(["score-forms"])


@pytest.fixture(scope="module")
def unit(out: Path) -> Unit:
    (found,) = read_units(out / "score-forms")
    return found


# -- the small run -------------------------------------------------------------------------------


def test_the_present_form_is_the_score(out: Path, unit: Unit) -> None:
    """On every image, up to rounding; so its means are those of the score itself."""
    subject = Subject.of(Context(out, small=True, seeds=(0,)), "digits", 0)
    model = subject.model
    assert model.residual is not None
    train = subject.outputs(subject.competing.train)
    parts = Parts(subject.bench(train), model.residual)
    test = torch.cat([model.score(x) for x, _ in subject.competing.test])
    assert torch.allclose(FORMS[PRESENT](parts, subject.found["test"]), test, rtol=1e-6, atol=1e-6)
    outside = {
        kind: torch.cat([model.score(x) for x in loader])
        for kind, loader in subject.images.items()
        if kind != "test"
    }
    assert subject.where == {"near": ["mirrored"], "far": ["inverted", "UniformNoise"]}
    for where, kinds in {**subject.where, "all": list(outside)}.items():
        for metric, value in (("auroc", auroc), ("fpr95", fpr95)):
            expected = np.mean([value(-test, -outside[kind]) for kind in kinds])
            assert unit.result["forms"][PRESENT][where][metric] == pytest.approx(expected)


def test_every_form_is_measured(unit: Unit) -> None:
    forms = unit.result["forms"]
    assert list(forms) == list(FORMS) == unit.settings["forms"]
    for name, values in forms.items():
        assert set(values) == {"near", "far", "all"}, (name, values)
    # Each form differs from the library's somewhere.
    assert all(values != forms[PRESENT] for name, values in forms.items() if name != PRESENT)


def test_the_page_of_the_small_run(out: Path) -> None:
    text = (out / "score-forms" / "score-forms.md").read_text()
    assert f"| → {PRESENT} |" in text
    assert "These tables chose nothing" in text
    assert "No goal was set for digits." in text
    assert "command below is that of `openood`" not in text


def test_a_form_that_fails_is_kept_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(parts: Parts, found: Outputs) -> Any:
        raise ValueError("no")

    monkeypatch.setitem(FORMS, "another", fails)
    monkeypatch.setattr(score_forms, "FORMS", {"another": fails})
    subject: Any = SimpleNamespace(where={"near": ["x"]}, found={"test": None, "x": None})
    nothing: Any = None
    assert score_forms._measured(nothing, subject) == {"another": {"error": "ValueError: no"}}


# -- distances -----------------------------------------------------------------------------------


def test_relative_and_normalised_distances_by_hand() -> None:
    """The last layer's distances against numpy, for made features of four classes."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % CLASSES
    means = 2 * torch.rand(CLASSES, WIDTH, generator=generator)
    features = (means[labels] + 0.5 * torch.randn(400, WIDTH, generator=generator)).relu()
    queries = 2 * torch.rand(50, WIDTH, generator=generator)
    u = torch.rand(400, 3, generator=generator).double() + 0.5
    seen = Outputs(features, torch.zeros(400, CLASSES).double(), u, labels)
    residual: Any = SimpleNamespace(
        typical=torch.tensor([1.0, 1.0, 2.0]).double(),
        strangeness=lambda u: (u / torch.tensor([1.0, 1.0, 2.0])).prod(1) ** (1 / 3),
    )
    competing: Any = SimpleNamespace(classes=CLASSES, context=SimpleNamespace(device="cpu"))
    parts = Parts(Bench(competing, nn.Linear(WIDTH, CLASSES), seen, seen), residual)
    asked = Outputs(queries, torch.zeros(len(queries), CLASSES).double(), u[: len(queries)], None)

    def nearest(h: np.ndarray, x: np.ndarray, shrinkage: float) -> np.ndarray:
        means = np.stack([h[y == c].mean(0) for c in range(CLASSES)])
        inverse = np.linalg.inv(shrunk((h - means[y]).T @ (h - means[y]) / len(h), shrinkage))
        return np.min([np.einsum("nd,de,ne->n", x - m, inverse, x - m) for m in means], axis=0)

    def shrunk(covariance: np.ndarray, shrinkage: float) -> np.ndarray:
        scale = np.trace(covariance) / len(covariance)
        return (1 - shrinkage) * covariance + shrinkage * scale * np.eye(len(covariance))

    y, h, x = labels.numpy(), features.double().numpy(), queries.double().numpy()
    centred, covariance = x - h.mean(0), shrunk(np.cov(h.T, bias=True), 1e-3)
    overall = np.einsum("nd,de,ne->n", centred, np.linalg.inv(covariance), centred)
    expected = 1.5 * (np.log(nearest(h, x, 1e-3)) - np.log(overall))
    assert np.allclose(parts.log_relative(asked).numpy(), expected, rtol=1e-4, atol=1e-4)

    length = np.linalg.norm(h, axis=1, keepdims=True)
    of_x = nearest(h / length, x / np.linalg.norm(x, axis=1, keepdims=True), 1e-6)
    median = np.sort(nearest(h / length, h / length, 1e-6))[199]  # torch takes the lower middle
    first = u[: len(queries), :2].prod(1).numpy()
    expected = np.log(first * (of_x / median) ** 1.5) / 3
    assert np.allclose(parts.log_normalised(asked).numpy(), expected, rtol=1e-3, atol=1e-3)
    last = np.log(u[: len(queries), 2].numpy() / 2)
    assert np.allclose(parts.log_last(asked).numpy(), last)


# -- goals ---------------------------------------------------------------------------------------


def made(name: str, seed: int = 0, command: str = "score-forms", **values: Any) -> Unit:
    """A unit whose forms have one AUROC and one FPR95 everywhere, or an error."""
    forms = {
        PRESENT if form == "present" else form: {"error": value}
        if isinstance(value, str)
        else {where: dict(zip(("auroc", "fpr95"), value, strict=True)) for where in _WHERE}
        for form, value in values.items()
    }
    result = {"set": name, "seed": seed, "accuracy": 0.9, "forms": forms}
    about = {"versions": {}, "date": "today", "hardware": "a CPU"}
    about["command"] = f"rgpr paper run {command} --seeds {seed}"
    return Unit(f"{name}-seed{seed}", {"small": False}, about, result, {})


_WHERE = ("near", "far", "all")


def shown(*units: Unit) -> tuple[dict[str, Table], list[str]]:
    """The tables by their first cell, and all paragraphs."""
    blocks = page(units).blocks
    tables = {block.head[0]: block for block in blocks if isinstance(block, Table)}
    return tables, [block.text for block in blocks if isinstance(block, Text)]


def test_goals_say_what_the_present_and_the_best_form_have() -> None:
    values = {"present": (0.78, 0.28), "better": (0.79, 0.28), "best": (0.8, 0.26)}
    tables, texts = shown(made("cifar100", **values), made("cifar100", 1, **values))
    assert list(tables) == ["CIFAR100: form", "CIFAR100: goal"]
    rows = tables["CIFAR100: form"].rows
    assert [row[0] for row in rows] == [f"→ {PRESENT}", "better", "best"]
    assert rows[1][1] == "79.0 ± 0.0"
    assert [list(row) for row in tables["CIFAR100: goal"].rows] == [
        ["AUROC on near outliers of at least 78.7 %", "78.0", "no", "best", "80.0", "2 of 3"],
        ["FPR95 on far outliers of at most 27 %", "28.0", "no", "best", "26.0", "1 of 3"],
    ]
    assert "CIFAR100: all goals are reached at once by `best`." in texts


def test_where_no_form_reaches_all_goals_the_page_says_so() -> None:
    _, texts = shown(made("cifar100", present=(0.78, 0.26), other=(0.8, 0.3)))
    assert "No form reaches all goals of CIFAR100 at once." in texts
    tables, texts = shown(made("svhn", present=(0.9, 0.05), other=(0.9, 0.09)))
    assert tables["SVHN: goal"].rows[0][1:3] == ["5.0", "yes"]
    assert f"SVHN: the goal is reached by `{PRESENT}`." in texts


def test_a_form_that_failed_is_in_no_table_and_named() -> None:
    both = made("svhn", present=(0.9, 0.05), other=(0.9, 0.01))
    tables, texts = shown(both, made("svhn", 1, present=(0.9, 0.05), other="ValueError: no"))
    assert [row[0] for row in tables["SVHN: form"].rows] == [f"→ {PRESENT}"]
    assert "`other` failed with seed 1: ValueError: no." in texts
    tables, _ = shown(made("svhn", present="ValueError: no", other=(0.9, 0.01)))
    assert tables["SVHN: goal"].rows[0][1:4] == ["-", "-", "other"]
    tables, _ = shown(made("svhn", present="ValueError: no"))
    assert not tables["SVHN: form"].rows
    assert "SVHN: goal" not in tables


def test_units_of_another_experiments_run_are_told_apart() -> None:
    for command, count in (("score-forms", 0), ("openood", 1)):
        _, texts = shown(made("mnist", command=command, present=(0.9, 0.1)))
        assert sum("measured within its run" in text for text in texts) == count


def test_a_goal_is_reached_at_its_bound() -> None:
    area, rate = Goal("near", "auroc", 78.7), Goal("far", "fpr95", 27.0)
    assert [area.reached(found) for found in (78.6, 78.7, 78.8)] == [False, True, True]
    assert [rate.reached(found) for found in (26.9, 27.0, 27.1)] == [True, True, False]
    assert {goal.where for goals in GOALS.values() for goal in goals} <= set(_WHERE)
