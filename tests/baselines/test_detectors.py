from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from networks import EVERY_NETWORK, InPlace, Task, Wrapper, blobs, convolutional, mlp
from rgpr.baselines import detectors
from rgpr.baselines.detectors import (
    DETECTORS,
    KNN,
    Detector,
    Energy,
    Mahalanobis,
    MaxSoftmax,
    ViM,
    register_detector,
)


def loader(x: Tensor, y: Tensor, batch_size: int = 32) -> DataLoader:
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def build(name: str, network: nn.Module, **options: Any) -> Detector:
    if name == "vim":
        pytest.importorskip("pytorch_ood")
    if name == "knn":
        options = {"k": 5, **options}
    return DETECTORS[name](network, **options)


def features(network: nn.Sequential, x: Tensor) -> np.ndarray:
    """What goes into the last layer, in float64."""
    with torch.no_grad():
        return network[:-1](x).double().numpy()


def mahalanobis(train: np.ndarray, y: np.ndarray, h: np.ndarray, shrinkage: float) -> np.ndarray:
    """Lee et al. (2018), written out."""
    classes = np.unique(y)
    means = np.stack([train[y == c].mean(0) for c in classes])
    covariance = np.zeros((train.shape[1], train.shape[1]))
    for row, label in zip(train, y, strict=True):
        covariance += np.outer(row - means[label], row - means[label]) / len(train)
    scale = np.trace(covariance) / len(covariance)
    covariance = (1 - shrinkage) * covariance + shrinkage * scale * np.eye(len(covariance))
    precision = np.linalg.inv(covariance)
    return np.array([min((r - m) @ precision @ (r - m) for m in means) for r in h])


# -- against references ---------------------------------------------------------------------------


def test_max_softmax_is_one_minus_the_confidence() -> None:
    network, x = mlp(), torch.randn(20, 4)
    expected = 1 - network(x).double().softmax(1).amax(1)
    torch.testing.assert_close(MaxSoftmax(network).score(x), expected.detach())


def test_max_softmax_ranks_inputs_of_confidence_one() -> None:
    network = nn.Linear(2, 2)
    network.load_state_dict({"weight": torch.eye(2), "bias": torch.zeros(2)})
    x = torch.tensor([[40.0, 0.0], [80.0, 0.0], [160.0, 0.0]])
    assert (network(x).softmax(1).amax(1) == 1).all()
    scores = MaxSoftmax(network).score(x)
    torch.testing.assert_close(scores, torch.tensor([-40.0, -80, -160]).double().exp())


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_energy_is_a_log_sum(temperature: float) -> None:
    network, x = mlp(), torch.randn(20, 4)
    logits = network(x).detach().double().numpy()
    expected = -temperature * np.log(np.exp(logits / temperature).sum(1))
    np.testing.assert_allclose(Energy(network, temperature).score(x), expected)
    ood = pytest.importorskip("pytorch_ood.detector")
    theirs = ood.EnergyBased(None, t=temperature).predict_logits(network(x)).detach()
    np.testing.assert_allclose(theirs, expected, rtol=1e-5)


@pytest.mark.parametrize("shrinkage", [1e-3, 0.3])
def test_mahalanobis_against_numpy(shrinkage: float) -> None:
    network, (x, y) = mlp(), blobs()
    new = torch.randn(9, 4) * 3
    detector = Mahalanobis(network, shrinkage=shrinkage).fit(loader(x, y), progress=False)
    expected = mahalanobis(features(network, x), y.numpy(), features(network, new), shrinkage)
    np.testing.assert_allclose(detector.score(new), expected, rtol=1e-8)


def test_mahalanobis_adds_up_the_automatic_layers_pooled() -> None:
    network = convolutional()
    x, y, new = torch.rand(60, 2, 8, 8), torch.arange(60) % 3, torch.rand(5, 2, 8, 8)
    detector = Mahalanobis(network, "auto").fit(loader(x, y, 7), progress=False)
    assert detector.layers == ["2", "5", "7:input"]
    expected = np.zeros(5)
    for depth in (3, 6, 7):
        with torch.no_grad():
            h, g = (network[:depth](t).double() for t in (x, new))
            h, g = (t.numpy() if t.dim() == 2 else t.mean((2, 3)).numpy() for t in (h, g))
        expected += mahalanobis(h, y.numpy(), g, 1e-3)
    np.testing.assert_allclose(detector.score(new), expected, rtol=1e-6)


def test_knn_against_brute_force() -> None:
    network, (x, y) = mlp(), blobs()
    new = torch.cat([torch.randn(9, 4) * 3, x[:3]])
    detector = KNN(network, k=7).fit(loader(x, y), progress=False)
    bank, h = (features(network, t) for t in (x, new))
    bank, h = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (bank, h))
    expected = [sorted(np.linalg.norm(bank - row, axis=1))[6] for row in h]
    np.testing.assert_allclose(detector.score(new), expected, atol=1e-6)


def test_knn_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    network, (x, y) = mlp(), blobs()
    detector = KNN(network, k=7).fit(loader(x, y), progress=False)
    whole = detector.score(x)
    monkeypatch.setattr(KNN, "_AT_ONCE", 5 * len(x))
    torch.testing.assert_close(detector.score(x), whole)


@pytest.mark.parametrize("bias", [True, False])
def test_vim_against_numpy(bias: bool) -> None:
    pytest.importorskip("pytorch_ood")
    network, (x, y) = mlp(), blobs()
    if not bias:
        network[-1] = nn.Linear(16, 3, bias=False)
    new = torch.randn(9, 4) * 3
    detector = ViM(network, dim=5).fit(loader(x, y), progress=False)
    weight = network[-1].weight.detach().double().numpy()
    offset = network[-1].bias.detach().double().numpy() if bias else np.zeros(3)
    origin = -np.linalg.pinv(weight) @ offset
    bank, h = (features(network, t) for t in (x, new))
    _, directions = np.linalg.eigh((bank - origin).T @ (bank - origin))
    rest = directions[:, : 16 - 5]
    alpha = (bank @ weight.T + offset).max(1).mean()
    alpha /= np.linalg.norm((bank - origin) @ rest, axis=1).mean()
    energy = np.log(np.exp(h @ weight.T + offset).sum(1))
    expected = alpha * np.linalg.norm((h - origin) @ rest, axis=1) - energy
    np.testing.assert_allclose(detector.score(new), expected, rtol=1e-3, atol=1e-4)


# -- what all of them promise ---------------------------------------------------------------------


@pytest.mark.parametrize("name", DETECTORS)
def test_batches_do_not_matter(name: str) -> None:
    network, (x, y) = mlp(), blobs()
    order = torch.randperm(len(x))
    scores = []
    for size, rows in ((1, order), (13, order), (len(x), torch.arange(len(x)))):
        detector = build(name, network).fit(loader(x[rows], y[rows], size), progress=False)
        scores.append(torch.cat([detector.score(part) for part in x.split(size)]))
    assert scores[0].shape == (len(x),)
    assert scores[0].dtype == torch.float64
    # pytorch-ood computes in float32.
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if name == "vim" else {"rtol": 1e-5, "atol": 1e-5}
    for other in scores[1:]:
        torch.testing.assert_close(other, scores[0], **tolerance)


def test_mahalanobis_keeps_its_digits_far_from_the_origin() -> None:
    network, (x, y) = nn.Sequential(nn.Identity(), nn.Linear(4, 3)).double(), blobs()
    x = x.double()
    near = Mahalanobis(network).fit(loader(x, y, 7), progress=False).score(x)
    far = Mahalanobis(network).fit(loader(x + 1e6, y, 7), progress=False).score(x + 1e6)
    torch.testing.assert_close(far, near, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", DETECTORS)
def test_network_is_left_as_it_was(name: str) -> None:
    network = nn.Sequential(
        nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(), nn.Linear(16, 3)
    )
    network[3].eval()
    x, y = blobs()
    modes = [module.training for module in network.modules()]
    before = {k: t.clone() for k, t in network.state_dict().items()}
    detector = build(name, network).fit([(x, y)], progress=False)
    rng = torch.get_rng_state()
    first = detector.score(x)
    assert torch.equal(first, detector.score(x))
    assert torch.equal(rng, torch.get_rng_state())
    assert not first.requires_grad
    assert [module.training for module in network.modules()] == modes
    assert all(torch.equal(t, before[k]) for k, t in network.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in network.modules())


@pytest.mark.parametrize("name", DETECTORS)
def test_one_pass_per_score(name: str) -> None:
    network, (x, y) = mlp(), blobs()
    detector = build(name, network).fit([(x, y)], progress=False)
    passes = []
    handle = network[0].register_forward_hook(lambda *_: passes.append(1))
    detector.score(x)
    handle.remove()
    assert len(passes) == 1


@pytest.mark.parametrize("network", sorted(EVERY_NETWORK))
@pytest.mark.parametrize("name", DETECTORS)
def test_every_network(name: str, network: str) -> None:
    make, shape = EVERY_NETWORK[network]
    built = make().eval()
    x = torch.rand(60, *shape)
    with torch.no_grad():
        classes = built(x[:2].clone()).shape[1]
    y = torch.arange(60) % classes
    kept = x.clone()
    for options in ({}, {"layers": "auto"}) if name == "mahalanobis" else ({},):
        scores = build(name, built, **options).fit(loader(x, y), progress=False).score(x)
        assert scores.shape == (60,)
        assert bool(scores.isfinite().all())
    assert torch.equal(x, kept)


@pytest.mark.parametrize("name", ["mahalanobis", "knn"])
def test_noise_is_told_from_digits(name: str, digits: Task) -> None:
    noise = torch.rand(len(digits.x), 64, generator=torch.Generator().manual_seed(1))
    detector = build(name, digits.network, **({"k": 50} if name == "knn" else {}))
    detector.fit(digits.loader(), progress=False)
    scores = torch.cat([detector.score(digits.x), detector.score(noise)])
    truth = torch.arange(len(scores)) >= len(digits.x)
    assert roc_auc_score(truth, scores) > 0.9


def test_far_away_is_strange_to_mahalanobis(digits: Task) -> None:
    detector = Mahalanobis(digits.network, "auto").fit(digits.loader(), progress=False)
    assert detector.score(100 * digits.x).min() > 10 * detector.score(digits.x).max()


# -- detectors of one's own -----------------------------------------------------------------------


@pytest.fixture
def registry() -> Iterator[None]:
    """Takes what a test registers out of the list again."""
    before = dict(DETECTORS)
    yield
    DETECTORS.clear()
    DETECTORS.update(before)


class Norm(Detector):
    def _score(self, x: Tensor) -> Tensor:
        return x.flatten(1).norm(dim=1).double()


@pytest.mark.usefixtures("registry")
def test_a_detector_from_outside_is_listed() -> None:
    assert register_detector("norm")(Norm) is Norm
    assert list(DETECTORS)[-1] == "norm"
    x = torch.randn(5, 4)
    torch.testing.assert_close(build("norm", mlp()).fit([]).score(x), x.norm(dim=1).double())
    register_detector("norm")(Norm)  # a notebook's cell is run twice
    with pytest.raises(ValueError, match=r"'knn' is rgpr\..*\.KNN already; choose another name"):
        register_detector("knn")(Norm)


@pytest.mark.usefixtures("registry")
def test_a_new_file_in_the_folder_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "length.py").write_text(
        "from rgpr.baselines.detectors.energy import Energy\n"
        "from rgpr.baselines.detectors.base import register_detector\n"
        "@register_detector('length')\n"
        "class Length(Energy): pass\n"
    )
    path = [*detectors.__path__, str(tmp_path)]
    monkeypatch.setattr(detectors, "__path__", path)
    assert "length" not in DETECTORS
    # The package's own file, once more: it goes through its folders.
    exec(Path(str(detectors.__file__)).read_text(), vars(detectors).copy())
    assert DETECTORS["length"].__module__ == "rgpr.baselines.detectors.length"
    monkeypatch.delitem(sys.modules, "rgpr.baselines.detectors.length")


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mahalanobis", "knn", "vim"])
def test_score_before_fit_says_so(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"not fitted; call fit\(train_loader\)"):
        build(name, mlp()).score(torch.rand(2, 4))


class Scaled(nn.Module):
    """Its logits are not its last linear layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) / 2


class Pooled(nn.Module):
    """No linear layer at all."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x)).mean((2, 3))


@pytest.mark.parametrize("name", ["mahalanobis", "knn", "vim"])
@pytest.mark.parametrize(("network", "shape"), [(Scaled, (4,)), (Pooled, (1, 4, 4))])
def test_networks_that_do_not_end_in_a_linear_layer(name, network, shape) -> None:  # type: ignore[no-untyped-def]
    detector = build(name, network())
    batches = [(torch.rand(12, *shape), torch.arange(12) % 3)]
    with pytest.raises(ValueError, match=r"reads what goes into the last nn.Linear"):
        detector.fit(batches, progress=False)


def test_mahalanobis_reads_named_layers_without_a_linear_layer() -> None:
    network = Pooled()
    batches = [(torch.rand(30, 1, 4, 4), torch.arange(30) % 3)]
    detector = Mahalanobis(network, ["conv"]).fit(batches, progress=False)
    assert detector.score(batches[0][0]).shape == (30,)


def test_a_nan_stays_in_its_row() -> None:
    network, (x, y) = mlp(), blobs()
    for name in DETECTORS:
        detector = build(name, network).fit([(x, y)], progress=False)
        expected = detector.score(x[:3])
        new = x[:3].clone()
        new[1] = torch.nan
        scores = detector.score(new)
        torch.testing.assert_close(scores[[0, 2]], expected[[0, 2]])
        assert bool(scores[1].isnan()), name


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda n: Energy(n, 0.0), r"temperature = 0.0 must be positive"),
        (lambda n: Mahalanobis(n, shrinkage=2.0), r"shrinkage = 2.0; expected a share"),
        (lambda n: Mahalanobis(n, "hiden"), r"no layer 'hiden' runs in this network"),
        (lambda n: Mahalanobis(n, "input").fit([blobs()]), r"chooses no hidden layer"),
        (lambda n: KNN(n, 0), r"k = 0; expected the number of a neighbour"),
        (lambda n: KNN(n, 500).fit([blobs()]), r"120 training examples have no 500-th"),
        (lambda n: ViM(n, 0), r"dim = 0; the principal space"),
        (lambda n: ViM(n, 16).fit([blobs()]), r"dim = 16 of 16 features leaves no residual"),
        (lambda n: Mahalanobis(n).fit([blobs(2)]), r"no training example is of the classes \[2\]"),
        (lambda n: Mahalanobis(n).fit([blobs(4)]), r"labels lie between 0 and 3; with 3 logits"),
        (lambda n: Mahalanobis(n, shrinkage=0.0).fit([blobs(n=6)]), r"has no inverse with"),
        (lambda n: KNN(n).fit([(torch.rand(4, 4), torch.rand(4))]), r"batch 0: labels have dtype"),
    ],
)
def test_bad_arguments(make, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make(mlp())


def test_vim_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_ood.detector", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[ood\]'"):
        ViM(mlp())


def test_probabilities_are_refused() -> None:
    network = nn.Sequential(mlp(), nn.Softmax(1))
    with pytest.raises(ValueError, match="Leave out the final softmax"):
        MaxSoftmax(network).score(torch.rand(3, 4))


def test_something_else_than_logits_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a tensor of logits"):
        Energy(nn.LSTM(4, 3)).score(torch.rand(3, 4))


def test_wrapped_networks_keep_their_features() -> None:
    network, (x, y) = mlp(), blobs()
    plain = Mahalanobis(network).fit([(x, y)], progress=False).score(x)
    wrapped = Mahalanobis(Wrapper(network)).fit([(x, y)], progress=False).score(x)
    assert torch.equal(plain, wrapped)
    kept = x.clone()
    Mahalanobis(InPlace()).fit([(x, y)], progress=False).score(x)
    assert torch.equal(x, kept)
