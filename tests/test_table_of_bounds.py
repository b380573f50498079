"""The table of bounds: every activation under all its names, and operations from outside."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from operator import methodcaller
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import rgpr
from rgpr.guarantee import Call, NotBoundedError, register_bound, table
from rgpr.guarantee.activations import ACTIVATIONS
from rgpr.guarantee.lipschitz import lipschitz

# Options with which an activation is tested besides its defaults.
OPTIONS: dict[type[nn.Module], list[dict[str, float]]] = {
    nn.LeakyReLU: [{"negative_slope": -2.5}, {"negative_slope": 0.3}],
    nn.PReLU: [{"init": 3.0}],
    nn.ELU: [{"alpha": 2.5}, {"alpha": 0.2}],
    nn.CELU: [{"alpha": 2.5}, {"alpha": 0.2}],
    nn.Softplus: [{"beta": 3.0}, {"beta": 0.5, "threshold": 25.0}],
    nn.Hardtanh: [{"min_val": -2.0, "max_val": 0.5}],
    nn.GELU: [{"approximate": "tanh"}],  # type: ignore[dict-item]
}
CASES = [(kind, {}) for kind in ACTIVATIONS] + [
    (kind, options) for kind, several in OPTIONS.items() for options in several
]
IDS = [f"{kind.__name__} {options or ''}".strip() for kind, options in CASES]
every_activation = pytest.mark.parametrize(("kind", "options"), CASES, ids=IDS)


def constant(network: nn.Module) -> float:
    """The bound of a network of one input, for inputs of scale one."""
    return lipschitz(network.double(), torch.zeros(1).double(), torch.ones(1).double())[0]


@cache
def bounded(index: int) -> tuple[nn.Module, float]:
    """An activation and its bound, computed once for all pairs of numbers."""
    kind, options = CASES[index]
    activation = kind(**options).double()
    return activation, constant(activation)


@pytest.mark.parametrize("index", range(len(CASES)), ids=IDS)
@settings(max_examples=150, deadline=None)
@given(st.floats(-60, 60), st.floats(-60, 60))
def test_no_pair_is_further_apart_than_the_bound(index: int, a: float, b: float) -> None:
    activation, bound = bounded(index)
    with torch.no_grad():
        fa, fb = activation(torch.tensor([[a], [b]], dtype=torch.float64)).flatten().tolist()
    # Softplus jumps by 4e-9 at most, where torch replaces it by the identity.
    assert abs(fa - fb) <= bound * abs(a - b) + 1e-8


@every_activation
def test_the_bound_is_the_steepest_slope(kind: type[nn.Module], options: dict[str, float]) -> None:
    activation = kind(**options).double()
    x = torch.linspace(-30, 30, 600_001, dtype=torch.float64, requires_grad=True)
    [slopes] = torch.autograd.grad(activation(x).sum(), x)
    steepest = float(slopes.abs().max())
    bound = constant(activation)
    assert steepest <= bound
    assert bound <= 1.01 * steepest


class Calls(nn.Module):
    """Calls a function between two layers that keep the numbers as they are."""

    def __init__(self, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.function, self.args, self.kwargs = function, args, kwargs

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x + 0.0, *self.args, **self.kwargs)


def spellings(kind: type[nn.Module]) -> dict[str, Callable[..., Tensor]]:
    """Every function of torch with the name of this activation, found by trying names."""
    stems = {
        nn.ReLU: "relu", nn.ReLU6: "relu6", nn.Hardtanh: "hardtanh", nn.Hardsigmoid: "hardsigmoid",
        nn.LeakyReLU: "leaky_relu", nn.PReLU: "prelu", nn.ELU: "elu", nn.CELU: "celu",
        nn.SELU: "selu", nn.GELU: "gelu", nn.SiLU: "silu", nn.Mish: "mish",
        nn.Hardswish: "hardswish", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid",
        nn.LogSigmoid: "logsigmoid", nn.Softplus: "softplus", nn.Softsign: "softsign",
    }  # fmt: skip
    stem = stems[kind]
    names = (stem, stem + "_")
    found = {f"F.{name}": getattr(F, name) for name in names if hasattr(F, name)}
    found |= {f"torch.{name}": getattr(torch, name) for name in names if hasattr(torch, name)}
    slope = [torch.tensor([0.25]).double()] if kind is nn.PReLU else []
    found = {name: partial(call, function, slope) for name, function in found.items()}
    methods = [name for name in names if hasattr(Tensor, name)]
    return found | {f"Tensor.{name}": methodcaller(name, *slope) for name in methods}


def call(function: Callable[..., Tensor], more: list[Tensor], x: Tensor) -> Tensor:
    return function(x, *more)


SPELLINGS = {
    name: (kind, function) for kind in ACTIVATIONS for name, function in spellings(kind).items()
}


@pytest.mark.parametrize(("kind", "function"), SPELLINGS.values(), ids=SPELLINGS)
def test_a_function_has_the_bound_of_its_module(
    kind: type[nn.Module], function: Callable[..., Tensor]
) -> None:
    assert constant(Calls(function)) == constant(kind())


class CallsPReLU(nn.Module):
    """The slopes are a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([-3.0]))

    def forward(self, x: Tensor) -> Tensor:
        return F.prelu(x, self.weight)


class SlopeFromInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.prelu(x, x.mean())


def test_options_are_read_from_attributes_and_arguments_alike() -> None:
    slack = pytest.approx
    assert constant(nn.LeakyReLU(-2.5)) == slack(2.5, rel=1e-5)
    assert constant(Calls(F.leaky_relu, -2.5)) == slack(2.5, rel=1e-5)
    assert constant(Calls(F.leaky_relu, negative_slope=-2.5)) == slack(2.5, rel=1e-5)
    assert constant(Calls(F.leaky_relu_, -2.5)) == slack(2.5, rel=1e-5)
    assert constant(Calls(F.elu, 4.0)) == slack(4.0, rel=1e-5)
    assert constant(Calls(F.elu, 4.0, True)) == slack(4.0, rel=1e-5)
    assert constant(CallsPReLU()) == slack(3.0, rel=1e-5)
    with pytest.raises(NotBoundedError, match="calls prelu"):
        constant(SlopeFromInput())


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (nn.CELU(-1.0), "is a CELU"),
        (Calls(F.celu, -1.0), "calls celu"),
        (nn.Softplus(threshold=0.1), "is a Softplus"),
        (Calls(F.softplus, 1.0, 0.1), "calls softplus"),
    ],
    ids=["CELU", "celu", "Softplus", "softplus"],
)
def test_options_without_a_bound_are_refused(part: nn.Module, message: str) -> None:
    with pytest.raises(NotBoundedError, match=message):
        constant(part)


def test_piecewise_affine_or_not_is_the_same_for_a_function() -> None:
    for kind in ACTIVATIONS:
        networks = [kind().double(), *(Calls(f) for f in spellings(kind).values())]
        center = torch.zeros(1).double()
        flags = {lipschitz(network, center, center + 1)[2] for network in networks}
        assert len(flags) == 1, kind


# -- operations from outside ----------------------------------------------------------------------


class Wave(nn.Module):
    """``x + a sin(x)``, whose slope is at most ``1 + |a|``."""

    def __init__(self, size: float = 1.0) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x + self.size * torch.sin(x)


class OtherWave(Wave):
    """A subclass whose slope is not that of its parent."""

    def forward(self, x: Tensor) -> Tensor:
        return 100 * torch.sin(x)


def wave(x: Tensor, size: float = 1.0) -> Tensor:
    return x + size * torch.sin(x)


class CallsWave(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return wave(x, 0.5)


@pytest.fixture
def fresh_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(table, "_table", dict(table._table))


@pytest.mark.usefixtures("fresh_table")
@pytest.mark.parametrize(
    ("activation", "operation", "named"),
    [(Wave, Wave, "calls sin in '1', a Wave"), (CallsWave, wave, "calls sin in wave")],
    ids=["module", "function"],
)
def test_an_activation_of_ones_own_is_certified(
    activation: type[nn.Module], operation: Any, named: str
) -> None:
    # Two networks have no common head, so the Lipschitz way is the only one.
    members = [nn.Sequential(nn.Linear(3, 8), activation(), nn.Linear(8, 2)) for _ in "ab"]
    model = rgpr.RGPR(members).fit([torch.randn(60, 3)])
    with pytest.raises(NotBoundedError, match=named) as refusal:
        model.certify(0.1)
    assert "rgpr.guarantee.register_bound(" in str(refusal.value)
    register_bound(operation, lambda call: 1 + abs(call.read("size", 1, 1.0)))
    certificate = model.certify(0.1)
    assert certificate.by == "lipschitz"
    far = rgpr.guarantee.inputs.at_distance(
        model._extension(), torch.randn(200, 3), certificate.radius
    )
    with torch.no_grad():
        assert model(far).max() <= 0.6
    assert rgpr.check(model).piecewise_affine is False


@pytest.mark.usefixtures("fresh_table")
def test_a_bound_can_be_a_number_and_is_replaced_by_a_later_one() -> None:
    register_bound(Wave, 5.0)
    assert constant(Wave()) == pytest.approx(5.0, rel=1e-5)
    register_bound(Wave, 2.0, piecewise_affine=True)
    assert constant(Wave()) == pytest.approx(2.0, rel=1e-5)
    assert lipschitz(Wave(), torch.zeros(1), torch.ones(1))[2]
    with pytest.raises(NotBoundedError, match="calls sin"):
        constant(OtherWave())
    patched = Wave()
    patched.forward = lambda x: 100 * torch.sin(x)  # type: ignore[method-assign]
    with pytest.raises(NotBoundedError, match="calls sin"):
        constant(patched)


@pytest.mark.usefixtures("fresh_table")
def test_an_operation_of_torch_is_registered_under_all_its_names() -> None:
    for operation in (nn.Softshrink, F.softshrink):
        with pytest.raises(NotBoundedError, match=r"softshrink|Softshrink"):
            constant(nn.Sequential(Calls(F.softshrink), nn.Softshrink()))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(table, "_table", dict(table._table))
            register_bound(operation, 1.0)
            both = nn.Sequential(Calls(F.softshrink), nn.Softshrink())
            assert constant(both) == pytest.approx(1.0, rel=1e-5)
    register_bound(torch.sin, 1.0)
    for sine in (torch.sin, torch.sin_, methodcaller("sin"), methodcaller("sin_")):
        assert constant(Calls(sine)) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.usefixtures("fresh_table")
def test_a_bound_may_refuse() -> None:
    def bound(call: Call) -> float | None:
        return None if call.read("size") > 1 else 2.0

    register_bound(Wave, bound)
    assert constant(Wave(1.0)) == pytest.approx(2.0, rel=1e-5)
    with pytest.raises(NotBoundedError, match="is a Wave"):
        constant(Wave(1.5))


@pytest.mark.parametrize("operation", [Wave(), int, "sin", 3])
def test_what_is_no_operation(operation: Any) -> None:
    with pytest.raises(TypeError, match=r"neither a subclass of nn\.Module nor a function"):
        register_bound(operation, 1.0)


@pytest.mark.parametrize("bound", [-1.0, float("inf"), float("nan")])
def test_what_is_no_bound(bound: float) -> None:
    with pytest.raises(ValueError, match="not a Lipschitz constant"):
        register_bound(Wave, bound)
