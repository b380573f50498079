from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import rgpr
from networks import LeNet, Task, Wrapper, blobs, convolutional, mlp
from rgpr.posteriors import SVDKL


def snapshot(network: nn.Module) -> tuple[dict[str, Tensor], list[bool], int]:
    state = {name: t.clone() for name, t in network.state_dict().items()}
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in network.modules())
    return state, [m.training for m in network.modules()], hooks


def assert_unchanged(network: nn.Module, before: tuple[dict[str, Tensor], list[bool], int]) -> None:
    state, modes, hooks = snapshot(network)
    assert (modes, hooks) == before[1:]
    assert all(torch.equal(t, before[0][name]) for name, t in state.items())
    assert all(p.grad is None and p.requires_grad for p in network.parameters())


@pytest.fixture(scope="module")
def fitted(digits: Task) -> SVDKL:
    extractor = SVDKL.split(digits.network)
    return SVDKL.fit(extractor, digits.loader(), inducing=40, epochs=60, lr=0.03, progress=False)


def test_predicts_as_well_as_the_network(digits: Task, fitted: SVDKL) -> None:
    gaussian = fitted(digits.x)
    assert gaussian.mean.shape == gaussian.variance.shape == (len(digits.x), 10)
    assert (gaussian.mean.argmax(1) == digits.y).float().mean() > 0.95
    assert (gaussian.variance > 0).all()


def test_mean_and_variance_are_those_of_the_formula(digits: Task, fitted: SVDKL) -> None:
    """u ~ N(L m, L S L^T) at the inducing points, conditioned by hand, with inverses."""
    x, gps = digits.x[:6], fitted.gps
    features = fitted.network(x).double().detach()
    training = fitted.network(digits.train.tensors[0]).double().detach()
    std = training.std(0, correction=0)
    std = torch.where(std > 0, std, std[std > 0].median())  # dead units, in the others' scale
    z = (features - training.mean(0)) / std
    gaussian = fitted(x)
    for c in range(10):
        scale = gps.kernel.outputscale[c]
        lengthscale = gps.kernel.base_kernel.lengthscale[c]
        Z = gps.points[c]

        def gram(a: Tensor, b: Tensor, s: Tensor = scale, ls: Tensor = lengthscale) -> Tensor:
            return s * (-0.5 * ((a[:, None] - b[None]) / ls).square().sum(-1)).exp()

        K = gps.cholesky[c] @ gps.cholesky[c].T
        torch.testing.assert_close(K, gram(Z, Z), atol=1e-4, rtol=1e-4)
        A = torch.linalg.inv(K) @ gram(Z, z)
        m = gps.cholesky[c] @ gps.weights[c]
        root = gps.cholesky[c] @ gps.root[c]
        variance = gram(z, z) - A.T @ (K - root @ root.T) @ A
        torch.testing.assert_close(gaussian.mean[:, c], (A.T @ m).float(), atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(
            gaussian.variance[:, c], variance.diagonal(), atol=1e-3, rtol=1e-3
        )


def test_below_the_residual(digits: Task, fitted: SVDKL) -> None:
    model = rgpr.RGPR(fitted).fit(digits.loader())
    assert model.likelihood == "classification"
    assert model.layers == ["input", "1", "3"]
    model.sigma2 = 1.0
    for alpha in (1e9, 3e38):
        probabilities = model(alpha * digits.x)
        torch.testing.assert_close(
            probabilities, torch.full_like(probabilities, 0.1), atol=1e-3, rtol=0
        )
    model.sigma2 = 0.0
    gaussian = fitted(digits.x)
    kappa = (1 + math.pi / 8 * gaussian.variance).rsqrt()
    expected = (gaussian.mean.double() * kappa).softmax(-1).float()
    torch.testing.assert_close(model(digits.x), expected)
    assert model(digits.x[:5], link_approx="mc", n_samples=3).shape == (5, 10)
    with pytest.raises(TypeError, match="SVDKL cannot be saved: it predicts through an object"):
        model.save("never.safetensors")


def test_fitting_is_seeded_and_changes_nothing_of_the_users() -> None:
    x, y = blobs()
    network = mlp().train()
    before = snapshot(network)
    extractor = SVDKL.split(network)
    generator = torch.get_rng_state()
    options = {"inducing": 8, "epochs": 3, "progress": False}
    first, again, other = (
        SVDKL.fit(extractor, [(x, y)], seed=s, **options)(x).mean for s in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert_unchanged(network, before)
    before = snapshot(extractor)
    posterior = SVDKL.fit(extractor, [(x, y)], train_extractor=True, **options)
    rgpr.RGPR(posterior).fit([x])(x)
    assert_unchanged(extractor, before)
    assert not torch.equal(posterior.network[0].weight, extractor[0].weight)


def test_training_the_extractor_learns() -> None:
    x, y = blobs()
    extractor = SVDKL.split(mlp())
    posterior = SVDKL.fit(
        extractor, [(x, y)], inducing=20, epochs=150, lr=0.03, train_extractor=True, progress=False
    )
    assert (posterior(x).mean.argmax(1) == y).float().mean() > 0.95


def test_regression() -> None:
    x = torch.randn(150, 2)
    y = 100 + 20 * torch.stack([x[:, 0].sin(), x.sum(1)], dim=1) + torch.randn(150, 2)
    posterior = SVDKL.fit(
        SVDKL.split(mlp(2, 2, width=30)),
        [(x, y)],
        likelihood="regression",
        inducing=40,
        epochs=400,
        lr=0.05,
        progress=False,
    )
    gaussian = posterior(x)
    assert gaussian.mean.shape == (150, 2)
    assert ((gaussian.mean - y).square().mean(0) < 0.1 * y.var(0)).all()
    far = posterior(1e9 * x[:1])
    # Far away the mean and variance of the prior, in the units of the targets.
    torch.testing.assert_close(far.mean[0], y.mean(0), rtol=1e-3, atol=0)
    model = rgpr.RGPR(posterior).fit([x])
    model.sigma2 = 1.0
    small, large = (model(a * x[:1], diagonal_output=True)[1] for a in (1e6, 1e8))
    torch.testing.assert_close(large / small, torch.full((1, 2), 1e6).double(), rtol=1e-2, atol=0)


def test_half_precision_is_for_the_extractor_alone(digits: Task, fitted: SVDKL) -> None:
    half = copy.deepcopy(fitted).bfloat16()
    assert half.gps.cholesky.dtype == half.gps.kernel.outputscale.dtype == torch.float64
    mean = half(digits.x.bfloat16()).mean
    assert mean.dtype == torch.bfloat16
    assert (mean.argmax(1) == digits.y).float().mean() > 0.95


@pytest.mark.parametrize(
    ("network", "shape", "head", "size"),
    [
        (mlp(), (4,), None, 16),
        (convolutional(), (2, 8, 8), None, 24),
        (LeNet(), (1, 8, 8), "classifier.4", 16),
        (LeNet(), (1, 8, 8), "classifier.1", 16),
        (Wrapper(mlp()), (4,), None, 16),
    ],
)
def test_split_gives_the_input_of_the_head(
    network: nn.Module, shape: tuple[int, ...], head: str | None, size: int
) -> None:
    network.eval()
    extractor, x = SVDKL.split(network, head), torch.randn(3, *shape)
    if head == "classifier.1":
        # What comes after the head still runs: 16 units are expected there, 32 arrive.
        with pytest.raises(RuntimeError):
            extractor(x)
        return
    features = extractor(x)
    assert features.shape == (3, size)
    linear = [m for m in network.modules() if isinstance(m, nn.Linear)][-1]
    torch.testing.assert_close(linear(features), network(x))


def test_errors() -> None:
    x, y = blobs()
    extractor = SVDKL.split(mlp())
    with pytest.raises(ValueError, match=r"returned \(120, 4, 8, 8\).*nn.Flatten"):
        SVDKL.fit(nn.Conv2d(2, 4, 1), [(torch.randn(120, 2, 8, 8), y)], progress=False)
    with pytest.raises(ValueError, match="likelihood='softmax'"):
        SVDKL.fit(extractor, [(x, y)], likelihood="softmax", progress=False)
    with pytest.raises(ValueError, match="labels run from 0 to 2 with 2 classes"):
        SVDKL.fit(extractor, [(x, y)], classes=2, progress=False)
    with pytest.raises(TypeError, match=r"labels have dtype torch.float32"):
        SVDKL.fit(extractor, [(x, y.float())], progress=False)
    with pytest.raises(ValueError, match=r"labels have shape \(120, 1\)"):
        SVDKL.fit(extractor, [(x, y[:, None])], progress=False)
    with pytest.raises(ValueError, match="targets hold values that are not finite"):
        SVDKL.fit(extractor, [(x, y / 0)], likelihood="regression", progress=False)
    with pytest.raises(ValueError, match=r"targets have shape \(120, 2, 2\)"):
        SVDKL.fit(extractor, [(x, torch.ones(120, 2, 2))], likelihood="regression", progress=False)
    with pytest.raises(ValueError, match="no layer 'head'"):
        SVDKL.split(mlp(), "head")
    with pytest.raises(ValueError, match="no linear layer"):
        SVDKL.split(nn.Sequential(nn.ReLU()))
    with pytest.raises(ValueError, match="no features before it"):
        SVDKL.split(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="features that are not finite"):
        SVDKL.fit(nn.Sequential(nn.Linear(4, 2), Infinite()), [(x, y)], progress=False)


class Infinite(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 0
