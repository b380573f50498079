"""What tuning does to a trained model, what it keeps, and what it refuses."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import rgpr
from networks import Task, convolutional, mlp
from rgpr import noise
from rgpr._network.reservoir import Reservoir, row_keys
from rgpr.answers.examples import Examples, Parameters
from rgpr.metrics import accuracy, confidence, ece, nll
from rgpr.tuning.budget import largest_weight
from rgpr.tuning.optimize import Optimum

quiet = pytest.mark.filterwarnings("ignore:sigma2")


@pytest.fixture
def model(digits: Task) -> rgpr.RGPR:
    return rgpr.RGPR(digits.network, residual="paper").fit(digits.loader())


@pytest.fixture
def validation(digits: Task) -> DataLoader[Any]:
    return DataLoader(TensorDataset(digits.x[:250], digits.y[:250]), batch_size=64)


def summary(model: rgpr.RGPR, digits: Task, link: str = "probit") -> dict[str, float]:
    x, y = digits.x[250:], digits.y[250:]
    noisy = noise.uniform(x, generator=torch.Generator().manual_seed(7))

    @torch.no_grad()
    def predict(x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return model(x, link_approx=link, n_samples=200, generator=generator)

    return {
        "accuracy": accuracy(predict(x), y),
        "noise": float(confidence(predict(noisy)).mean()),
        "far": float(confidence(predict(50 * x)).mean()),
    }


@quiet
@pytest.mark.parametrize("link_approx", ["probit", "mc"])
def test_tuning_for_outliers_helps_on_digits(
    model: rgpr.RGPR, digits: Task, validation: DataLoader[Any], link_approx: str
) -> None:
    untuned = summary(model, digits, link_approx)
    model.sigma2 = 0
    base = summary(model, digits, link_approx)
    model.sigma2 = 1e-4
    result = model.tune(validation, "ood", link_approx=link_approx)
    tuned = summary(model, digits, link_approx)
    assert tuned["accuracy"] >= base["accuracy"] - (0.02 if link_approx == "mc" else 0)
    # Noise is already far for the untuned input layer; outliers that are near pull less at it.
    assert tuned["noise"] < 0.25 < base["noise"] - 0.3
    assert tuned["far"] < 0.3 < untuned["far"] < base["far"]
    assert result.seen == (250, 250)


@quiet
@pytest.mark.parametrize("temperature", [False, True])
@pytest.mark.parametrize("metric", ["nll", "ece"])
def test_the_budget_is_kept(
    model: rgpr.RGPR, digits: Task, validation: DataLoader[Any], metric: str, temperature: bool
) -> None:
    model.sigma2 = 0
    base = summary(model, digits)
    measure = {"nll": nll, "ece": ece}[metric]
    x, y = digits.x[:250], digits.y[:250]
    with torch.no_grad():
        before = measure(model(x), y)
    increase = 0.01
    options = {f"max_{metric}_increase": increase, "temperature": temperature}
    result = model.tune(validation, "ood", **options)
    with torch.no_grad():
        after = measure(model(x), y)
    assert after <= before + increase + 1e-5
    assert after == pytest.approx(result.metrics[f"validation {metric.upper()}"][1], abs=1e-5)
    tuned = summary(model, digits)
    assert tuned["accuracy"] == base["accuracy"]
    assert tuned["noise"] < base["noise"] - 0.2
    assert tuned["far"] < base["far"] - 0.2
    # The weight is the largest: twice as much is beyond the budget.
    assert result.ood_weight is not None
    assert any(t.increase > increase for t in result.trials)
    above = [t.weight for t in result.trials if t.increase > increase]
    assert (
        result.ood_weight < min(w for w in above if w > result.ood_weight) < 2 * result.ood_weight
    )


def test_a_budget_that_cannot_be_kept_leaves_the_base(digits: Task) -> None:
    """Labels that are the network's own predictions: every bit of variance costs."""
    model = rgpr.RGPR(digits.network, residual="paper").fit(digits.loader())
    with torch.no_grad():
        sure = model(digits.x).amax(1) > 0.999
    x = digits.x[sure]
    y = digits.network(x).argmax(1)
    with pytest.warns(UserWarning, match="no weight of the outliers"):
        model.tune([(x, y)], "ood", ood=[x], max_ece_increase=0.0)
    with torch.no_grad():
        base = ece(digits.network(x).softmax(1), y)
        assert ece(model(x), y) <= base + 1e-4  # what the input's floor costs
    assert float(model.sigma2[0]) > 0


@quiet
def test_everything_but_the_scales_stays(model: rgpr.RGPR, validation: DataLoader[Any]) -> None:
    network = model.posterior.network
    network.train()
    before = copy.deepcopy(model.state_dict())
    model.tune(validation, "ood")
    after = model.state_dict()
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"residual.sigma2"}
    assert network.training
    assert not any(m._forward_hooks for m in network.modules())
    model.tune(validation, "ood", temperature=True)
    assert not torch.equal(model.state_dict()["_temperature"], before["_temperature"])
    network.eval()


@quiet
def test_under_inference_mode(model: rgpr.RGPR, validation: DataLoader[Any]) -> None:
    with torch.inference_mode():
        model.tune(validation)
    assert not model.sigma2.is_inference()


def endless(x: Tensor) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in itertools.count():
        yield noise.uniform(x, generator=generator)


@quiet
def test_outliers_from_anywhere(model: rgpr.RGPR, validation: DataLoader[Any]) -> None:
    x = torch.zeros(40, 64)
    from_generator = model.tune(validation, "ood", ood=endless(x))
    assert from_generator.seen == (250, 280)  # the first batch that fills it
    loader = noise.NoiseLoader(noise.far_away, validation, alpha=3.0)
    assert model.tune(validation, "ood", ood=loader).seen == (250, 250)
    alone = model.tune(validation, "ood", ood=[(x + 1, "labels are not looked at")])
    assert alone.seen == (250, 40)
    far = model.tune(validation, "ood", ood=[1e15 * torch.rand(40, 64)])
    assert far.metrics["mean confidence at outliers"][1] < 0.11


@quiet
def test_images_get_smoothed_noise() -> None:
    x, y = torch.rand(60, 2, 8, 8), torch.randint(3, (60,))
    model = rgpr.RGPR(convolutional(), residual="paper").fit([x])
    default = model.tune([(x, y)], "ood", seed=4)
    model.sigma2 = 1.0
    own = noise.NoiseLoader(noise.like_data, [x], seed=4)
    assert model.tune([(x, y)], "ood", ood=own, seed=4).after == pytest.approx(default.after)


@quiet
def test_large_sets_are_thinned(model: rgpr.RGPR, digits: Task) -> None:
    loader = [(digits.x + 1e-3 * i, digits.y) for i in range(40)]
    full = model.tune(loader, max_examples=None)
    thinned = model.tune(loader, max_examples=2000)
    assert full.examples == (40 * len(digits.x), 0)
    assert thinned.examples == (2000, 0)
    assert thinned.seen == full.seen == full.examples
    assert "2000 of" in str(thinned)
    assert thinned.after == pytest.approx(full.after, abs=0.05)


@quiet
def test_memory_is_bounded_whatever_is_asked(
    model: rgpr.RGPR, digits: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rgpr.answers.examples._BYTES", 100 * (20 + 3 + 1) * 8)
    assert model.tune([(digits.x, digits.y)], max_examples=None).examples == (100, 0)


def test_evaluating_in_parts_changes_nothing(
    model: rgpr.RGPR, digits: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = model.tune([(digits.x, digits.y)], "ood")
    start = model.sigma2
    monkeypatch.setattr("rgpr.answers.examples._CHUNK", 10 * 37)
    model.sigma2 = start
    parts = model.tune([(digits.x, digits.y)], "ood")
    assert parts.after == pytest.approx(whole.after, abs=1e-6)


def test_a_reservoir_is_even_and_aligned() -> None:
    hits = torch.zeros(100)
    for offset in range(300):
        kept = Reservoir(10)
        rows = torch.stack([torch.arange(100) / 7, torch.full((100,), float(offset))], 1)
        for part in rows.split(7):
            kept.add(part, part[:, 0], 2 * part[:, 0])
        first, second = kept.items
        assert len(first) == len(set(first.tolist())) == 10
        assert kept.seen == 100
        assert torch.equal(second, 2 * first)
        hits[(first * 7).round().long()] += 1
    assert hits.mean() == 30
    assert (hits - 30).abs().max() < 4.5 * (300 * 0.1 * 0.9) ** 0.5
    few = Reservoir(10)
    few.add(torch.arange(4.0)[:, None])
    assert sorted(few.items[0][:, 0].tolist()) == [0, 1, 2, 3]
    assert Reservoir(3).items == ()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_reservoir_does_not_see_batches_nor_shards(dtype: torch.dtype) -> None:
    x = torch.randn(500, 3000).to(dtype)
    whole, parts, left, right = (Reservoir(20) for _ in range(4))
    whole.add(x)
    for part in x[torch.randperm(500)].split(3):
        parts.add(part)
    left.add(x[:17])
    for part in x[17:].split(100):
        right.add(part)
    right.merge(left.state)
    for other in (parts, right):
        assert torch.equal(other.items[0], whole.items[0])
        assert other.seen == whole.seen == 500


@pytest.mark.parametrize("width", [3, 200, 5000, 100_000])
def test_keys_are_of_the_bits_and_tell_rows_apart(width: int) -> None:
    count = min(width, 2000)
    one_hot = torch.zeros(count, width).scatter_(1, torch.randperm(width)[:count, None], 1.0)
    assert len(row_keys(one_hot).unique()) == count
    x = torch.randn(50 * width + 1)[1:].view(50, width)  # not where words begin
    assert x.storage_offset() == 1
    assert torch.equal(row_keys(x), row_keys(x.clone()))
    assert torch.equal(row_keys(x)[7:9], row_keys(x[7:9]))
    assert len(torch.cat([row_keys(x), row_keys(x.flip(1)), row_keys(-x)]).unique()) == 150


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_keys_of_slices(dtype: torch.dtype) -> None:
    x = torch.randn(10, 5).to(dtype)
    for part in (x[:1, :4], x[:0, :4], x[:3, :0], x[3:4], x[::2, 1:], x.T[1:2]):
        assert torch.equal(
            row_keys(part), row_keys(part.clone(memory_format=torch.contiguous_format))
        )


def test_the_cache_predicts_what_the_model_predicts(model: rgpr.RGPR, digits: Task) -> None:
    model.temperature = 1.7
    result = model.tune([(digits.x, digits.y)])
    p = model(digits.x)
    assert result.metrics["validation NLL"][1] == pytest.approx(nll(p, digits.y), abs=1e-5)
    assert result.temperature == pytest.approx(1.7)


@pytest.mark.parametrize("link_approx", ["probit", "mc", "bridge"])
def test_temperature_cannot_touch_the_limit_nor_the_class(
    model: rgpr.RGPR, digits: Task, link_approx: str
) -> None:
    options = {"link_approx": link_approx, "n_samples": 2000}
    x = digits.x
    plain = model(x, generator=torch.Generator().manual_seed(0), **options)
    model.temperature = 0.5
    sharp = model(x, generator=torch.Generator().manual_seed(0), **options)
    assert (plain.argmax(1) == sharp.argmax(1)).float().mean() > 0.99
    assert sharp.amax(1).mean() > plain.amax(1).mean()
    far = model(1e12 * x, generator=torch.Generator().manual_seed(0), **options)
    assert (far - 0.1).abs().max() < (0.05 if link_approx == "mc" else 1e-3)
    samples = model.predictive_samples(x, 2000, torch.Generator().manual_seed(0))
    if link_approx == "mc":
        torch.testing.assert_close(samples.softmax(-1).mean(0).float(), sharp)


def test_temperature_is_saved_and_keeps_its_digits(tmp_path: Path) -> None:
    x = torch.randn(30, 4)
    model = rgpr.RGPR(mlp()).fit([x])
    model.temperature = 1 / 3
    model.save(tmp_path / "m.safetensors")
    again = rgpr.load(tmp_path / "m.safetensors", mlp())
    assert torch.equal(again(x), model(x))
    assert float(again.temperature) == 1 / 3
    assert float(model.half().temperature) == 1 / 3
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="temperature = "):
            model.temperature = bad


def test_regression_samples_have_no_temperature() -> None:
    x = torch.randn(30, 4)
    model = rgpr.RGPR(mlp(), likelihood="regression").fit([x])
    before = model.predictive_samples(x, 5, torch.Generator().manual_seed(0))
    model.temperature = 3.0
    assert torch.equal(model.predictive_samples(x, 5, torch.Generator().manual_seed(0)), before)


def test_warnings_say_what_ran_away(model: rgpr.RGPR, digits: Task) -> None:
    with torch.no_grad():
        right = digits.network(digits.x).argmax(1)
    with pytest.warns(UserWarning, match=r"input ran towards zero.*no prediction at the data"):
        result = model.tune([(digits.x, right)])
    assert any("ran to zero for ['1', '3']" in warning for warning in result.warnings)
    assert float(model.sigma2[0]) > 0
    p = model(1e9 * digits.x)
    assert (p - 0.1).abs().max() < 0.01  # the guarantee outlives the objective
    wrong = (right + torch.randint(1, 10, right.shape)) % 10
    with pytest.warns(UserWarning, match="ran to infinity"):
        model.tune([(digits.x, wrong)])


def test_the_result_reads_and_draws(
    model: rgpr.RGPR, validation: DataLoader[Any], tmp_path: Path
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = model.tune(validation, "ood", temperature=True, max_ece_increase=0.01)
    text = str(result)
    for part in ("ood:", "converged", "temperature", "input", "within the budget", "250 outliers"):
        assert part in text
    assert result.history == sorted(result.history)
    assert len(result.trials) > 2
    import matplotlib.pyplot as plt

    plt.close("all")
    assert len(result.plot(tmp_path / "tuning.png")) == 2  # Axes
    assert plt.get_fignums() == []
    assert (tmp_path / "tuning.png").read_bytes().startswith(b"\x89PNG")
    assert list(result.sigma2) == model.layers


@quiet
def test_a_temperature_set_by_hand_is_kept_within_the_budget(
    model: rgpr.RGPR, digits: Task
) -> None:
    """What is reported is what the model does."""
    model.temperature = 3.0
    x, y = digits.x, digits.y
    result = model.tune([(x, y)], "ood", max_nll_increase=10.0)
    with torch.no_grad():
        actual = nll(model(x), y)
    assert result.temperature == float(model.temperature) == 3.0
    assert result.metrics["validation NLL"][1] == pytest.approx(actual, abs=1e-4)


@quiet
def test_a_recipe_speaks_for_itself(digits: Task, validation: DataLoader[Any]) -> None:
    """Any recipe whose variance is a sum can be tuned, whatever its coordinates."""
    recipe = rgpr.ResidualRecipe(hidden=rgpr.residual.recipes.Strategy("prototypes", "pooled"))
    assert recipe.combine == "sum"
    model = rgpr.RGPR(digits.network, residual=recipe).fit(digits.loader())
    before = model.sigma2
    result = model.tune(validation, "ood")
    assert result.after > result.before
    assert not torch.equal(model.sigma2, before)
    assert list(result.sigma2.values()) == model.sigma2.tolist()


@quiet
def test_defaults_of_the_weight(model: rgpr.RGPR, validation: DataLoader[Any]) -> None:
    """The paper's without a budget; the largest that is tried with one."""
    assert model.tune(validation).objective == "likelihood"
    result = model.tune(validation, "ood")
    assert result.ood_weight == 0.5
    assert result.trials == []
    # So large a budget keeps everything: the first weight that is tried is the last one.
    budget = model.tune(validation, "ood", max_ece_increase=1.0)
    assert [trial.weight for trial in budget.trials] == [100]
    assert budget.ood_weight == 100
    assert model.tune(validation, "ood", ood_weight=0.1).ood_weight == 0.1
    own = model.tune(validation, "ood", ood_weight=3.0, max_ece_increase=1.0)
    assert [trial.weight for trial in own.trials] == [3]


@pytest.mark.parametrize("objective", ["likelihood", "ood", "marginal-likelihood"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_the_default_residual_is_calibrated_instead(likelihood: str, objective: str) -> None:
    x = torch.randn(30, 4)
    y = torch.zeros(30).long() if likelihood == "classification" else torch.randn(30, 3)
    onset = rgpr.ResidualRecipe(combine="onset")  # one's own recipe, too
    for residual in ("onset", onset):
        model = rgpr.RGPR(mlp(), likelihood=likelihood, residual=residual).fit([x])
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=r"model\.calibrate\(val_loader\).*residual='paper'"):
            model.tune([(x, y)], objective)
        after = model.state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before)


@quiet
def test_tuning_drops_sets_and_keeps_p_values(
    model: rgpr.RGPR, validation: DataLoader[Any], digits: Task
) -> None:
    """Sets are promised with other scales; what is strange does not depend on scales at all."""
    model.calibrate(validation, progress=False)
    x = digits.x[250:300]
    p = model.p_value(x)
    model.predict_set(x)
    model.tune(validation, "ood")
    assert torch.equal(model.p_value(x), p)
    with pytest.raises(RuntimeError, match="was set afterwards"):
        model.predict_set(x)
    # Calibrating keeps the scales that were tuned: the paper's residual has no onset to set.
    tuned = model.sigma2
    model.calibrate(validation, progress=False)
    assert torch.equal(model.sigma2, tuned)
    model.predict_set(x)


def test_without_a_fit_nothing_is_tuned() -> None:
    with pytest.raises(RuntimeError, match="not fitted"):
        rgpr.RGPR(mlp()).tune([(torch.randn(3, 4), torch.zeros(3).long())])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "best"}, "'likelihood', 'marginal-likelihood', 'ood'"),
        ({"link_approx": "bridge"}, "'probit', 'mc'"),
        ({"ood": []}, "does not use them"),
        ({"objective": "ood", "ood_weight": -1.0}, "ood_weight = -1"),
        ({"max_ece_increase": 0.1}, "has none"),
        (
            {"objective": "ood", "max_ece_increase": 0.1, "max_nll_increase": 0.1},
            "not both",
        ),
        ({"objective": "ood", "max_ece_increase": -0.1}, "not be negative"),
        (
            {"objective": "marginal-likelihood", "temperature": True},
            "does not depend on the temperature",
        ),
        ({"noise": 0.1}, "regression"),
        ({"max_examples": 0}, "max_examples = 0"),
        ({"link_approx": "mc", "n_samples": 0}, "n_samples = 0"),
        ({"objective": "ood", "ood": []}, "no batch"),
        ({"objective": "ood", "ood": [torch.full((3, 64), float("nan"))]}, "batch 0.*not finite"),
    ],
)
def test_options_that_do_not_fit(model: rgpr.RGPR, options: dict[str, Any], message: str) -> None:
    before = model.sigma2
    with pytest.raises(ValueError, match=message):
        model.tune([(torch.rand(9, 64), torch.zeros(9).long())], **options)
    assert torch.equal(model.sigma2, before)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.full((9,), 10), "label 10 .*from 10 to 10.*0 to 9"),
        (torch.full((9,), 0.5), "such as 0.5.*likelihood='regression'"),
        (torch.zeros(9, 10).long(), "row 0 has 0 ones.*likelihood='multilabel'"),
        (torch.zeros(9, 9).long(), r"\(9, 9\).*class indices"),
        (torch.zeros(8).long(), r"\(8,\) for 9 inputs"),
    ],
)
def test_targets_that_do_not_fit(model: rgpr.RGPR, y: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match="batch 0.*" + message):
        model.tune([(torch.rand(9, 64), y)])


def test_regression_has_no_class_probabilities() -> None:
    x, y = torch.randn(30, 4), torch.randn(30, 2)
    model = rgpr.RGPR(mlp(4, 2), likelihood="regression", residual="paper").fit([x])
    for options in ({"temperature": True}, {"link_approx": "mc"}):
        with pytest.raises(ValueError, match="is a regression"):
            model.tune([(x, y)], **options)
    with pytest.raises(ValueError, match=r"expected \(B, 2\)"):
        model.tune([(x, y[:, 0])])
    with pytest.raises(ValueError, match="targets that are not finite"):
        model.tune([(x, y / 0)])


def test_a_network_that_overflows_is_named() -> None:
    x = torch.randn(30, 4)
    model = rgpr.RGPR(mlp(), residual="paper").fit([x])
    with pytest.raises(ValueError, match="outliers: the network overflows on batch 1"):
        model.tune([(x, torch.zeros(30).long())], "ood", ood=[x, 3e38 * torch.ones(2, 4)])


def test_the_largest_weight_by_hand() -> None:
    """A cost that grows with the weight crosses the budget at 0.7."""

    def solve(weight: float, near: Optimum | None) -> Optimum:
        return Optimum(torch.tensor([weight]), 0.0)

    weight, optimum, trials = largest_weight(solve, lambda o: float(o.z), 0.7, 100)
    assert 0.65 < weight <= 0.7
    assert float(optimum.z) == pytest.approx(weight)
    assert all(t.increase == pytest.approx(t.weight) for t in trials)
    assert largest_weight(solve, lambda o: 0.0, 0.7, 100)[0] == 100
    assert largest_weight(solve, lambda o: 1.0, 0.7, 100)[0] == 0


def test_zero_variance_has_a_gradient_under_monte_carlo() -> None:
    zeros = torch.zeros(4, 2, dtype=torch.float64)
    outputs = Examples(zeros, torch.randn(4, 5, 3), torch.randn(4, 5, 3), None, 4)
    sigma2 = torch.ones(2, dtype=torch.float64, requires_grad=True)
    one = torch.ones((), dtype=torch.float64)
    outputs.log_probabilities(Parameters(sigma2, one, one)).sum().backward()
    assert sigma2.grad is not None
    assert torch.equal(sigma2.grad, torch.zeros(2).double())
