"""A state makes a model whole: what was not fitted answers as the model whose state it is."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import rgpr
from networks import blobs, mlp
from rgpr.posteriors import MAP, Ensemble, MCDropout, Temperature


def fitted(base: nn.Module, likelihood: str, residual: str = "onset") -> rgpr.RGPR:
    x = torch.randn(200, 4)
    y = torch.randn(200, 3) if likelihood == "regression" else torch.arange(200) % 3
    model = rgpr.RGPR(base, likelihood=likelihood, residual=residual).fit(x[:150], y[:150])
    model.calibrate(x[150:], y[150:])
    return model


def assert_same(model: rgpr.RGPR, other: rgpr.RGPR) -> None:
    """Every answer, bit by bit, also far away."""
    x = torch.randn(40, 4)
    x[20:] *= 1e4
    ours, theirs = model.predict([x]), other.predict([x])
    assert repr(ours) == repr(theirs)
    for (name, a), (_, b) in zip(ours._arrays(), theirs._arrays(), strict=True):
        assert (a == b).all(), name
    assert model.layers == other.layers
    assert model.recipe == other.recipe
    assert model.nan == other.nan
    assert str(model.explain(x[:2])) == str(other.explain(x[:2]))


@pytest.mark.parametrize("residual", ["onset", "paper"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_a_state_rebuilds_an_unfitted_model(likelihood: str, residual: str) -> None:
    model = fitted(mlp(), likelihood, residual)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    fresh = rgpr.RGPR(mlp())
    fresh.load_state_dict(state)
    assert_same(model, fresh)
    # It is fitted now in every way: calibrating again gives the same report.
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    y = torch.randn(60, 3) if likelihood == "regression" else y
    assert model.calibrate(x, y) == fresh.calibrate(x, y)
    assert_same(model, fresh)


def test_the_model_owns_what_it_loaded() -> None:
    model = fitted(mlp(), "classification")
    state = copy.deepcopy(model.state_dict())
    fresh = rgpr.RGPR(mlp())
    fresh.load_state_dict(state)
    for tensor in state.values():
        tensor.zero_()
    assert_same(model, fresh)


def test_a_part_of_a_larger_module() -> None:
    whole = nn.ModuleDict({"a": fitted(mlp(), "classification"), "b": nn.Linear(2, 2)})
    fresh = nn.ModuleDict({"a": rgpr.RGPR(mlp()), "b": nn.Linear(2, 2)})
    fresh.load_state_dict(whole.state_dict())
    assert_same(whole["a"], fresh["a"])  # type: ignore[arg-type]


def test_a_checkpoint_that_knows_other_parts_alone() -> None:
    """Torch says which names are missing, and with ``strict=False`` loads the rest."""
    whole = nn.ModuleDict({"a": fitted(mlp(), "classification"), "b": nn.Linear(2, 2)})
    before, other = copy.deepcopy(whole["a"]), nn.Linear(2, 2)
    old = {f"b.{name}": tensor for name, tensor in other.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"Missing key.*a\."):
        whole.load_state_dict(old)
    found = whole.load_state_dict(old, strict=False)
    assert "a._extra_state" in found.missing_keys
    assert torch.equal(whole["b"].weight, other.weight)
    assert_same(whole["a"], before)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["ensemble", "temperature"])
def test_the_posterior_comes_from_the_state(kind: str) -> None:
    if kind == "ensemble":
        model = fitted(Ensemble([mlp(), mlp(), mlp()]), "classification")
    else:
        model = fitted(Temperature(mlp(), 3.0), "classification")
    fresh = rgpr.RGPR(mlp())
    fresh.load_state_dict(model.state_dict())
    assert type(fresh.posterior) is type(model.posterior)
    assert_same(model, fresh)


def test_a_posterior_of_another_configuration_is_replaced() -> None:
    """Of the same kind and with the same tensors, it would still give other answers."""

    def dropout(seed: int) -> MCDropout:
        layers = [nn.Linear(4, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3)]
        return MCDropout(nn.Sequential(*layers), n_samples=7, seed=seed)

    model, other = fitted(dropout(1), "classification"), rgpr.RGPR(dropout(2))
    other.load_state_dict(model.state_dict())
    assert_same(model, other)


def test_a_state_whose_description_is_incomplete_is_named() -> None:
    state = fitted(mlp(), "classification").state_dict()
    about = json.loads(bytes(state["_extra_state"].numpy()))
    for missing in ("nan", "coordinates", "likelihood"):
        text = json.dumps({name: value for name, value in about.items() if name != missing})
        state["_extra_state"] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        with pytest.raises(ValueError, match=f"the state is incomplete: it has no '{missing}'"):
            rgpr.RGPR(mlp()).load_state_dict(state)


class Texts(nn.Module):
    """Takes ids of words, and returns logits beside something else."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        h = self.words(input_ids)
        return h, self.last(h.mean(1))


def test_a_state_and_a_file_know_which_output_and_which_input_are_read(tmp_path: Path) -> None:
    ids = torch.randint(1, 50, (60, 5))
    model = rgpr.RGPR(Texts(), output=1, input="words")
    model.fit([({"input_ids": ids}, torch.arange(60) % 3)], progress=False)
    model.save(tmp_path / "m")
    fresh = rgpr.RGPR(Texts())
    fresh.load_state_dict(model.state_dict())
    other = {"input_ids": torch.randint(1, 50, (9, 7))}
    for again in (rgpr.load(tmp_path / "m", Texts()), fresh):
        assert torch.equal(again(other), model(other))
        assert torch.equal(again.score(other), model.score(other))
        assert again._extension().source == model._extension().source == "words"


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).relu()
        return self.first(h), self.second(h)


def test_a_posterior_that_serves_another_model_stays_as_it_is() -> None:
    network, x = Pairs(), blobs()[0]
    posterior = MAP(network)
    posterior.output = 0
    one, other = (rgpr.RGPR(posterior).fit([x], progress=False) for _ in range(2))
    state = rgpr.RGPR(network, output=1).fit([x], progress=False).state_dict()
    before = other(x)
    wrong = {**state, "residual.sigma2": -state["residual.sigma2"]}
    with pytest.raises(ValueError, match="sigma2"):
        one.load_state_dict(wrong)
    assert torch.equal(one(x), before)
    one.load_state_dict(state)
    assert (one(x) - before).abs().max() > 1e-3
    assert torch.equal(other(x), before)


def test_another_residual_and_other_layers_are_replaced() -> None:
    model = fitted(mlp(), "classification")
    other = rgpr.RGPR(mlp(), ["1"], residual="paper", nan="raise").fit(torch.randn(50, 4))
    posterior = other.posterior
    other.load_state_dict(model.state_dict())
    assert_same(model, other)
    assert other.posterior is posterior


def test_what_does_not_fit_changes_nothing() -> None:
    state = fitted(mlp(), "classification").state_dict()
    for network, message in (
        (mlp(width=17), r"the state was saved with another network: '0\.weight' was \(16, 4\)"),
        (mlp(hidden=3), r"no '6\.weight' was saved"),
    ):
        model = rgpr.RGPR(network)
        before = {name: t.clone() for name, t in network.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            model.load_state_dict(state)
        assert all(torch.equal(t, before[name]) for name, t in network.state_dict().items())
        with pytest.raises(RuntimeError, match="not fitted"):
            model(torch.randn(2, 4))
    # A state from before the fit says nothing of a residual.
    with pytest.raises(RuntimeError, match="Missing key"):
        fitted(mlp(), "classification").load_state_dict(rgpr.RGPR(mlp()).state_dict())
    unfitted = rgpr.RGPR(mlp())
    unfitted.load_state_dict(rgpr.RGPR(mlp()).state_dict())
    # What was written before there was a description loads into a model of the same parts.
    old = {name: tensor for name, tensor in state.items() if name != "_extra_state"}
    model = fitted(mlp(), "classification")
    model.load_state_dict(old)
    assert torch.equal(model.sigma2, state["residual.sigma2"])


def test_a_posterior_that_no_state_holds() -> None:
    class Own(rgpr.Posterior):
        def forward(self, x: Tensor) -> rgpr.posteriors.DiagonalGaussian:
            mean = self.point(x)
            return rgpr.posteriors.DiagonalGaussian(mean, torch.ones_like(mean).double())

    model = fitted(Own(mlp()), "classification")
    same = rgpr.RGPR(Own(mlp()))
    same.load_state_dict(model.state_dict())
    assert_same(model, same)
    with pytest.raises(ValueError, match=r"another posterior than this .*wrap what that model"):
        rgpr.RGPR(mlp()).load_state_dict(model.state_dict())
