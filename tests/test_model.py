from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import rgpr
from devices import needs_gpu
from networks import EVERY_NETWORK, LeNet, Task, mlp
from references import unit_variance
from rgpr import RGPR
from rgpr.extension import scales
from rgpr.metrics import accuracy, nll
from rgpr.posteriors.gaussian import DiagonalGaussian, Gaussian
from rgpr.residual.variance import AT_TWICE_THE_ONSET

both_residuals = pytest.mark.parametrize("residual", ["onset", "paper"])


@pytest.mark.parametrize("name", EVERY_NETWORK)
def test_v_against_the_reference(name: str) -> None:
    build, shape = EVERY_NETWORK[name]
    network = build().double().eval()
    train, x = torch.randn(50, *shape).double(), 3 * torch.randn(9, *shape).double()
    model = RGPR(network, residual="paper").fit([train[:20], train[20:]])
    sigma2 = torch.rand(len(model.layers)).double()
    model.sigma2 = sigma2
    inputs = {"input": (train, x)}
    for layer in model.layers[1:]:
        inputs[layer] = tuple(representation(network, layer, t) for t in (train, x))
    expected = torch.zeros(9).double()
    for scale, layer in zip(sigma2, model.layers, strict=True):
        reference, h = inputs[layer]
        expected += scale * unit_variance(*_alive(h, reference))
    torch.testing.assert_close(model.variance(x), expected)


def _alive(h: Tensor, training: Tensor) -> tuple[Tensor, Tensor]:
    """Give units that never varied the median spread of the others, by adding it to the data."""
    h, training = h.flatten(1).clone(), training.flatten(1).clone()
    std = training.std(0, correction=0)
    dead = std <= 1e-12
    swing = torch.ones(len(training), 1).double()
    swing[::2] = -1  # an even number of rows: mean zero, spread one
    training[:, dead] += swing * std[~dead].median()
    return h, training


def representation(network: nn.Module, layer: str, x: Tensor) -> Tensor:
    name, _, number = layer.removeprefix("./").removesuffix(":input").partition("#")
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
        taken = args if layer.endswith(":input") else output
        seen.append((taken[0] if isinstance(taken, tuple) else taken).detach().clone())

    handle = network.get_submodule(name).register_forward_hook(keep)
    network(x.clone())
    handle.remove()
    return seen[int(number or 0)]


def test_one_forward_pass_serves_prediction_and_capture() -> None:
    passes: list[int] = []
    network = mlp()
    network[0].register_forward_hook(lambda *_: passes.append(1))
    x = torch.randn(30, 4)
    model = RGPR(network).fit([x])
    for call in (
        lambda: model(x),
        lambda: model(x, link_approx="mc"),
        lambda: model(x, link_approx="bridge"),
        lambda: model.predictive_samples(x, 50),
        lambda: model.variance(x),
        lambda: model.score(x),
        lambda: model.explain(x),
    ):
        passes.clear()
        call()
        assert len(passes) == 1


@both_residuals
@pytest.mark.parametrize("link", ["probit", "mc", "bridge"])
def test_sigma2_zero_is_exactly_the_base(link: str, residual: str) -> None:
    network, x = mlp(), torch.randn(30, 4)
    model = RGPR(network, residual=residual).fit([x])
    model.sigma2 = 0
    p = model(100 * x, link_approx=link)
    if link == "probit":
        assert torch.equal(p, network(100 * x).softmax(-1))
    torch.testing.assert_close(p, network(100 * x).softmax(-1))
    samples = model.predictive_samples(x, 3)
    assert torch.equal(samples, network(x).double().expand(3, 30, 3))


@both_residuals
def test_untuned_sigma2_is_harmless(digits: Task, residual: str) -> None:
    model = RGPR(digits.network, residual=residual).fit(digits.loader())
    assert (model.sigma2 > 0).all()
    with torch.no_grad():
        p, base = model(digits.x), digits.network(digits.x).softmax(-1)
        v = model.variance(digits.train.tensors[0])
        held_out = model.variance(digits.x)
    if residual == "paper":
        assert 0.05 < v.quantile(0.95) < 0.15
    else:
        # As many held-out inputs as were promised get the base's own answer, bit by bit. Two
        # samples of 500 scatter by one per cent around each other.
        quiet = held_out == 0
        assert float(quiet.double().mean()) == pytest.approx(scales._ONSET_QUANTILE, abs=0.02)
        assert torch.equal(p[quiet], base[quiet])
    assert accuracy(p, digits.y) == accuracy(base, digits.y)
    assert nll(p, digits.y) < nll(base, digits.y) + 0.01
    # And yet enough far away.
    with torch.no_grad():
        assert float(model(1e8 * digits.x).amax(1).max()) == pytest.approx(0.1, abs=2e-3)


@torch.no_grad()
def test_untuned_sigma2_is_harmless_in_regression_of_any_unit() -> None:
    x = torch.randn(300, 4)
    for unit in (1e-4, 1.0, 1e4):
        network = mlp(4, 2)
        network[-1].weight.data *= unit
        model = RGPR(network, likelihood="regression", residual="paper").fit([x])
        mean, variance = model(x, diagonal_output=True)
        spread = mean.var(0, correction=0).mean()
        ratio = variance.quantile(0.95) / spread
        assert 0.05 < float(ratio) < 0.2
        assert float(model.residual.unit / spread) == pytest.approx(0.1, rel=0.2)
    constant = nn.Sequential(nn.Linear(4, 2))
    nn.init.zeros_(constant[0].weight)
    for residual in ("onset", "paper"):
        model = RGPR(constant, likelihood="regression", residual=residual).fit([x])
        assert (model.sigma2 > 0).all()
        assert model.residual.unit > 0


@torch.no_grad()
def test_the_default_variance_of_a_regression_is_measured_in_its_outputs() -> None:
    """It is zero at most data, and its unit is a tenth of the outputs' variance."""
    x, added = torch.randn(300, 4), []
    network = mlp(4, 2)
    for unit in (1.0, 1e-4, 1e4):
        scaled = copy.deepcopy(network)
        scaled[-1].weight.data *= unit
        scaled[-1].bias.data *= unit
        model = RGPR(scaled, likelihood="regression").fit([x])
        mean, variance = model(x, diagonal_output=True)
        spread = float(mean.var(0, correction=0).mean())
        assert 0.9 < (variance == 0).double().mean() < 1
        assert float(model.residual.unit) == pytest.approx(0.1 * spread, rel=1e-4)
        # Where what is compared with the onset is twice as large, it is so many of its units.
        u = model._extension().read(4 * x, scaled).u
        twice = 2 * model.residual.onset / model.residual.joint(u)[:, None]
        expected = torch.full((300,), AT_TWICE_THE_ONSET, dtype=torch.float64)
        torch.testing.assert_close(model.residual(twice * u) / model.residual.unit, expected)
        added.append(model.variance(8 * x) / spread)
    assert (added[0] > 0).double().mean() > 0.9
    torch.testing.assert_close(added[1], added[0], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(added[2], added[0], rtol=1e-3, atol=1e-6)


@both_residuals
def test_the_scales_are_set_by_all_of_the_data_in_any_order(residual: str) -> None:
    """Sorted by size: the first 256 rows alone would give scales many times larger."""
    x = torch.randn(4000, 4)
    x = x[x.norm(dim=1).argsort()]
    network = mlp()
    sorted_data = RGPR(network, residual=residual).fit(x.split(100)).sigma2
    shuffled = RGPR(network, residual=residual).fit(x[torch.randperm(4000)].split(100)).sigma2
    torch.testing.assert_close(sorted_data, shuffled, rtol=0.5, atol=0)


def test_a_network_may_change_its_input_in_place() -> None:
    build, _ = EVERY_NETWORK["in place"]
    network, x = build(), torch.randn(50, 4)
    before = x.clone()
    model = RGPR(network).fit([x])
    assert torch.equal(x, before)
    torch.testing.assert_close(model.residual.coordinates[0].mean, before.mean(0))
    p = model(x)
    assert torch.equal(x, before)
    assert torch.equal(model(x), p)


def test_infinite_variance_is_the_limit_for_every_link() -> None:
    class Exp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp()

    network = nn.Sequential(nn.Linear(4, 8), Exp(), nn.Sigmoid(), nn.Linear(8, 3))
    x = torch.randn(64, 4)
    model = RGPR(network, layers=["1"]).fit([x])
    infinite = model.variance(300 * x).isinf()
    assert infinite.any()
    for link in ("probit", "mc", "bridge"):
        p = model(300 * x, link_approx=link)
        torch.testing.assert_close(p[infinite], torch.full_like(p[infinite], 1 / 3))
        assert p.isfinite().all()


def test_half_precision_overflows_early_and_is_answered() -> None:
    network = mlp(8, 5, width=64)
    for module in network[::2]:
        module.weight.data *= 3
    x = torch.randn(64, 8)
    model = RGPR(network).fit([x]).half()
    far = (1e4 * x).half()
    assert not network(far).isfinite().all()
    p = model(far)
    assert p.isfinite().all()
    torch.testing.assert_close(p.float().sum(1), torch.ones(64), atol=5e-3, rtol=0)


def test_every_part_of_a_posterior_is_evaluated() -> None:
    class Two(rgpr.Posterior):
        def __init__(self) -> None:
            super().__init__(LeNet())
            self.other = LeNet()

        def forward(self, x: Tensor) -> Gaussian:
            mean = (self.point(x) + self.other(x)) / 2
            return DiagonalGaussian(mean, torch.ones(()))

    x = torch.randn(20, 1, 8, 8)
    model = RGPR(Two().train()).fit([x])
    statistics = model.posterior.other.features[1].running_mean.clone()
    assert torch.equal(model(x), model(x))
    assert torch.equal(model.posterior.other.features[1].running_mean, statistics)
    assert model.posterior.other.training


def test_laplace_torchs_pred_type_is_understood() -> None:
    x = torch.randn(8, 4)
    model = RGPR(mlp()).fit([x])
    assert torch.equal(model(x, pred_type="glm", link_approx="probit"), model(x))
    with pytest.raises(ValueError, match="pred_type='nn' is not one of 'glm'"):
        model(x, pred_type="nn")


@needs_gpu
def test_on_a_gpu() -> None:
    network, x = LeNet().cuda().eval(), torch.randn(64, 1, 8, 8)
    model = RGPR(network).fit(x.split(16))  # a loader on the CPU
    assert model.sigma2.is_cuda
    on_cpu = copy.deepcopy(model).cpu()
    network.cuda()
    for link in ("probit", "bridge"):
        torch.testing.assert_close(
            model(x.cuda(), link_approx=link).cpu(), on_cpu(x, link_approx=link), atol=1e-4, rtol=0
        )
    far = model(1e30 * x.cuda())
    torch.testing.assert_close(far, torch.full_like(far, 0.1))
    for generator in (torch.Generator(), torch.Generator("cuda")):
        assert model(x.cuda(), link_approx="mc", generator=generator).is_cuda
    with pytest.raises(ValueError, match="on cpu but the network is on cuda"):
        model(x)


def test_fit_does_not_depend_on_batches() -> None:
    x = torch.randn(301, 1, 8, 8)
    network = LeNet().eval()
    a = RGPR(network, residual="paper").fit(x.split(301))
    for batches in (x.split(7), x.flip(0).split(64)):
        b = RGPR(network, residual="paper").fit(batches)
        for sa, sb in zip(a.residual.coordinates, b.residual.coordinates, strict=True):
            scale = sa.scale
            torch.testing.assert_close(sa.mean / scale, sb.mean / scale, rtol=0, atol=2e-6)
            torch.testing.assert_close(scale, sb.scale, rtol=2e-6, atol=0)


def test_loaders_of_pairs_inputs_and_dicts() -> None:
    x, y = torch.randn(40, 4), torch.zeros(40)
    network = mlp()
    reference = RGPR(network).fit(DataLoader(TensorDataset(x, y), batch_size=10))
    dicts = [{"label": y[i : i + 10], "image": x[i : i + 10]} for i in range(0, 40, 10)]
    for loader in (
        DataLoader(x, batch_size=10),
        x.split(10),
        (batch for batch in x.split(10)),
        dicts,
        [(x[:20], y[:20]), [x[20:], y[20:]]],
        [(x[:20],), [x[20:]]],
    ):
        torch.testing.assert_close(RGPR(network).fit(loader)(x), reference(x))


@both_residuals
def test_r_flattens_the_residual(residual: str) -> None:
    network, x = mlp(), torch.randn(40, 4)
    one = RGPR(network, residual=residual).fit([x])
    two = RGPR(network, residual=residual).fit([x], r=2)
    # The scales that a fit finds make up for it.
    assert one.variance(20 * x).min() > 0
    torch.testing.assert_close(two.variance(20 * x), one.variance(20 * x))
    one.sigma2 = two.sigma2 = 1
    if residual == "paper":
        torch.testing.assert_close(two.variance(x), one.variance(x) / 8)
    else:
        far, u = (m.residual.joint(m._extension().read(20 * x, network).u) for m in (one, two))
        torch.testing.assert_close(u, far / 8)
    with pytest.raises(ValueError, match="r = 0"):
        RGPR(network).fit([x], r=0)


def test_sigma2_is_settable_and_checked() -> None:
    x = torch.randn(40, 4)
    model = RGPR(mlp()).fit([x])
    model.sigma2 = [1, 2, 3]
    assert model.sigma2.tolist() == [1, 2, 3]
    model.sigma2 = 0.5
    assert model.sigma2.tolist() == [0.5] * 3
    values = torch.ones(3)
    model.sigma2 = values
    values[0] = 7
    assert model.sigma2.tolist() == [1] * 3
    with pytest.raises(ValueError, match=r"shape \(2,\).*3 layers \['input', '1', '3'\]"):
        model.sigma2 = [1, 2]
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite and not negative"):
            model.sigma2 = bad


@both_residuals
def test_monte_carlo_is_algorithm_1(residual: str) -> None:
    network, x = mlp(), 2 * torch.randn(30, 4)
    model = RGPR(network, residual=residual).fit([x])
    model.sigma2 = 1
    if residual == "onset":
        x = 12 * x  # beyond the onset
    with torch.no_grad():
        p = model(x, link_approx="mc", n_samples=20_000)
        v = model.variance(x)
        assert v.min() > 0
        # By hand: the network, plus noise of that variance, softmax, mean.
        noise = torch.randn(20_000, 30, 3, dtype=torch.float64) * v.sqrt()[:, None]
        expected = (network(x) + noise).softmax(-1).mean(0)
        torch.testing.assert_close(p.double(), expected, atol=0.02, rtol=0)
        samples = model.predictive_samples(x, 20_000)
    torch.testing.assert_close(samples.var(0), v[:, None].expand(30, 3), rtol=0.06, atol=1e-12)
    torch.testing.assert_close(
        samples.mean(0), network(x).double(), atol=0.06 * float(v.max().sqrt()), rtol=0
    )


def test_the_generator_is_honoured() -> None:
    x = torch.randn(30, 4)
    model = RGPR(mlp()).fit([x])

    def draw(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return model(10 * x, link_approx="mc", n_samples=5, generator=generator)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    for bad in (0, 2.5):
        with pytest.raises(ValueError, match=f"n_samples = {bad} must be a whole number"):
            model(x, link_approx="mc", n_samples=bad)


@both_residuals
def test_regression(residual: str) -> None:
    network, x = mlp(4, 2), torch.randn(30, 4)
    model = RGPR(network, likelihood="regression", residual=residual).fit([x])
    x = 20 * x
    assert model.variance(x).min() > 0
    mean, covariance = model(x)
    assert torch.equal(mean, network(x))
    expected = model.variance(x)[:, None, None] * torch.eye(2)
    torch.testing.assert_close(covariance, expected)
    variance = model(x, diagonal_output=True)[1]
    torch.testing.assert_close(variance, covariance.diagonal(dim1=1, dim2=2))


def test_binary_classification_with_one_logit() -> None:
    network, x = mlp(4, 1), torch.randn(30, 4)
    model = RGPR(network, likelihood="classification").fit([x])
    for link in ("probit", "mc", "bridge"):
        p = model(x, link_approx=link)
        assert p.shape == (30, 2)
        torch.testing.assert_close(p.sum(1), torch.ones(30))
    model.sigma2 = 0
    torch.testing.assert_close(model(x)[:, 1], network(x)[:, 0].sigmoid())
    model.sigma2 = 1
    torch.testing.assert_close(model(1e9 * x), torch.full((30, 2), 0.5), atol=1e-3, rtol=0)


@both_residuals
@pytest.mark.parametrize("link", ["probit", "mc", "bridge"])
@pytest.mark.parametrize("name", ["mlp", "lenet", "reused"])
def test_float32_inputs_up_to_1e30_give_probabilities(link: str, name: str, residual: str) -> None:
    build, shape = EVERY_NETWORK[name]
    x = torch.randn(20, *shape)
    model = RGPR(build(), residual=residual).fit([x])
    for alpha in (1.0, 1e5, 1e10, 1e13, 1e20, 1e25, 1e30, 1e38):
        p = model(alpha * x, link_approx=link)
        assert p.dtype == torch.float32
        assert p.isfinite().all()
        torch.testing.assert_close(p.sum(1), torch.ones(20))
    # Plain Monte Carlo with S samples cannot be nearer to 1/C than its noise.
    off = (p - 1 / p.shape[1]).abs().max()
    assert off < (0.25 if link == "mc" else 1e-5)


@both_residuals
@pytest.mark.parametrize("link", ["probit", "mc", "bridge"])
def test_special_values_stay_in_their_row(link: str, residual: str) -> None:
    network, x = LeNet().eval(), torch.randn(6, 1, 8, 8)
    model = RGPR(network, residual=residual).fit([x])
    model.sigma2 = 1e-9
    spoiled = x.clone()
    spoiled[1, 0, 3, 3] = torch.inf
    spoiled[2, 0, 0, 0] = -torch.inf
    spoiled[3, 0, 1, 1] = torch.nan
    spoiled[4, 0, 1, 1], spoiled[4, 0, 1, 2] = torch.nan, torch.inf

    def predict(batch: Tensor) -> Tensor:
        return model(batch, link_approx=link, generator=torch.Generator().manual_seed(0))

    p = predict(spoiled)
    assert torch.equal(p[[1, 2]], torch.full((2, 10), 0.1))
    assert p[[3, 4]].isnan().all()
    torch.testing.assert_close(p[[0, 5]], predict(x)[[0, 5]])
    v = model.variance(spoiled)
    assert v[[1, 2]].isinf().all()
    assert v[[3, 4]].isnan().all()
    samples = model.predictive_samples(spoiled, 3)
    assert samples[:, [1, 2]].isinf().all()
    assert samples[:, [3, 4]].isnan().all()
    assert samples[:, [0, 5]].isfinite().all()
    score = model.score(spoiled)
    assert score[[1, 2]].isposinf().all()
    assert score[[3, 4]].isnan().all()
    torch.testing.assert_close(score[[0, 5]], model.score(x)[[0, 5]])
    # Also with the residual switched off.
    model.sigma2 = 0
    p = predict(spoiled)
    assert torch.equal(p[[1, 2]], torch.full((2, 10), 0.1))
    assert p[[3, 4]].isnan().all()
    assert model.variance(spoiled)[[3, 4]].isnan().all()
    assert model.explain(spoiled).total[[3, 4]].isnan().all()
    torch.testing.assert_close(model.score(spoiled), score, equal_nan=True)


@both_residuals
def test_special_values_in_regression(residual: str) -> None:
    x = torch.randn(4, 4)
    model = RGPR(mlp(4, 2), likelihood="regression", residual=residual).fit([x])
    spoiled = x.clone()
    spoiled[1, 0], spoiled[2, 0] = torch.inf, torch.nan
    mean, covariance = model(spoiled)
    assert mean[[1, 2]].isnan().all()
    assert covariance[1].diagonal().isinf().all()
    assert covariance[1, 0, 1] == 0
    assert covariance[2].diagonal().isnan().all()
    torch.testing.assert_close((mean[0], covariance[0]), tuple(t[0] for t in model(x)))
    _, variance = model(spoiled, diagonal_output=True)
    assert variance[1].isinf().all()
    assert model.score(spoiled)[1] == torch.inf
    assert model.score(spoiled)[2].isnan()


def test_nan_can_be_an_error() -> None:
    x = torch.randn(4, 4)
    model = RGPR(mlp(), nan="raise").fit([x])
    x[2, 1] = torch.nan
    with pytest.raises(ValueError, match="row 2 of the input holds a NaN"):
        model(x)
    x[2, 1] = torch.inf
    assert torch.equal(model(x)[2], torch.full((3,), 1 / 3))


def test_a_broken_network_is_not_covered_up() -> None:
    network, x = mlp(), torch.randn(8, 4)
    model = RGPR(network).fit([x])
    with torch.no_grad():
        network[-1].weight[0, 0] = torch.nan
    assert model(x).isnan().any()


def test_empty_batch_and_single_row() -> None:
    x = torch.randn(8, 4)
    model = RGPR(mlp()).fit([x])
    assert model(x[:0]).shape == (0, 3)
    assert model.variance(x[:0]).shape == (0,)
    torch.testing.assert_close(model(x[:1]), model(x)[:1])


@both_residuals
def test_gradients_flow_to_the_input(residual: str) -> None:
    x = torch.randn(5, 4).double()
    model = RGPR(mlp().double(), residual=residual).fit([torch.randn(30, 4).double()])
    model.sigma2 = 1
    inputs = (20 * x).requires_grad_()
    assert model.variance(inputs).min() > 0
    assert torch.autograd.gradcheck(model.variance, (inputs,))
    assert torch.autograd.gradcheck(lambda t: model(t), (inputs,))
    assert torch.autograd.gradcheck(model.score, (inputs,))
    # Below the onset the residual has nothing to say, and the gradient is the network's own.
    if residual == "onset":
        inputs = model.residual.coordinates[0].mean[None].clone().requires_grad_()
        [gradient] = torch.autograd.grad(model.variance(inputs), inputs)
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_it_is_an_ordinary_module() -> None:
    network, x = mlp(), torch.randn(30, 4)
    model = RGPR(network).fit([x])
    p = model(x)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), p)
    torch.testing.assert_close(twin.double()(x.double()), p.double(), rtol=1e-5, atol=1e-6)
    half = copy.deepcopy(model).bfloat16()
    assert half.residual.coordinates[0].mean.dtype == torch.float32
    assert half(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(half(x.bfloat16()).float(), p, atol=0.02, rtol=0)
    assert "likelihood='classification', layers=['input', '1', '3']" in repr(model)
    assert torch.equal(model(x), p)  # the original was not cast along
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x), p, atol=0.02, rtol=0)
        assert model(x.bfloat16()).dtype == torch.bfloat16


def test_a_network_without_parameters() -> None:
    x = torch.randn(30, 4)
    model = RGPR(nn.Sequential(nn.Flatten(), nn.ReLU())).fit([x])
    assert model(1e30 * x).isfinite().all()


_IMPORTS = """
import sys, rgpr
heavy = {"laplace", "gpytorch", "matplotlib", "ray", "sklearn", "onnx"} & set(sys.modules)
assert not heavy, heavy
"""


def test_import_is_light() -> None:
    subprocess.run([sys.executable, "-c", _IMPORTS], check=True)
    assert rgpr.__version__
