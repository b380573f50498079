"""Every mistake gets a message that names it and says what to do; nothing is left half done."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from networks import mlp
from rgpr import RGPR, ResidualRecipe


@pytest.fixture
def model() -> RGPR:
    return RGPR(mlp()).fit([torch.randn(30, 4)])


def test_unfitted() -> None:
    model, x = RGPR(mlp()), torch.randn(3, 4)
    for use in (
        lambda: model(x),
        lambda: model.variance(x),
        lambda: model.predictive_samples(x),
        lambda: model.layers,
        lambda: model.sigma2,
        lambda: setattr(model, "sigma2", 1.0),
        lambda: model.save("never.safetensors"),
        lambda: model.score(x),
        lambda: model.explain(x),
        lambda: model.certify(),
        lambda: model.p_value(x),
        lambda: model.flag(x),
        lambda: model.predict_set(x),
        lambda: model.calibrate([x]),
        lambda: model.tune([(x, torch.zeros(3).long())]),
        lambda: model.compile(),
    ):
        with pytest.raises(RuntimeError, match=r"not fitted: call model\.fit"):
            use()
    assert "layers='auto'" in repr(model)


def test_options() -> None:
    with pytest.raises(ValueError, match="likelihood='ranking' is not one of"):
        RGPR(mlp(), likelihood="ranking")
    with pytest.raises(ValueError, match="nan='ignore' is not one of 'propagate', 'raise'"):
        RGPR(mlp(), nan="ignore")
    with pytest.raises(ValueError, match="residual='adaptive' is not one of 'onset', 'paper'"):
        RGPR(mlp(), residual="adaptive")
    with pytest.raises(TypeError, match=r"residual=None; expected a word or a rgpr\.Residual"):
        RGPR(mlp(), residual=None)
    with pytest.raises(ValueError, match="combine='product' is not one of 'sum', 'onset'"):
        ResidualRecipe(combine="product")
    model = RGPR(mlp()).fit([torch.randn(30, 4)])
    with pytest.raises(ValueError, match="link_approx='probits' is not one of"):
        model(torch.randn(3, 4), link_approx="probits")
    with pytest.raises(TypeError, match=r"no posterior is known for builtins\.str"):
        RGPR("resnet18")


def test_prediction_inputs(model: RGPR) -> None:
    with pytest.raises(ValueError, match=r"shape \(5,\).*fitted on inputs of shape \(4,\)"):
        model(torch.randn(3, 5))
    with pytest.raises(TypeError, match=r"torch\.int64.*x\.float"):
        model(torch.ones(3, 4).long())
    with pytest.raises(TypeError, match=r"torch\.float64.*computes in torch\.float32"):
        model(torch.randn(3, 4).double())
    with pytest.raises(ValueError, match=r"shape \(4,\).*x\[None\]"):
        model(torch.randn(4))
    with pytest.raises(TypeError, match="list; expected a tensor"):
        model([[1.0, 2.0, 3.0, 4.0]])
    with pytest.raises(ValueError, match="on meta but the network is on cpu"):
        model(torch.randn(3, 4, device="meta"))


def test_training_loaders() -> None:
    model, good = RGPR(mlp()), torch.randn(8, 4)

    def batches(bad: object) -> list[object]:
        return [good, good, bad]

    for loader, error, message in (
        ([], ValueError, "gave no batch"),
        ([good[:1]], ValueError, "fewer than two inputs"),
        ([good[:0]], ValueError, "fewer than two inputs"),
        (batches(torch.full((8, 4), torch.nan)), ValueError, "batch 2 holds values .* not finite"),
        (batches(torch.full((8, 4), torch.inf)), ValueError, "batch 2 holds values .* not finite"),
        (batches(good.double()), TypeError, "batch 2: .*torch.float64"),
        (batches(good.long()), TypeError, "batch 2: .*torch.int64"),
        (batches(torch.randn(8, 5)), ValueError, r"batch 2: .*\(5,\).*\(4,\)"),
        (batches("text"), TypeError, "gives str where a tensor"),
        (batches({"a": good}), KeyError, "keys.*'a'"),
        (batches([]), TypeError, "gives list"),
    ):
        with pytest.raises(error, match=message):
            model.fit(loader)
        with pytest.raises(RuntimeError, match="not fitted"):
            _ = model.layers


def test_a_network_that_overflows_on_its_training_data() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    nn.init.constant_(network[0].weight, 3e38)
    with pytest.raises(ValueError, match="batch 0: layer '1' gives values that are not finite"):
        RGPR(network).fit([10 * torch.rand(8, 4)])


def test_a_network_that_ends_in_a_softmax() -> None:
    network = nn.Sequential(mlp(), nn.Softmax(-1))
    with pytest.raises(ValueError, match=r"returns probabilities.*Leave out the final softmax"):
        RGPR(network).fit([torch.randn(30, 4)])
    RGPR(network, likelihood="regression").fit([torch.randn(30, 4)])


def test_a_failed_fit_leaves_the_old_one(model: RGPR) -> None:
    x = torch.randn(5, 4)
    model.calibrate([torch.randn(40, 4)])
    before, state = model(x), copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="batch 1"):
        model.fit([torch.randn(30, 4), torch.full((3, 4), torch.nan)])
    assert torch.equal(model(x), before)
    after = model.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in state.items())
    # A fit that succeeds belongs to other data, and what was calibrated to these is gone.
    model.fit([torch.randn(30, 4)])
    with pytest.raises(RuntimeError, match="not calibrated"):
        model.p_value(x)


@pytest.mark.parametrize("residual", ["onset", "paper"])
def test_a_failed_calibration_leaves_everything(residual: str) -> None:
    x = torch.randn(60, 4)
    model = RGPR(mlp(), residual=residual).fit([x])
    model.calibrate([torch.randn(40, 4)])
    state = copy.deepcopy(model.state_dict())
    for loader, error, message in (
        ([], ValueError, "gave no batch"),
        ([x[:0]], ValueError, "only empty batches"),
        ([x, torch.full((3, 4), torch.nan)], ValueError, "batch 1 holds values .* not finite"),
        ([(x, torch.full((60,), 3))], ValueError, "batch 0 has the label 3 .*0 to 2"),
        ([(x, torch.full((60,), 0.5))], ValueError, "batch 0 .*0.5.*likelihood='regression'"),
        ([(x, torch.zeros(60).long()), x], ValueError, "batch 1 lacks targets"),
        ([x, (x, torch.zeros(60).long())], ValueError, "batch 1 has targets"),
        ([x.double()], TypeError, "float64"),
        ([torch.randn(8, 5)], ValueError, r"\(5,\).*\(4,\)"),
    ):
        with pytest.raises(error, match=message):
            model.calibrate(loader)
        after = model.state_dict()
        assert after.keys() == state.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in state.items())
    with pytest.raises(ValueError, match="max_nll_increase = -1 must not be negative"):
        model.calibrate([x], max_nll_increase=-1)


def test_the_network_is_never_changed(model: RGPR) -> None:
    network = model.posterior.network
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    flags = [p.requires_grad for p in network.parameters()]
    x = torch.randn(6, 4)
    model(x), model(x, link_approx="mc"), model.variance(x), model.score(x), model.explain(x)
    model.calibrate([(torch.randn(40, 4), torch.randint(3, (40,)))])
    model.predict_set(x), model.flag(x)
    model.fit([x])
    assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())
    assert [p.requires_grad for p in network.parameters()] == flags
    assert all(p.grad is None for p in network.parameters())


def test_any_dtype_of_the_network_will_do() -> None:
    """Of a network of several, nobody else knows which it takes first."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.trunk = nn.Parameter(torch.ones(())), mlp().bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.trunk(x.bfloat16() * self.scale.bfloat16())
            return out

    x = torch.randn(60, 4)
    for dtype in (torch.float32, torch.bfloat16):
        assert RGPR(Scaled()).fit([x.to(dtype)])(x.to(dtype)).shape == (60, 3)
    message = r"float64 but the network computes in torch\.bfloat16 and torch\.float32"
    with pytest.raises(TypeError, match=message):
        RGPR(Scaled()).fit([x.double()])


def test_a_network_that_cannot_run_on_the_inputs_says_their_shape() -> None:
    with pytest.raises(RuntimeError, match=r"cannot run on inputs of shape \(B, 5\): .*mat2"):
        RGPR(mlp()).fit([torch.randn(20, 5)])
