"""Things that a user adds in a file of their own, without editing the package.

Posteriors, detectors, experiments and bounds of activations have such tests beside their own:
``test_export``, ``paper/test_registry`` and ``test_table_of_bounds``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rgpr
from networks import Task, mlp
from rgpr._network.pickers import PICKERS
from rgpr.posteriors import Gaussian, register_link
from rgpr.posteriors.links import LINKS
from rgpr.tuning import Data, Examples, Objective, Options, Parameters, PerExample
from rgpr.tuning.objectives import OBJECTIVES

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """Takes what a test registers out of the tables again."""
    tables: list[dict[str, object]] = [LINKS, PICKERS, OBJECTIVES]  # type: ignore[list-item]
    before = [dict(table) for table in tables]
    yield
    for table, kept in zip(tables, before, strict=True):
        table.clear()
        table.update(kept)


# -- a link --------------------------------------------------------------------------------------


def halved(gaussian: Gaussian, v: Tensor, temperature: Tensor | float) -> Tensor:
    """Halves logits for every unit of standard deviation, whatever that is good for."""
    deviation = (gaussian.variance + v[:, None]).sqrt()
    return gaussian.mean * 2.0**-deviation / temperature


@pytest.mark.parametrize("residual", ["onset", "paper"])
def test_a_link_answers_for_every_residual(digits: Task, residual: str) -> None:
    model = rgpr.RGPR(digits.network, residual=residual).fit(digits.loader(), progress=False)
    with pytest.raises(ValueError, match=r"link_approx='halved' is not one of 'bridge', 'probit'"):
        model(digits.x, link_approx="halved")
    register_link("halved", halved)
    with torch.no_grad():
        found = model(3 * digits.x, link_approx="halved")
        logits = digits.network(3 * digits.x).double()
        v = model.variance(3 * digits.x)[:, None]
        if residual == "paper":
            expected = (logits * 2.0 ** -v.sqrt()).softmax(1)
        else:
            expected = (logits / (1 + v / model.residual.unit).sqrt()).softmax(1)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
        # The limit and zero scales are the library's, whatever the link.
        assert torch.equal(
            model(torch.full_like(digits.x, torch.inf), link_approx="halved"),
            torch.full((len(digits.x), 10), 0.1),
        )
        model.sigma2 = 0
        torch.testing.assert_close(
            model(digits.x, link_approx="halved"), digits.network(digits.x).softmax(1)
        )


def test_a_link_can_be_tuned_with(digits: Task) -> None:
    register_link("halved", halved)
    register_link("needy", halved, needs_covariance=True)
    model = rgpr.RGPR(digits.network, residual="paper").fit(digits.loader(), progress=False)
    result = model.tune(digits.loader(), "ood", link_approx="halved", progress=False)
    assert result.after >= result.before
    other = rgpr.RGPR(digits.network, residual="paper").fit(digits.loader(), progress=False)
    other.tune(digits.loader(), "ood", progress=False)
    assert not torch.allclose(model.sigma2, other.sigma2)
    with pytest.raises(ValueError, match="link_approx='needy' is not one of"):
        model.tune(digits.loader(), link_approx="needy", progress=False)


def test_monte_carlo_is_no_link() -> None:
    with pytest.raises(ValueError, match="'mc' stands for Monte Carlo"):
        register_link("mc", halved)


# -- an objective --------------------------------------------------------------------------------


def test_an_objective_is_tuned_by_its_name(digits: Task) -> None:
    model = rgpr.RGPR(digits.network, residual="paper").fit(digits.loader(), progress=False)
    with pytest.raises(ValueError, match="objective='brier' is not one of"):
        model.tune(digits.loader(), "brier", progress=False)

    class Brier(PerExample):
        """The negative Brier score, and the same of outliers against the uniform distribution."""

        name = "brier"
        takes_outliers = True

        def value(self, examples: Examples, parameters: Parameters) -> Tensor:
            p = examples.log_probabilities(parameters).exp()
            y = nn.functional.one_hot(examples.labels, p.shape[1])
            return -(p - y).square().sum(1)

        def value_of_outliers(self, outliers: Examples, parameters: Parameters) -> Tensor:
            p = outliers.log_probabilities(parameters).exp()
            return -(p - 1 / p.shape[1]).square().sum(1)

    far = [30 * digits.x]
    result = model.tune(digits.loader(), "brier", ood=far, progress=False)
    assert result.objective == "brier"
    assert result.after > result.before
    assert "brier" in str(result)
    result = model.tune(digits.loader(), "brier", ood=far, max_nll_increase=0.01, progress=False)
    assert result.trials
    result = model.tune(
        digits.loader(), "brier", ood=far, temperature=True, link_approx="mc", progress=False
    )
    with torch.no_grad():
        p = model(digits.x, link_approx="mc", n_samples=200).double()
    y = nn.functional.one_hot(digits.y, 10)
    q = rgpr.RGPR(digits.network, residual="paper").fit(digits.loader(), progress=False)
    own = q(digits.x).detach().double()
    assert (p - y).square().sum(1).mean() < (own - y).square().sum(1).mean() + 0.02


def test_an_objective_of_any_form(digits: Task) -> None:
    """Not a mean over examples: it reads what it likes, and says what it cannot do."""

    class Nearest(Objective):
        """The closer the scales are to a wish, the better."""

        name = "nearest"
        takes_temperature = False

        def __init__(self, extension: Any, loader: Any, options: Options) -> None:
            u = extension.read(digits.x).u
            mean = torch.zeros(len(u), 10, dtype=torch.float64)
            self.data = Data(u, mean, digits.y, (len(u), 0), (len(u), 0))

        def parts(self, parameters: Parameters, weight: float) -> list[Tensor]:
            return [-(parameters.sigma2.log() + 3).square().sum()]

    model = rgpr.RGPR(digits.network, residual="paper").fit(digits.loader(), progress=False)
    result = model.tune(digits.loader(), "nearest", progress=False)
    torch.testing.assert_close(
        model.sigma2.log(), torch.full_like(model.sigma2, -3), atol=1e-3, rtol=0
    )
    assert result.metrics == {}
    with pytest.raises(ValueError, match="objective='nearest' does not depend on the temperature"):
        model.tune(digits.loader(), "nearest", temperature=True, progress=False)
    with pytest.raises(ValueError, match="objective='nearest' does not use them"):
        model.tune(digits.loader(), "nearest", ood=[digits.x], progress=False)
    Nearest.takes_outliers = True
    with pytest.raises(ValueError, match="'nearest' keeps no predictions of the validation"):
        model.tune(digits.loader(), "nearest", max_nll_increase=0.1, progress=False)

    class Forgetful(Nearest):
        name = "forgetful"

        def __init__(self, extension: Any, loader: Any, options: Options) -> None:
            pass

    with pytest.raises(TypeError, match=r"objective='forgetful' did not set self\.data"):
        model.tune(digits.loader(), "forgetful", progress=False)


# -- a layer picker ------------------------------------------------------------------------------


def test_a_layer_picker_is_chosen_by_its_name(tmp_path: Path) -> None:
    network, x = mlp(), torch.randn(60, 4)
    with pytest.raises(ValueError, match="no layer 'linear'"):
        rgpr.RGPR(network, layers="linear")
    rgpr.register_layer_picker("linear", linear_layers)
    model = rgpr.RGPR(network, layers="linear").fit([x], progress=False)
    names = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    assert model.layers == ["input", *names]
    model.save(tmp_path / "m.safetensors")
    again = rgpr.load(tmp_path / "m.safetensors", mlp())
    assert again.layers == model.layers
    torch.testing.assert_close(again(x), model(x))
    # What a picker names is checked as what a user names.
    rgpr.register_layer_picker("wrong", lambda seen, keep_last: ["nothing"])
    with pytest.raises(ValueError, match="no layer 'nothing' runs in this network"):
        rgpr.RGPR(network, layers="wrong").fit([x], progress=False)
    rgpr.register_layer_picker("none", lambda seen, keep_last: ["input"])
    assert rgpr.RGPR(network, layers="none").fit([x], progress=False).layers == ["input"]


@pytest.mark.parametrize("name", ["auto", "input"])
def test_names_that_pickers_cannot_have(name: str) -> None:
    with pytest.raises(ValueError, match=f"layers='{name}' has a meaning already"):
        rgpr.register_layer_picker(name, linear_layers)


def linear_layers(seen: Any, keep_last: bool) -> list[str]:
    return [call.name for call in seen.every if isinstance(call.module, nn.Linear)]


def test_a_module_comes_before_a_picker_of_its_name() -> None:
    network = nn.Sequential()
    network.add_module("first", nn.Linear(4, 8))
    network.add_module("act", nn.ReLU())
    network.add_module("last", nn.Linear(8, 3))
    rgpr.register_layer_picker("act", linear_layers)
    model = rgpr.RGPR(network, layers="act").fit([torch.randn(40, 4)], progress=False)
    assert model.layers == ["input", "act"]
