"""Data come in many forms, and a model made of one form is that of every other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import rgpr
from networks import mlp
from rgpr._network.sources import Batches, as_batches
from rgpr.baselines.detectors import DETECTORS
from rgpr.posteriors import SWAGCollector, Temperature

# So few that calibrating searches for nothing.
ROWS = 90
X = np.random.default_rng(0).normal(size=(ROWS, 4))
Y = np.random.default_rng(1).integers(0, 3, ROWS)


def tensors() -> tuple[Tensor, Tensor]:
    return torch.tensor(X, dtype=torch.float32), torch.tensor(Y)


def frame() -> Any:
    pd = pytest.importorskip("pandas")
    return pd.DataFrame(X, columns=list("abcd"))


def hugging_face(form: str | None) -> Any:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()})
    return data if form is None else data.with_format(form)


def series() -> Any:
    return pytest.importorskip("pandas").Series(Y)


FORMS: dict[str, Any] = {
    "tensors": lambda: tensors(),
    "numpy": lambda: (X, Y),
    "float32": lambda: (X.astype(np.float32), Y.astype(np.int16)),
    "big-endian": lambda: (X.astype(">f8"), Y.astype(">i4")),
    "backwards": lambda: (X[::-1][::-1], Y[::-1][::-1]),
    "targets in a list": lambda: (X, Y.tolist()),
    "frame": lambda: (frame(), series()),
    "columns": lambda: {"x": X, "y": Y, "name": ["a"] * ROWS},
    "data set": lambda: TensorDataset(*tensors()),
    "Hugging Face": lambda: hugging_face(None),
    "Hugging Face, torch": lambda: hugging_face("torch"),
    "Hugging Face, numpy": lambda: hugging_face("numpy"),
    "generator": lambda: ((x, y) for x, y in zip(*(t.split(64) for t in tensors()), strict=True)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_fits_and_calibrates_the_same_model(form: str) -> None:
    network = mlp()
    x, y = tensors()
    loader = DataLoader(TensorDataset(x, y), batch_size=128)
    expected, model = rgpr.RGPR(network).fit(loader), rgpr.RGPR(network).fit(FORMS[form]())
    torch.testing.assert_close(model.score(x), expected.score(x), rtol=1e-5, atol=1e-5)
    # Both are the same model now, of which few examples choose nothing but references.
    with pytest.warns(UserWarning, match="training inputs that fit saw"):
        expected.calibrate([(x, y)])
    with pytest.warns(UserWarning, match="training inputs that fit saw"):
        report = model.calibrate(FORMS[form]())
    assert report.labelled
    torch.testing.assert_close(model(x), expected(x), rtol=1e-5, atol=1e-6)
    assert (model.predict_set(x) == expected.predict_set(x)).float().mean() > 0.99


def test_inputs_and_targets_as_two_arguments() -> None:
    network, (x, y) = mlp(), tensors()
    pair = rgpr.RGPR(network, residual="paper").fit((x[:60], y[:60]))
    two = rgpr.RGPR(network, residual="paper").fit(X[:60], Y[:60])
    torch.testing.assert_close(two.sigma2, pair.sigma2)
    assert two.calibrate(X[60:], Y[60:]).nll == pair.calibrate((x[60:], y[60:])).nll
    results = [
        pair.tune([(x[60:], y[60:])], "ood", ood=[3 * x]),
        two.tune(X[60:], Y[60:], objective="ood", ood=3 * X),
    ]
    assert {result.objective for result in results} == {"ood"}
    assert {result.examples for result in results} == {(30, 90)}
    assert two.tune(X[60:], Y[60:]).objective == "likelihood"
    with pytest.raises(TypeError, match="outliers go by their name"):
        two.tune((X, Y), "ood", [x])


def test_targets_of_a_regression_are_no_second_batch() -> None:
    torch.manual_seed(0)
    network, x = mlp(4, 4), torch.randn(200, 4)
    y = 100 + torch.randn(200, 4)
    model = rgpr.RGPR(network, likelihood="regression").fit((x, y))
    assert int(model._fit_count) == 200
    torch.testing.assert_close(
        model.score(x), rgpr.RGPR(network, likelihood="regression").fit([x]).score(x)
    )
    with pytest.raises(ValueError, match=r"X has 200 rows and y has 50.*pass a list"):
        model.fit((x, y[:50]))


class Two(nn.Module):
    """A network of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, a, b):  # type: ignore[no-untyped-def]
        return self.head(torch.relu(self.hidden(torch.cat([a, b], 1))))


def test_targets_beside_any_arrays() -> None:
    network, (x, y) = mlp(), tensors()
    expected = rgpr.RGPR(network).fit([(x, y)])
    for data in ((X, tuple(Y.tolist())), ({"x": X}, Y), ((X,), Y), (X, list(Y)), (x, series())):
        for model in (rgpr.RGPR(network).fit(*data), rgpr.RGPR(network).fit(data)):
            assert int(model._fit_count) == ROWS
            torch.testing.assert_close(model.variance(3 * x), expected.variance(3 * x))
    two = Two()
    expected = rgpr.RGPR(two).fit([(x, x, y)])
    for arguments in (
        ((x, x, y),), ((X, X, Y),), ((x, x), y), (((x, x), y),), (({"a": x, "b": X}, y),),
        ({"a": X, "b": x}, Y), ((X, x), Y.tolist()),
    ):  # fmt: skip
        model = rgpr.RGPR(two).fit(*arguments)
        torch.testing.assert_close(model.variance((3 * x, x)), expected.variance((3 * x, x)))
        assert model.predict((X, X)).score.shape == (ROWS,)
    with pytest.raises(ValueError, match=r"inputs of a batch are 1 tensor.*takes \(a, b\)"):
        rgpr.RGPR(two).fit(x, y)
    with pytest.raises(ValueError, match="a list whose entries differ in length"):
        rgpr.RGPR(network).fit(x, [[1, 0, 0]] * 89 + [[1]])
    with pytest.raises(ValueError, match=r"tuple have \[90, 90, 9\] rows"):
        rgpr.RGPR(two).fit((x, x, y[:9]))


def test_targets_go_with_arrays_alone() -> None:
    x, y = tensors()
    loader = DataLoader(TensorDataset(x), batch_size=30)
    for likelihood in ("classification", "regression"):
        model = rgpr.RGPR(mlp(), likelihood=likelihood)
        for source in (loader, [x], TensorDataset(x), iter([x])):
            for arguments in ((source, y), ((source, y),)):
                with pytest.raises(TypeError, match=r"go with arrays.*yields \(x, y\) itself"):
                    model.fit(*arguments)
        with pytest.raises(TypeError, match=r"a tuple \(tuple, tuple\).*batches pass a list"):
            model.fit(((x, y), (x, y)))


def test_a_batch_in_the_place_of_a_loader() -> None:
    x, y = tensors()
    batch = next(iter(DataLoader(TensorDataset(x, y), batch_size=ROWS)))
    numbers = next(iter(DataLoader(TensorDataset(x, x[:, :1]), batch_size=ROWS)))
    assert isinstance(batch, list)
    for data in (batch, numbers, [x, y.float()]):
        with pytest.raises(TypeError, match=r"pass \[\(X, Y\)\].*torch\.cat\(\[a, b\]\)"):
            rgpr.RGPR(mlp()).fit(data)
    # Targets of a classification have another shape, and so have those of other outputs.
    assert int(rgpr.RGPR(mlp()).fit([x[:45], x[45:]])._fit_count) == ROWS
    model = rgpr.RGPR(mlp(4, 1), likelihood="regression").fit([x[:45], x[45:]])
    assert int(model._fit_count) == ROWS
    for likelihood in ("regression", "multilabel"):
        model = rgpr.RGPR(mlp(4, 4), likelihood=likelihood)
        for use in (model.fit, rgpr.RGPR(mlp(4, 4), likelihood=likelihood).fit([x]).calibrate):
            with pytest.raises(TypeError, match=r"\[\(a, None\), \(b, None\)\]"):
                use([x[:45], x[45:]])
        assert int(model.fit([(x[:45], None), (x[45:], None)])._fit_count) == ROWS


def test_some_batches_without_targets() -> None:
    x, y = tensors()
    with pytest.warns(UserWarning, match="some batches have targets and others have none") as seen:
        rgpr.RGPR(mlp()).fit([(x, y), x, (x, y), x])
    assert len(seen) == 1


def test_a_list_is_no_frame() -> None:
    pytest.importorskip("pandas")
    x, _ = tensors()
    model = rgpr.RGPR(mlp()).fit(frame())
    assert len(model.predict([x, x]).to_frame()) == 2 * ROWS
    assert list(model.predict(frame()[50:]).to_frame().index) == list(range(50, ROWS))


def test_a_frame_of_targets_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pd = pytest.importorskip("pandas")
    calls, plain = [], pd.DataFrame.to_numpy
    y = pd.DataFrame({"y": Y})
    batches = as_batches((np.repeat(X, 100, 0), pd.concat([y] * 100)))
    monkeypatch.setattr(pd.DataFrame, "to_numpy", lambda *a, **k: calls.append(1) or plain(*a, **k))
    assert len(list(batches)) > 5
    assert not calls


def test_sparse_and_packed_inputs_are_named() -> None:
    x, y = tensors()
    packed = nn.utils.rnn.pack_padded_sequence(x[:, :, None], torch.full((ROWS,), 4), True)
    nested = torch.nested.nested_tensor([x[:3], x[:5]])
    model = rgpr.RGPR(mlp()).fit(x)
    for form, message in (
        (x.to_sparse(), r"sparse \(Tensor\); pass x\.to_dense\(\)"),
        (packed, r"a PackedSequence.*pass \(padded, lengths\)"),
        (nested, r"a nested tensor; pass x\.to_padded_tensor"),
    ):
        for use in (model, model.score):
            with pytest.raises(TypeError, match=message):
                use(form)
        for data in (form, [form], [(form, y)]):
            with pytest.raises(TypeError, match=message):
                rgpr.RGPR(mlp()).fit(data)
    scipy = pytest.importorskip("scipy.sparse")
    with pytest.raises(TypeError, match=r"sparse \(csr_matrix\); pass x\.toarray\(\)"):
        rgpr.RGPR(mlp()).fit(scipy.csr_matrix(X), Y)


@given(rows=st.integers(0, 5000), numbers=st.integers(1, 300_000))
def test_arrays_are_cut_whole(rows: int, numbers: int) -> None:
    whole = np.broadcast_to(np.arange(rows, dtype=np.float32)[:, None], (rows, numbers))
    batches = as_batches(whole)
    assert isinstance(batches, Batches)
    assert len(batches.dataset) == rows
    size = batches._size
    assert 1 <= size <= 1024
    assert size == 1 or size * numbers <= 1 << 22
    assert len(batches) == max(1, -(-rows // size))
    if numbers <= 64:
        parts = list(batches)
        assert len(parts) == len(batches)
        assert torch.equal(torch.cat(parts)[:, 0], torch.arange(rows).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numpy_takes_the_networks_dtype(dtype: torch.dtype) -> None:
    network = mlp().to(dtype)
    model = rgpr.RGPR(network).fit(X)
    expected = rgpr.RGPR(network).fit([torch.tensor(X).to(dtype)])
    x = torch.randn(9, 4).to(dtype)
    torch.testing.assert_close(model.score(x), expected.score(x))
    # A tensor's dtype was chosen, and is not changed behind anybody's back.
    other = torch.float32 if dtype == torch.float64 else torch.float64
    with pytest.raises(TypeError, match=r"batch 0: .*but the network computes in"):
        rgpr.RGPR(network).fit(torch.tensor(X).to(other))


def test_frames() -> None:
    pd = pytest.importorskip("pandas")
    whole = frame().assign(a=range(ROWS))  # whole numbers
    nullable = whole.astype({"a": "Int64", "b": "Float64"})
    network = mlp()
    model = rgpr.RGPR(network).fit(whole)
    expected = rgpr.RGPR(network).fit([torch.tensor(whole.to_numpy(), dtype=torch.float32)])
    x = torch.randn(9, 4)
    torch.testing.assert_close(model.score(x), expected.score(x))
    torch.testing.assert_close(rgpr.RGPR(network).fit(nullable).score(x), expected.score(x))
    missing = nullable.assign(b=pd.array([None] + [1.0] * (ROWS - 1), dtype="Float64"))
    for bad, error, message in (
        (whole.assign(b="red"), TypeError, r"no numbers: 'b' \("),
        (whole.assign(b=pd.Categorical([1, 2, 3] * 30)), TypeError, r"no numbers: 'b' \(cat"),
        (missing, ValueError, "batch 0 holds values that are not finite"),
        (whole["a"], TypeError, "the input has dtype torch.int64"),
    ):
        with pytest.raises(error, match=message):
            rgpr.RGPR(network).fit(bad)


def test_columns_are_remembered(tmp_path: Any) -> None:
    data = frame()
    model = rgpr.RGPR(mlp()).fit(data, series())
    model.save(tmp_path / "m")
    fresh = rgpr.RGPR(mlp())
    fresh.load_state_dict(model.state_dict())
    for one in (model, rgpr.load(tmp_path / "m", mlp()), fresh):
        with pytest.raises(ValueError, match=r"another order, \['b', 'a', 'c', 'd'\]"):
            one.predict(data[["b", "a", "c", "d"]])
        with pytest.raises(ValueError, match="lacks 'd' and it has 'e' besides"):
            one.calibrate(data.rename(columns={"d": "e"}), series())
        assert len(one.predict(data)) == len(one.predict(X)) == ROWS  # an array has no names
    model.fit(data.rename(columns={"d": "e"}))  # a fit starts anew
    assert model._columns == ("a", "b", "c", "e")


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(tensors()[0])


def test_what_is_no_data_is_refused() -> None:
    x, y = tensors()
    for data, error, message in (
        (Stream(), TypeError, "a Stream, which yields single examples or batches"),
        ({"train": TensorDataset(x), "test": x}, TypeError, r"\['test', 'train'\].*pass one"),
        ({"x": x, "y": y[:9]}, ValueError, "differ in length: {'x': 90, 'y': 9}"),
        (np.array([["a", "b"]] * 9), TypeError, "the array holds <U1, no numbers"),
        (7, TypeError, "this is a int; expected arrays"),
        ("data.csv", TypeError, "this is a str; expected arrays"),
        ((X * 255).astype(np.uint8), TypeError, r"dtype torch.uint8.*x\.float\(\) / 255"),
        (X[:0], ValueError, "fewer than two inputs"),
        (np.where(X > 3, np.nan, X), ValueError, "not finite"),
    ):
        with pytest.raises(error, match=message):
            rgpr.RGPR(mlp()).fit(data)


def test_what_is_read_once_is_read_once() -> None:
    x, y = tensors()

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield x[:40], y[:40]
        yield x[40:], y[40:]

    data = batches()
    model = rgpr.RGPR(mlp(), residual="paper").fit(data)
    with pytest.raises(ValueError, match="used up before"):
        model.calibrate(data)
    assert model.tune(batches()).examples == (ROWS, 0)  # one pass will do
    with pytest.raises(TypeError, match=r"outliers from the validation data reads .* generator"):
        model.tune(batches(), "ood")
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    collector = SWAGCollector(network, rank=2)
    for _ in range(3):
        collector.collect()
    with pytest.raises(TypeError, match="SWAG reads the data more than once"):
        collector.posterior(batches())
    assert collector.posterior((X, Y)).sample(x[:2], 3).shape == (3, 2, 3)


def test_detectors_and_posteriors_take_arrays() -> None:
    network, (x, y) = mlp(), tensors()
    for name in ("mahalanobis", "knn"):
        ours, loaded = DETECTORS[name](network).fit((X, Y)), DETECTORS[name](network).fit([(x, y)])
        torch.testing.assert_close(ours.score(x), loaded.score(x))
    a, b = Temperature(network).fit((X, Y)), Temperature(network).fit([(x, y)])
    torch.testing.assert_close(a.temperature, b.temperature)
    noise = rgpr.noise.NoiseLoader(rgpr.noise.uniform, X)
    assert sum(len(batch) for batch in noise) == ROWS


def test_laplace_of_arrays() -> None:
    pytest.importorskip("laplace")
    from rgpr.posteriors import KFL

    network, (x, y) = mlp(), tensors()
    loader = DataLoader(TensorDataset(x, y), batch_size=90)
    ours = KFL.fit(network, (X, Y), prior_precision=3.0)
    loaded = KFL.fit(network, loader, prior_precision=3.0)
    torch.testing.assert_close(ours(x[:5]).mean, loaded(x[:5]).mean, rtol=1e-4, atol=1e-4)
