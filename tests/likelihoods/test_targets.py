"""Targets of every harmless form are used rightly, and all others are refused with words."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import rgpr
from networks import blobs, mlp
from rgpr.likelihoods import LIKELIHOODS

CLASSES, LABELS = LIKELIHOODS["classification"], LIKELIHOODS["multilabel"]
NUMBERS = LIKELIHOODS["regression"]


@given(st.integers(2, 6), st.lists(st.integers(0, 5), min_size=1, max_size=9), st.data())
def test_every_form_of_classes(classes: int, drawn: list[int], data: st.DataObject) -> None:
    """Any dtype, ``(B,)`` or ``(B, 1)``, indices or one-hot rows: always the same classes."""
    y = torch.tensor(drawn) % classes
    dtype = data.draw(st.sampled_from([torch.uint8, torch.int32, torch.int64, torch.float32]))
    hot = nn.functional.one_hot(y, classes)
    for form in (y, y[:, None], hot):
        found = CLASSES.target(form.to(dtype), (len(y), classes), 0)
        assert found.dtype == torch.long
        assert torch.equal(found, y)
    if classes == 2:  # the labels of a binary cross-entropy
        for form in (y.float(), y.bool(), y[:, None].double()):
            assert torch.equal(CLASSES.target(form, (len(y), 1), 0), y)


def whole(count: int = 40) -> Tensor:
    return torch.arange(count) % 3


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (torch.randn(40), "batch 0 has targets such as .*say likelihood='regression'"),
        (torch.randn(40, 3), "batch 0 has targets such as .*say likelihood='regression'"),
        (torch.rand(40), r"say likelihood='regression'.*\(y > 0\.5\)"),
        (torch.rand(40, 3).softmax(1), r"batch 0 has soft labels.*y\.argmax\(1\)"),
        (torch.tensor([[1, 1, 0]] * 40), "row 0 has 2 ones.*likelihood='multilabel'"),
        (torch.tensor([[0.0, 0, 0]] * 40), "row 0 has 0 ones.*likelihood='multilabel'"),
        (torch.full((40,), 3), r"batch 0 has the label 3 .*3 classes, 0 to 2"),
        (torch.full((40,), 7.0), r"the label 7 .*0 to 2.*likelihood='regression'"),
        (torch.where(whole() == 1, -100, whole()), "the label -100 .*remove these rows"),
        (whole() - 1, "the label -1 .*remove these rows"),
        (torch.full((40,), torch.nan), "no label in 40 of its 40 rows.*remove rows"),
        (torch.where(whole() == 1, torch.nan, 0.0), "first in row 1.*remove rows without a label"),
        (torch.full((40, 3), torch.nan), "no label in 40 of its 40 rows"),
        (whole(39), r"\(39,\) for 40 inputs.*expected class indices"),
        (torch.zeros(40, 2, 2).long(), r"\(40, 2, 2\).*expected class indices \(B,\)"),
        (torch.tensor(1), r"shape \(\) for 40 inputs"),
    ],
)
def test_no_classes(target: Tensor, message: str) -> None:
    """In ``fit``, ``calibrate`` and ``tune`` alike; nothing is replaced by predictions."""
    x = torch.randn(40, 4)
    network = mlp()
    fitted = rgpr.RGPR(network, residual="paper").fit([x])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        uses: tuple[Callable[..., object], ...] = (
            rgpr.RGPR(network).fit,
            rgpr.RGPR(network, residual="paper").fit,
            fitted.calibrate,
            fitted.tune,
        )
        for use in uses:
            with pytest.raises(ValueError, match=message):
                use([(x, target)])


def test_two_classes_of_both_signs() -> None:
    x, y = blobs(2, n=80)
    for form in (2 * y - 1, 2.0 * y - 1):
        for network in (mlp(4, 1), mlp(4, 2)):
            with pytest.raises(ValueError, match=r"the label -1 .*give \(y > 0\)\.long\(\)"):
                rgpr.RGPR(network).fit([(x, form)])


def test_four_numbers_a_row_are_no_four_classes() -> None:
    hot = nn.functional.one_hot(torch.arange(9) % 4, 4)
    assert torch.equal(CLASSES.target(hot, (9, 4), 0), torch.arange(9) % 4)
    with pytest.raises(ValueError, match=r"\(9, 2, 2\).*one-hot rows \(B, 4\)"):
        CLASSES.target(hot.reshape(9, 2, 2), (9, 4), 0)


def test_labels_that_pandas_calls_missing() -> None:
    pd = pytest.importorskip("pandas")
    x = np.random.default_rng(0).normal(size=(40, 4))
    y = pd.Series(whole().numpy(), dtype="Int64")
    model = rgpr.RGPR(mlp()).fit(x, y)
    for missing in (y.mask(y == 1), pd.DataFrame({"y": y.mask(y == 1)})):
        for use in (rgpr.RGPR(mlp()).fit, model.calibrate):
            with pytest.raises(ValueError, match=r"first in row 1.*remove rows"):
                use(x, missing)


def test_the_batch_is_named() -> None:
    x = torch.randn(40, 4)
    with pytest.raises(ValueError, match="batch 1 has the label 5"):
        rgpr.RGPR(mlp()).fit([(x, whole()), (x, torch.full((40,), 5))])


def test_forms_of_labels_give_one_fit() -> None:
    x, y = blobs(3, n=90)
    network = mlp()
    expected = rgpr.RGPR(network).fit([(x, y)]).variance(3 * x)
    for form in (
        y.double(),
        y[:, None],
        nn.functional.one_hot(y, 3).float(),
        y.numpy(),
        y.tolist(),
    ):
        assert torch.equal(rgpr.RGPR(network).fit([(x, form)]).variance(3 * x), expected)
    predicted = rgpr.RGPR(network).fit([x]).variance(3 * x)
    assert not torch.equal(predicted, expected)


def test_targets_of_a_binary_cross_entropy() -> None:
    x, y = blobs(2, n=80)
    network = mlp(4, 1)
    expected = rgpr.RGPR(network).fit([(x, y)])
    for form in (y.float(), y[:, None].float()):
        model = rgpr.RGPR(network).fit([(x, form)])
        assert torch.equal(model.variance(3 * x), expected.variance(3 * x))
        model.calibrate([(x, form)])
        assert model.predict_set(x).shape == (80, 2)
    with pytest.raises(ValueError, match=r"targets such as .*likelihood='regression'"):
        rgpr.RGPR(network).fit([(x, torch.randn(80))])
    with pytest.raises(ValueError, match=r"the label 23 .*likelihood='regression'"):
        rgpr.RGPR(network).fit([(x, torch.full((80,), 23.0))])


@pytest.mark.parametrize("words", [["cat", "dog"] * 20, ("cat",) * 40, np.array(["cat"] * 40)])
def test_words(words: object) -> None:
    x = torch.randn(40, 4)
    model = rgpr.RGPR(mlp(), residual="paper").fit([x])
    for use in (rgpr.RGPR(mlp()).fit, model.calibrate, model.tune):
        with pytest.raises(TypeError, match=r"words, such as 'cat'.*names\.index"):
            use([(x, words)])
        with pytest.raises(TypeError, match=r"words, such as 'cat'.*names\.index"):
            use(x, words)


def test_words_of_pandas() -> None:
    pd = pytest.importorskip("pandas")
    x, words = torch.randn(40, 4), pd.Series(["cat", "dog"] * 20)
    for form in (words, words.astype("category"), words.astype("string")):
        with pytest.raises(TypeError, match=r"words, such as 'cat'.*names\.index"):
            rgpr.RGPR(mlp()).fit(x, form)


def test_no_numbers_at_all() -> None:
    x = torch.randn(40, 4)
    with pytest.raises(TypeError, match=r"targets of type dict.*yield the inputs alone"):
        rgpr.RGPR(mlp()).fit([(x, {"boxes": x})])


def test_labels_that_are_independent() -> None:
    y = torch.randint(2, (9, 4))
    for form in (y, y.bool(), y.double(), y.to(torch.uint8)):
        assert torch.equal(LABELS.target(form, (9, 4), 0), y)
    assert torch.equal(LABELS.target(y[:, 0].float(), (9, 1), 0), y[:, :1])
    for bad, message in (
        (y[:, 0], r"\(9, 4\); expected \(B, 4\).*likelihood='classification'"),
        (y[:, :3], r"shape \(9, 3\).*expected \(B, 4\)"),
        (y[:8], r"shape \(8, 4\) for 9 inputs"),
        (y - 1, "target -1.*if -1 marks labels that are not known, remove these rows"),
        (y * 0.5 + 0.1, r"a label is there \(1\) or not \(0\).*y > 0\.5"),
        (y * torch.nan, "no label in 9 of its 9 rows.*remove rows without a label"),
        (y * 2 - 1, r"target -1.*give \(y > 0\) if -1 stands"),
    ):
        with pytest.raises(ValueError, match="batch 3 has .*" + message):
            LABELS.target(bad, (9, 4), 3)


def test_numbers() -> None:
    y = torch.randn(9)
    assert torch.equal(NUMBERS.target(y, (9, 1), 0), y[:, None].double())
    x = torch.randn(40, 4)
    for use in (
        rgpr.RGPR(mlp(4, 2), likelihood="regression").fit,
        rgpr.RGPR(mlp(4, 2), likelihood="regression").fit([x]).calibrate,
    ):
        with pytest.raises(ValueError, match=r"\(40, 1\).*heteroscedastic.*quantiles.*\[:, :1\]"):
            use([(x, torch.randn(40, 1))])
        with pytest.raises(ValueError, match="batch 0 has targets that are not finite"):
            use([(x, torch.full((40, 2), torch.inf))])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("quantile", r"returns the median alone.*likelihood='regression'"),
        ("heteroscedastic", r"returns the mean alone.*likelihood='regression'"),
        ("segmentation", r"score of a whole input.*nn\.AdaptiveAvgPool2d"),
        ("dense", r"score of a whole input"),
        ("poisson", "logarithm of the rate"),
        ("ordinal", "ignores their order"),
        ("bce", "likelihood='classification', which takes one output"),
        ("ranking", "wrap the network so that it returns logits or numbers"),
    ],
)
def test_words_for_likelihoods_that_are_not_there(name: str, message: str) -> None:
    known = "'classification', 'multilabel', 'regression'"
    with pytest.raises(ValueError, match=f"likelihood='{name}' is not one of {known}: .*{message}"):
        rgpr.RGPR(mlp(), likelihood=name)


class MeanAlone(nn.Module):
    """The first of two outputs, a mean and a log-variance."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)[:, :1]


def test_the_remedy_for_a_mean_and_a_variance() -> None:
    x, y = torch.randn(60, 4), torch.randn(60, 1)
    model = rgpr.RGPR(MeanAlone(mlp(4, 2)), likelihood="regression").fit([(x, y)])
    model.calibrate([(torch.randn(50, 4), torch.randn(50, 1))])
    low, high = model.interval(x)
    assert low.shape == high.shape == (60, 1)


@pytest.mark.parametrize("likelihood", ["classification", "multilabel", "regression"])
def test_dense_outputs(likelihood: str) -> None:
    x = torch.randn(50, 2, 8, 8)
    network = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))
    with pytest.raises(ValueError, match=r"\(50, 3, 8, 8\).*mean over positions.*score"):
        rgpr.RGPR(network, likelihood=likelihood).fit([x])
    tokens = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"\(50, 2, 3\).*o\.mean\(1\).*score, p_value and flag"):
        rgpr.RGPR(tokens, likelihood=likelihood).fit([x[:, :, 0]])


def test_the_remedy_for_dense_outputs() -> None:
    x = torch.randn(80, 2, 8, 8)
    network = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))
    pooled = nn.Sequential(network, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = rgpr.RGPR(pooled, likelihood="regression").fit([x[:40]])
    model.calibrate([x[40:]])
    assert (model.score(100 * x) > model.score(x)).all()
    assert model.flag(100 * x).all()


ONE_OUTPUT = "this network has one output"


def one_output() -> nn.Module:
    return mlp(2, 1).eval()


def test_one_output_without_a_word_about_it_is_warned_of() -> None:
    x = torch.randn(40, 2)
    with pytest.warns(UserWarning, match=ONE_OUTPUT) as caught:
        model = rgpr.RGPR(one_output()).fit([x], progress=False)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "likelihood='classification'" in str(caught[0].message)
    assert "likelihood='regression'" in str(caught[0].message)
    assert model.likelihood == "classification"
    assert model(x).shape == (40, 2)


def test_one_output_that_is_known_is_not_warned_of(tmp_path: Path) -> None:
    x = torch.randn(40, 2)
    y = (x[:, 0] > 0).long()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for said in ("classification", "regression", "multilabel"):
            model = rgpr.RGPR(one_output(), likelihood=said).fit([x], progress=False)
        for target in (y, y.float()[:, None], y.bool()):
            rgpr.RGPR(one_output()).fit([(x, target)], progress=False)
        rgpr.RGPR(one_output()).fit([(x[:20], y[:20]), (x[20:], y[20:])], progress=False)
        rgpr.RGPR(mlp(2, 2).eval()).fit([x], progress=False)
        posterior = rgpr.posteriors.MAP(one_output())
        posterior.likelihood = "regression"  # as one that was fitted to numbers has it
        rgpr.RGPR(posterior).fit([x], progress=False)
        model.save(tmp_path / "model.safetensors")
        rgpr.load(tmp_path / "model.safetensors", one_output()).fit([x], progress=False)
        taken = rgpr.RGPR(one_output())
        taken.load_state_dict(model.state_dict())  # which says what the outputs are
        taken.fit([x], progress=False)
