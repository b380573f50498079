"""Batches of other forms than one tensor: dicts, tuples, ids with masks; and other outputs.

The reference of a network of several tensors is the same network of one tensor that holds them side
by side: every answer must be the same.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import rgpr
from rgpr import RGPR
from rgpr._network.batches import arguments
from rgpr._network.kept import Kept, form_of
from rgpr._network.loaders import inputs_and_targets
from rgpr._network.reservoir import Reservoir
from rgpr.baselines.detectors import DETECTORS
from rgpr.posteriors import MAP, Ensemble, MCDropout, Temperature
from rgpr.posteriors.swag import SWAGCollector
from rgpr.saving import export
from rgpr.tuning.objectives.marginal import collect_matrices

WIDE, TALL = 4, (2, 3)


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


class Body(nn.Module):
    """What all networks here do with ten numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.drop = nn.Linear(10, 16), nn.ReLU(), nn.Dropout(0.3)
        self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, 3)

    def together(self, a: Tensor, b: Tensor) -> Any:
        x = torch.cat([a, b.flatten(1)], 1)
        return self.head(self.drop(self.norm(self.relu(self.first(x)))))


class OneTensor(Body):
    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.together(x[:, :WIDE], x[:, WIDE:])


class TwoTensors(Body):
    def forward(self, a, b):  # type: ignore[no-untyped-def]
        return self.together(a, b)


class ByKeyword(Body):
    """As Hugging Face's models are called."""

    def forward(self, a=None, b=None, ids=None, labels=None):  # type: ignore[no-untyped-def]
        return {"logits": self.together(a, b), "loss": None}


class OneDict(Body):
    """As laplace-torch calls a network with dicts."""

    def forward(self, batch):  # type: ignore[no-untyped-def]
        return self.together(batch["a"], batch["b"])


class WithAuxiliary(OneTensor):
    def forward(self, x):  # type: ignore[no-untyped-def]
        return super().forward(x), x.sum(1)


def parts(x: Tensor) -> dict[str, Tensor]:
    return {"a": x[:, :WIDE], "b": x[:, WIDE:].reshape(-1, *TALL)}


Form = Callable[[Tensor], Any]
FORMS: dict[str, tuple[type[Body], Form]] = {
    "tuple": (TwoTensors, lambda x: tuple(parts(x).values())),
    "dict": (TwoTensors, parts),
    "keywords": (ByKeyword, lambda x: {**parts(x), "ids": torch.arange(len(x))}),
    "encoding": (ByKeyword, lambda x: UserDict(parts(x))),
    "one dict": (OneDict, parts),
}
BASES: dict[str, Callable[[nn.Module], Any]] = {
    "map": MAP,
    "ensemble": lambda n: Ensemble([n, copy.deepcopy(n)]),
    "dropout": lambda n: MCDropout(n, n_samples=4),
    "temperature": lambda n: Temperature(n, 1.7),
    "swag": lambda n: swag(n),
}


def swag(network: nn.Module) -> Any:
    collector = SWAGCollector(network, rank=2)
    for _ in range(3):
        collector.collect()
    form = next(form for kind, form in FORMS.values() if isinstance(network, kind | OneTensor))
    x = data()[0]
    given = (x, None) if isinstance(network, OneTensor) else (form(x), None)
    return collector.posterior([given], n_samples=3, progress=False)


def data(rows: int = 120, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 10, generator=generator)
    return x, torch.randint(3, (rows,), generator=generator)


def pair(form: str) -> tuple[nn.Module, nn.Module, Form]:
    kind, make = FORMS[form]
    plain, other = OneTensor().eval(), kind().eval()
    other.load_state_dict(plain.state_dict())
    return plain, other, make


def loaders(make: Form) -> tuple[list[Any], list[Any]]:
    x, y = data()
    cut = list(zip(x.split(40), y.split(40), strict=True))
    return cut, [(make(x), y) for x, y in cut]


def every_answer(model: RGPR, x: Any) -> dict[str, Any]:
    drawn = {"generator": torch.Generator().manual_seed(1), "n_samples": 6}
    found = model.explain(x)
    return {
        "call": model(x),
        "bridge": model(x, link_approx="bridge"),
        "mc": model(x, link_approx="mc", **drawn),
        "samples": model.predictive_samples(x, 5, torch.Generator().manual_seed(1)),
        "variance": model.variance(x),
        "score": model.score(x),
        "p": model.p_value(x),
        "flag": model.flag(x),
        "set": model.predict_set(x),
        "explained": found.strangeness,
    }


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name, answer in ours.items():
        torch.testing.assert_close(
            answer, theirs[name], equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("form", ["tuple", "one dict"])
def test_every_posterior_takes_every_form(form: str, base: str) -> None:
    plain, other, make = pair(form)
    one, several = loaders(make)
    reference = RGPR(BASES[base](plain)).fit(one, progress=False)
    model = RGPR(BASES[base](other)).fit(several, progress=False)
    x = data(8, seed=1)[0]
    torch.testing.assert_close(model(make(x)), reference(x))
    torch.testing.assert_close(model.score(make(x)), reference.score(x))
    drawn = [m.predictive_samples(b, 4, torch.Generator().manual_seed(0)) for m, b in
             ((model, make(x)), (reference, x))]  # fmt: skip
    torch.testing.assert_close(*drawn)


@pytest.mark.filterwarnings("ignore:.*are training inputs")
@pytest.mark.parametrize("form", FORMS)
def test_every_answer_is_that_of_one_tensor(form: str) -> None:
    plain, other, make = pair(form)
    one, several = loaders(make)
    reference = RGPR(plain).fit(one, progress=False)
    model = RGPR(other).fit(several, progress=False)
    assert reference.layers == model.layers
    reference.calibrate(one, progress=False), model.calibrate(several, progress=False)
    x = data(16, seed=1)[0]
    x[1] *= 1e6
    x[2, 0], x[3, 7], x[4, 1] = torch.inf, -torch.inf, torch.nan
    given = make(x)
    kept = copy.deepcopy(given)
    assert_same(every_answer(model, given), every_answer(reference, x))
    torch.testing.assert_close(dict_of(given), dict_of(kept), equal_nan=True)


def dict_of(x: Any) -> dict[str, Tensor]:
    return dict(enumerate(x)) if isinstance(x, tuple) else dict(x)


@pytest.mark.filterwarnings("ignore:.*sigma2")
@pytest.mark.parametrize("objective", ["likelihood", "ood"])
def test_tuning(objective: str) -> None:
    plain, other, make = pair("keywords")
    models = []
    for network, loader in zip((plain, other), loaders(make), strict=True):
        model = RGPR(network, residual="paper").fit(loader, progress=False)
        model.tune(loader[:1], objective, progress=False)
        models.append(model)
    if objective != "ood":  # the noise of each part is its own
        torch.testing.assert_close(models[1].sigma2, models[0].sigma2, rtol=1e-3, atol=1e-9)
    assert bool(models[1].sigma2.isfinite().all())


def test_kernel_matrices() -> None:
    plain, other, make = pair("tuple")
    found = []
    for network, loader in zip((plain, other), loaders(make), strict=True):
        model = RGPR(BASES["ensemble"](network), residual="paper").fit(loader, progress=False)
        matrices = collect_matrices(model._extension(), loader, progress=False)
        found.append((matrices.residual, matrices.base, matrices.mean))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.filterwarnings("ignore:.*are training inputs")
def test_regression() -> None:
    plain, other, make = pair("tuple")
    one, several = ([(x, y[:, None].float().expand(-1, 3)) for x, y in loader]
                    for loader in loaders(make))  # fmt: skip
    reference = RGPR(plain, likelihood="regression").fit(one, progress=False)
    model = RGPR(other, likelihood="regression").fit(several, progress=False)
    reference.calibrate(one, progress=False), model.calibrate(several, progress=False)
    x = data(8, seed=1)[0]
    for ours, theirs in zip(model.interval(make(x)), reference.interval(x), strict=True):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(model(make(x)), reference(x), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", DETECTORS)
def test_detectors(name: str) -> None:
    if name == "vim":
        import pytorch_ood  # noqa: F401
    plain, other, make = pair("keywords")
    one, several = loaders(make)
    x = data(8, seed=1)[0]
    options = {"k": 3} if name == "knn" else {}
    ours = DETECTORS[name](other, **options).fit(several, progress=False).score(make(x))
    theirs = DETECTORS[name](plain, **options).fit(one, progress=False).score(x)
    torch.testing.assert_close(ours, theirs)


@torch.enable_grad()
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_laplace_of_a_network_that_takes_dicts(subset: str) -> None:
    from laplace import Laplace

    plain, other, make = pair("one dict")
    x, y = data()
    found = []
    for network, inputs in ((plain, x), (other, make(x))):
        batch = (inputs, y) if isinstance(inputs, Tensor) else {**inputs, "labels": y}
        la = Laplace(
            network,
            "classification",
            subset_of_weights=subset,
            hessian_structure="full",
            dict_key_x="a",
        )
        la.fit(torch.utils.data.DataLoader(Rows(batch), batch_size=40))
        model = RGPR(la).fit([batch], progress=False)
        found.append((model(inputs), model.score(inputs)))
    torch.testing.assert_close(found[1], found[0])


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 120

    def __getitem__(self, row: int) -> Any:
        if isinstance(self.batch, dict):
            return {name: part[row] for name, part in self.batch.items()}
        return tuple(part[row] for part in self.batch)


# -- how a network is called, and how a loader's batch is split ----------------------------------


def test_a_loader_is_split_by_the_networks_signature() -> None:
    a, b, y = torch.randn(4, 2), torch.randn(4, 3), torch.arange(4)

    def split(batch: Any, network: nn.Module) -> Any:
        return next(inputs_and_targets([batch], network, progress=False, description=""))

    x, target = split((a, b, y), TwoTensors())
    assert x[0] is a
    assert x[1] is b
    assert target is y
    assert split((a, b), TwoTensors())[1] is None
    assert split(((a, b), y), TwoTensors())[0][1] is b
    x, target = split((a, y, b), OneTensor())  # (x, y, index), as ever
    assert x is a
    assert target is y
    x, target = split({"a": a, "b": b, "index": y, "labels": y}, ByKeyword())
    assert list(x) == ["a", "b"]
    assert target is y
    assert split({"a": a, "label": y}, ByKeyword())[0] is a  # the first parameter
    assert split({"image": a, "label": y}, OneTensor())[0] is a
    assert list(split({"a": a, "b": b, "label": y}, OneDict())[0]) == ["a", "b"]
    with pytest.raises(KeyError, match=r"keys \['a', 'c'\].*takes \(a, b\)"):
        split({"a": a, "c": b}, TwoTensors())
    with pytest.raises(ValueError, match=r"1 tensor and the network takes 2, \(a, b\)"):
        split((a,), TwoTensors())
    with pytest.raises(ValueError, match=r"1 tensor and the network takes 2, \(a, b\)"):
        split(a, TwoTensors())
    with pytest.raises(KeyError, match=r"'foo'.*takes \(input\)"):
        split({"foo": a}, nn.Sequential(nn.Linear(2, 3)))


@pytest.mark.parametrize("network", [TwoTensors(), ByKeyword(), OneDict()])
def test_the_order_of_a_dict_does_not_matter(network: nn.Module) -> None:
    """Two parts of real numbers stand side by side in the representation of the input."""
    one = parts(data()[0] + torch.arange(10))
    other = {name: one[name] for name in ("b", "a")}
    halves = [{name: part[i::2] for name, part in one.items()} for i in range(2)]
    turned = [halves[0], {name: halves[1][name] for name in ("b", "a")}]
    model = RGPR(network).fit(halves, progress=False)
    assert torch.equal(model.score(one), model.score(other))
    assert torch.equal(model.score(one), RGPR(network).fit(turned, progress=False).score(other))
    with pytest.warns(UserWarning, match="training inputs that fit saw"):
        model.calibrate([other], progress=False)
    state = rgpr.FitState(model)
    for batch in turned:
        state.update(batch)
    assert torch.equal(RGPR(network).fit(state).score(one), model.score(one))


class Optional(OneTensor):
    def forward(self, x, lengths=None):  # type: ignore[no-untyped-def]
        return super().forward(x)


class AnyNumber(OneTensor):
    def forward(self, *xs):  # type: ignore[no-untyped-def]
        return super().forward(xs[0])


class OwnForward(nn.Sequential):
    """A sequence whose own forward takes two."""

    def forward(self, a, b):  # type: ignore[no-untyped-def]
        return super().forward(torch.cat([a, b], 1))


class Targets(OneTensor):
    def forward(self, x, y):  # type: ignore[no-untyped-def]
        return super().forward(x) + y


@pytest.mark.parametrize("network", [Optional(), AnyNumber()])
def test_where_the_inputs_end_is_not_guessed(network: nn.Module) -> None:
    x, y = data()
    lengths = torch.full((120,), 3)
    with pytest.raises(ValueError, match=r"3 tensors and forward takes \(.*Yield \(\("):
        RGPR(network).fit([(x, lengths, y)])
    for batch in ((x, y), ((x, lengths), y), (x, y, ["name"] * 120)):
        pairs = inputs_and_targets([batch], network, progress=False, description="")
        assert next(pairs)[1] is y


def test_the_networks_own_signature_is_read() -> None:
    def split(batch: Any, network: nn.Module) -> Any:
        return next(inputs_and_targets([batch], network, progress=False, description=""))

    a, b, y = torch.randn(4, 2), torch.randn(4, 3), torch.arange(4)
    x, target = split((a, b, y), OwnForward(nn.Linear(5, 3)))
    assert x[1] is b
    assert target is y
    # What forward requires is an input, whatever it is called.
    x, target = split({"x": a, "y": b, "label": y}, Targets())
    assert x["y"] is b
    assert target is y
    with pytest.warns(UserWarning, match=r"goes in as 'b' and there are no targets.*None\)"):
        split((a, y), TwoTensors())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert split(((a, y), None), TwoTensors())[0][1] is y
    with pytest.raises(ValueError, match=r"batch are 2 tensors.*\(x\).*forward\(self, \*tensors"):
        split(([a, a], y), OneTensor())


def test_a_usual_name_in_fit_and_in_a_call() -> None:
    x, y = data()
    model = RGPR(OneTensor()).fit([{"image": x, "label": y}])
    for entries in ({"image": x}, {"image": x, "label": y}):
        torch.testing.assert_close(model(entries), model(x))
        torch.testing.assert_close(model.score(entries), model.score(x))


def test_a_dict_goes_in_by_keywords_or_whole() -> None:
    x = parts(data()[0])
    assert arguments(TwoTensors(), x) == ((), x)
    assert arguments(OneDict(), x) == ((x,), {})
    with pytest.raises(TypeError, match=r"keys \['a', 'other'\].*takes \(a, b\)"):
        arguments(TwoTensors(), {"a": x["a"], "other": x["b"]})


def test_a_call_like_the_networks_own() -> None:
    x, y = data()
    given_ = parts(x)
    a, b = given_.values()
    model = RGPR(TwoTensors()).fit([(given_, y)], progress=False)
    expected = model(given_)
    for ours in (model(a, b), model(a=a, b=b), model(a, b=b), model((a, b))):
        torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(
        model(a, b, link_approx="bridge"), model((a, b), link_approx="bridge")
    )
    model.compile()
    torch.testing.assert_close(model(a, b), expected)
    torch.testing.assert_close(model(a=a, b=b), expected)
    one = RGPR(OneTensor()).fit([x], progress=False)
    with pytest.raises(TypeError, match=r"by the names \['link_aprox'\].*forward takes \(x\)"):
        one(x, link_aprox="mc")
    with pytest.raises(TypeError, match="something by position that is neither an option"):
        one(x, "mc")
    with pytest.raises(TypeError, match="a call got no input"):
        one()
    hugging = RGPR(ByKeyword()).fit([given_], progress=False)
    torch.testing.assert_close(hugging(b=b, a=a), hugging(given_))


@pytest.mark.parametrize("form", FORMS)
def test_the_table_of_layers_is_what_a_model_reads(form: str) -> None:
    kind, make = FORMS[form]
    network, x = kind(), make(data()[0])
    assert rgpr.layers(network, x).taken == RGPR(network).fit([x]).layers


def test_parts_that_do_not_fit_are_refused_by_name() -> None:
    _, other, make = pair("dict")
    model = RGPR(other).fit(loaders(make)[1], progress=False)
    x = make(data(8)[0])
    with pytest.raises(ValueError, match=r"the part 'b' of one input has shape \(3, 2\).*\(2, 3\)"):
        model({**x, "b": x["b"].mT})
    with pytest.raises(TypeError, match=r"the part 'a' of the input has dtype torch.float64"):
        model({**x, "a": x["a"].double()})
    with pytest.raises(ValueError, match=r"'a' \(8, 4\), 'b' \(5, 2, 3\).*same number of rows"):
        model({**x, "b": x["b"][:5]})
    with pytest.raises(TypeError, match="the part 'b' of the input is a list"):
        model({**x, "b": [1.0]})
    with pytest.raises(ValueError, match=r"fitted on \['a', 'b'\]"):
        model({"a": x["a"]})
    with pytest.raises(TypeError, match="the input is a list"):
        model([x["a"], x["b"]])
    with pytest.raises(ValueError, match="batch 1 has the parts"):
        RGPR(ByKeyword()).fit(
            [{**x, "labels": torch.arange(8) % 3}, {**x, "ids": torch.arange(8)}], progress=False
        )


def test_certificates_say_why_not() -> None:
    _, other, make = pair("tuple")
    model = RGPR(other).fit(loaders(make)[1], progress=False)
    with pytest.raises(TypeError, match=r"its input has parts, of which \['a', 'b'\] are measured"):
        model.certify()
    with pytest.raises(TypeError, match="its input has parts"):
        rgpr.check(model)


@pytest.mark.parametrize("form", ["tuple", "encoding", "one dict"])
def test_saving_and_exporting(form: str, tmp_path: Path) -> None:
    _, other, make = pair(form)
    model = RGPR(other).fit(loaders(make)[1], progress=False)
    model.save(tmp_path / "model.safetensors")
    x = make(data(8, seed=1)[0])
    again = rgpr.load(tmp_path / "model.safetensors", FORMS[form][0]())
    torch.testing.assert_close(again(x), model(x))
    with pytest.raises(ValueError, match="of one input has shape"):
        again({**parts(data(8)[0]), "b": torch.randn(8, 5)} if form != "tuple" else (x[0], x[0]))
    program = export.program(model, x, everything=True).module()
    x = dict(make(data(5, seed=2)[0])) if form != "tuple" else make(data(5, seed=2)[0])
    p, score = program(x)
    torch.testing.assert_close(p, model(x))
    torch.testing.assert_close(score, model.score(x))


def test_a_file_with_the_parts_in_another_order_is_refused(tmp_path: Path) -> None:
    """Earlier versions put the parts side by side in the order in which a dict had them."""
    x = parts(data()[0])
    model = RGPR(TwoTensors()).fit([x], progress=False)
    model.save(tmp_path / "m")
    assert torch.equal(rgpr.load(tmp_path / "m", TwoTensors()).score(x), model.score(x))
    shape = model._input_shape
    assert isinstance(shape, dict)
    model._input_shape = dict(reversed(shape.items()))
    model.save(tmp_path / "m")
    with pytest.raises(ValueError, match=r"the parts \['b', 'a'\].*fit the model again"):
        rgpr.load(tmp_path / "m", TwoTensors())


class Difference(nn.Module):
    """Two parts of one shape, which nobody would notice to be exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, later, before):  # type: ignore[no-untyped-def]
        return self.last(torch.relu(self.first(later - 3 * before)))


class DifferenceOfDict(Difference):
    def forward(self, batch):  # type: ignore[no-untyped-def]
        return super().forward(batch["later"], batch["before"])


@pytest.mark.parametrize("network", [Difference(), DifferenceOfDict()])
@pytest.mark.parametrize("order", [("before", "later"), ("later", "before")])
def test_onnx_names_the_parts(network: nn.Module, order: tuple[str, ...], tmp_path: Path) -> None:
    import onnxruntime

    torch.manual_seed(0)
    x = {name: torch.randn(90, 4) for name in order}
    model = RGPR(network).fit([x], progress=False)
    export.onnx(model, tmp_path / "model.onnx", {name: part[:4] for name, part in x.items()})
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    p, score = session.run(None, {name: part.numpy() for name, part in x.items()})
    torch.testing.assert_close(torch.from_numpy(p), model(x), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(torch.from_numpy(score), model.score(x), atol=1e-4, rtol=1e-4)


# -- rows of differing lengths are kept and come back as they were -------------------------------


def _pairs_of(mask: Tensor) -> Tensor:
    """Which position may look at which, ``(B, 1, T, T)``."""
    return (mask[:, None] & mask[:, :, None])[:, None]


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(1, 9))
def test_kept_rows_come_back_at_their_own_length(lengths: list[int], size: int) -> None:
    seen: set[tuple[Any, ...]] = set()
    kept = Reservoir(1000)
    for number, length in enumerate(lengths):
        ids = torch.arange(3 * length).reshape(3, length) + 100 * number
        even = ids % 2 == 0
        batch = {"ids": ids, "mask": even, "age": torch.randn(3), "pairs": _pairs_of(even)}
        kept.add(batch, *Kept.columns_of(batch), torch.arange(3) + 3 * number)
        seen |= {(tuple(row), tuple(i % 2 == 0 for i in row)) for row in ids.tolist()}
    *columns, number_of = kept.items
    order, pieces = Kept(form_of(batch), columns).split(size)
    rows = [
        (tuple(ids), tuple(mask))
        for piece in pieces
        for ids, mask in zip(piece["ids"].tolist(), piece["mask"].tolist(), strict=True)
    ]
    assert set(rows) == seen
    assert all(len(piece["ids"]) <= size for piece in pieces)
    assert all(torch.equal(piece["pairs"], _pairs_of(piece["mask"])) for piece in pieces)
    back = [rows[i] for i in order]
    first = [row[0][0] for row in back]
    assert [value // 100 for value in first] == [int(n) // 3 for n in number_of]


# -- ids and masks -------------------------------------------------------------------------------


class Text(nn.Module):
    """A bag of words that padding does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix = nn.Embedding(50, 8), nn.Linear(8, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, input_ids, attention_mask=None):  # type: ignore[no-untyped-def]
        h = torch.relu(self.mix(self.words(input_ids)))
        weight = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        h = (h * weight[..., None]).sum(1) / weight.sum(1, keepdim=True)
        return self.head(h)


def texts(rows: int = 60, longest: int = 9, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 50, (rows, longest), generator=generator)
    lengths = torch.randint(2, longest + 1, (rows, 1), generator=generator)
    mask = (torch.arange(longest) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def padded(batch: dict[str, Tensor], more: int) -> dict[str, Tensor]:
    return {name: nn.functional.pad(part, (0, more)) for name, part in batch.items()}


def text_model(**options: Any) -> RGPR:
    batches = [
        {**texts(30, longest, seed=longest), "labels": torch.arange(30) % 3}
        for longest in (5, 9, 7)
    ]
    options = {"layers": ["mix", "head:input"], **options}
    return RGPR(Text(), input="words", **options).fit(batches, progress=False)


def test_ids_without_a_name_of_the_embedding() -> None:
    network = nn.ModuleDict({"text": Text()})["text"]
    with pytest.raises(TypeError, match=r"torch.int64.*RGPR\(network, input='words'\)"):
        RGPR(network).fit([texts()], progress=False)
    with pytest.raises(TypeError, match=r"x\.float\(\) / 255"):
        RGPR(OneTensor()).fit([torch.zeros(4, 10, dtype=torch.uint8)], progress=False)
    with pytest.raises(ValueError, match=r"input='word'.*\['words'\]"):
        RGPR(network, input="word")


@pytest.mark.parametrize("residual", ["onset", "paper"])
@pytest.mark.parametrize("more", [1, 30])
def test_padding_changes_no_answer(more: int, residual: str) -> None:
    model = text_model(residual=residual)
    x = texts(20, seed=3)
    difference = model.score(padded(x, more)) - model.score(x)
    assert float(difference.abs().max()) < 1e-5
    torch.testing.assert_close(model(padded(x, more)), model(x))
    # The same text alone, without any padding.
    alone = torch.cat([
        model.score({n: p[i : i + 1, : int(x["attention_mask"][i].sum())] for n, p in x.items()})
        for i in range(20)
    ])  # fmt: skip
    torch.testing.assert_close(alone, model.score(x), atol=1e-5, rtol=0)


def test_the_input_is_the_mean_of_the_embedding() -> None:
    model = text_model()
    assert model.layers == ["input", "mix", "head:input"]
    network: Any = model.posterior.network
    every = []
    for longest in (5, 9, 7):
        batch = texts(30, longest, seed=longest)
        weight = batch["attention_mask"].double()[..., None]
        every.append((network.words(batch["input_ids"]).double() * weight).sum(1) / weight.sum(1))
    vectors = torch.cat(every).detach()
    coordinates: Any = model._fitted().at(0)
    torch.testing.assert_close(coordinates.mean.double(), vectors.mean(0), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        coordinates.scale.double(), vectors.std(0, correction=0), atol=1e-6, rtol=1e-5
    )


@pytest.mark.filterwarnings("ignore:.*are training inputs")
def test_the_embedding_is_not_read_twice() -> None:
    """By default it would be the first hidden stage."""
    model = text_model(layers="auto")
    assert model.layers == ["input", "head:input"]


@pytest.mark.filterwarnings("ignore:.*are training inputs")
def test_ids_alone_may_differ_in_length(tmp_path: Path) -> None:
    batches = [texts(30, longest, seed=longest)["input_ids"] for longest in (5, 9, 7)]
    model = RGPR(Text(), input="words", layers=["mix"]).fit(batches, progress=False)
    assert model(batches[0]).shape == model(batches[0][:, :2]).shape == (30, 3)
    model.calibrate(batches, progress=False)
    assert bool((model.p_value(batches[1]) > 0).all())
    model.save(tmp_path / "text.safetensors")
    again = rgpr.load(tmp_path / "text.safetensors", Text())
    assert again.input == "words"
    torch.testing.assert_close(again.score(batches[1]), model.score(batches[1]))
    p, _, _ = export.program(model, batches[0], everything=True).module()(batches[0][:7])
    torch.testing.assert_close(p, model(batches[0][:7]))
    before = batches[0].clone()
    with pytest.raises(TypeError, match=r"its input holds ids.*'words'"):
        model.certify()
    model.compile()
    model(batches[0]), model(batches[1])
    assert torch.equal(before, batches[0])


def test_detectors_take_ids() -> None:
    x = texts()
    scores = DETECTORS["energy"](Text()).score(x)
    assert scores.shape == (60,)


class Tokens(nn.Module):
    """A sequence with a class token in front of it, or not, and a mask of pairs."""

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        self.more, self.embed, self.head = more, nn.Linear(4, 8), nn.Linear(8, 3)
        self.enter = nn.Identity()

    def forward(self, x, attention_mask=None, pairs=None):  # type: ignore[no-untyped-def]
        if pairs is not None:
            assert pairs.shape == (len(x), 1, x.shape[1], x.shape[1])
        h = nn.functional.pad(torch.relu(self.embed(x)), (0, 0, self.more, 0), value=1.0)
        mask = nn.functional.pad(attention_mask, (self.more, 0), value=1)[..., None]
        return self.head((self.enter(h) * mask).sum(1) / mask.sum(1).clamp_min(1))


def sequences(rows: int = 40, longest: int = 6, left: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(longest)
    mask = torch.arange(longest) < torch.randint(1, longest, (rows, 1), generator=generator)
    x = torch.randn(rows, longest, 4, generator=generator)
    mask = mask.flip(1) if left else mask
    return {"x": x * mask[..., None], "attention_mask": mask.long()}


def test_masks_of_pairs_may_differ_in_length() -> None:
    batches = [sequences(longest=longest) for longest in (5, 9, 7)]
    for batch in batches:
        batch["pairs"] = _pairs_of(batch["attention_mask"] == 1)
    model = RGPR(Tokens(), layers=["embed"]).fit(batches, progress=False)
    assert model(batches[1]).shape == (40, 3)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("how", ["first", "last"])
def test_the_position_that_is_read_counts(how: str, left: bool) -> None:
    x = sequences(left=left)
    model = RGPR(Tokens(), layers={"embed": how}).fit([x], progress=False)
    side = (3, 0) if left else (0, 3)
    longer = {
        "x": nn.functional.pad(x["x"], (0, 0, *side), value=7.0),
        "attention_mask": nn.functional.pad(x["attention_mask"], side),
    }
    torch.testing.assert_close(model.score(longer), model.score(x))


def test_sequences_of_another_length_than_the_mask() -> None:
    network, x = Tokens(more=1), sequences()
    with pytest.warns(UserWarning, match=r"'enter' .*length 7 .*length 6.*'enter': 'first'") as w:
        RGPR(network, layers=["embed", "enter"]).fit([x, x], progress=False)
    assert len(w) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RGPR(network, layers={"embed": None, "enter": "first"}).fit([x], progress=False)


def test_a_mask_that_counts_nothing() -> None:
    x = sequences()
    model = RGPR(Tokens(), layers=["embed"]).fit([x], progress=False)
    expected = model(x)
    x["attention_mask"][3] = 0
    for use in (model.calibrate, RGPR(Tokens()).fit):
        with pytest.raises(ValueError, match=r"batch 0: 'attention_mask' counts no .* row 3"):
            use([x], progress=False)
    assert bool(model(x)[3].isnan().all())
    others = torch.arange(40) != 3
    torch.testing.assert_close(model(x)[others], expected[others])


@pytest.mark.parametrize("dtype", [torch.bool, torch.long])
def test_what_a_mask_means_is_not_guessed(dtype: torch.dtype) -> None:
    class Called(Tokens):
        def forward(self, x, mask):  # type: ignore[no-untyped-def]
            return super().forward(x, mask.long()) if x.dim() == 3 else self.head(self.embed(x))

    batch = sequences()
    mask = batch["attention_mask"].to(dtype)
    message = r"'mask' of shape \(40, 6\).*'attention_mask'.*keep, 'key_padding_mask'.*ignore"
    for given_ in ({"x": batch["x"], "mask": mask}, (batch["x"], mask)):
        with pytest.raises(ValueError, match=message):
            RGPR(Called()).fit([(given_, torch.arange(40) % 3)], progress=False)
    # Where there is no sequence it means nothing to us.
    RGPR(Called()).fit([{"x": batch["x"][:, 0], "mask": mask}], progress=False)


@pytest.mark.parametrize("key", ["key_padding_mask", "src_key_padding_mask"])
def test_torchs_masks_mean_the_opposite(key: str) -> None:
    class Sequences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x, **masks):  # type: ignore[no-untyped-def]
            ignored = masks[key][..., None]
            h = torch.relu(self.mix(x)).masked_fill(ignored, 0.0)
            return self.head(h.sum(1) / (~ignored).sum(1))

    class Named(Sequences):
        def forward(self, x, key_padding_mask=None, src_key_padding_mask=None):  # type: ignore[no-untyped-def]
            known = {"key_padding_mask": key_padding_mask,
                     "src_key_padding_mask": src_key_padding_mask}  # fmt: skip
            return super().forward(x, **{key: known[key]})

    lengths = torch.randint(1, 6, (40, 1))
    ignored = torch.arange(5) >= lengths
    x = torch.randn(40, 5, 4).masked_fill(ignored[..., None], 0.0)
    model = RGPR(Named(), layers=["mix"]).fit([{"x": x, key: ignored}], progress=False)
    longer = {
        "x": nn.functional.pad(x, (0, 0, 0, 3), value=7.0),
        key: nn.functional.pad(ignored, (0, 3), value=True),
    }
    torch.testing.assert_close(model.score(longer), model.score({"x": x, key: ignored}))
    far = {"x": x * 1e9, key: ignored}
    assert float((model(far) - 1 / 3).abs().max()) < 1e-3


def test_an_infinity_beside_ids_gives_the_limit() -> None:
    class Mixed(Text):
        def forward(self, input_ids, age):  # type: ignore[no-untyped-def]
            return super().forward(input_ids) + age

    x = {"input_ids": texts()["input_ids"], "age": torch.randn(60, 1)}
    model = RGPR(Mixed(), input="words", layers=["mix"]).fit([x], progress=False)
    x["age"][0], x["age"][1] = torch.inf, torch.nan
    p = model(x)
    torch.testing.assert_close(p[0], torch.full((3,), 1 / 3))
    assert bool(p[1].isnan().all())
    assert bool(p[2:].isfinite().all())


@pytest.mark.filterwarnings("ignore:.*sigma2")
def test_outliers_of_ids_must_be_given() -> None:
    batches = [{**texts(30), "labels": torch.arange(30) % 3}]
    model = text_model(residual="paper")
    with pytest.raises(ValueError, match="no noise can be made; pass outliers"):
        model.tune(batches, "ood", progress=False)
    model.tune(batches, "ood", ood=[texts(30, seed=9)], progress=False)


# -- outputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("output", [0, lambda returned: returned[0]])
@pytest.mark.parametrize("base", ["map", "ensemble", "dropout", "temperature"])
def test_a_part_of_what_the_network_returns(base: str, output: Any, tmp_path: Path) -> None:
    plain, network = OneTensor().eval(), WithAuxiliary().eval()
    network.load_state_dict(plain.state_dict())
    one, _ = loaders(lambda x: x)
    reference = RGPR(BASES[base](plain)).fit(one, progress=False)
    model = RGPR(BASES[base](network), output=output).fit(one, progress=False)
    assert model.layers == reference.layers  # the head is found in that part
    x = data(8, seed=1)[0]
    torch.testing.assert_close(model(x), reference(x))
    torch.testing.assert_close(model.score(x), reference.score(x))
    path = tmp_path / "model.safetensors"
    if callable(output):
        with pytest.raises(TypeError, match="output= is a function"):
            model.save(path)
        return
    model.save(path)
    torch.testing.assert_close(rgpr.load(path, WithAuxiliary())(x), model(x))
    with pytest.raises(TypeError, match="its outputs are the part 0"):
        model.certify()


def test_a_tuple_names_the_remedy() -> None:
    message = r"tuple of \(a tensor of shape \(40, 3\), a tensor of shape \(40,\)\).*output=0"
    with pytest.raises(TypeError, match=message):
        RGPR(WithAuxiliary()).fit(loaders(lambda x: x)[0], progress=False)
    with pytest.raises(ValueError, match=re.escape("output='out' is no part")):
        RGPR(WithAuxiliary(), output="out").fit(loaders(lambda x: x)[0], progress=False)


def test_outputs_by_key_and_attribute() -> None:
    class Returns(OneTensor):
        wrapped = dict

        def forward(self, x):  # type: ignore[no-untyped-def]
            return self.wrapped(out=super().forward(x), aux=x)

    class Attributes:
        def __init__(self, out: Tensor, aux: Tensor) -> None:
            self.out = out

    one, _ = loaders(lambda x: x)
    x = data(8)[0]
    network = Returns()
    by_key = RGPR(network, output="out").fit(one, progress=False)(x)
    network.wrapped = Attributes  # type: ignore[assignment]
    torch.testing.assert_close(RGPR(network, output="out").fit(one, progress=False)(x), by_key)


class Dense(nn.Module):
    """Outputs for every pixel or position, in whatever ``wrap`` makes of them."""

    def __init__(self, wrap: Any, image: bool) -> None:
        super().__init__()
        layer = nn.Conv2d(3, 4, 1) if image else nn.Conv1d(3, 4, 1)
        self.layer, self.wrap, self.image = layer, wrap, image

    def forward(self, x: Tensor) -> Any:
        f = self.layer(x)
        return self.wrap(f if self.image else f.transpose(1, 2))


@pytest.mark.parametrize("image", [True, False])
@pytest.mark.parametrize(
    ("wrap", "output"),
    [
        (lambda f: f, None),
        (lambda f: {"out": f}, "out"),
        (lambda f: {"logits": f}, None),
        (lambda f: SimpleNamespace(logits=f), None),
        (lambda f: SimpleNamespace(out=f), "out"),
        (lambda f: (f, f), 1),
        (lambda f: (f, f), lambda o: o[0]),
    ],
)
def test_the_remedy_for_dense_outputs_works(wrap: Any, output: Any, image: bool) -> None:
    x = torch.randn(40, 3, 5, 5) if image else torch.randn(40, 3, 5)
    network = Dense(wrap, image)
    with pytest.raises(ValueError, match="for every pixel or token") as error:
        RGPR(network, output=output).fit([x], progress=False)
    remedy = re.search(r"RGPR\(network, output=.*?, likelihood='regression'\)", str(error.value))
    assert remedy is not None
    assert ("given stands for the function" in str(error.value)) == callable(output)
    model = eval(remedy[0], {"RGPR": RGPR, "network": network, "given": output})
    model.fit([x], progress=False)
    expected = network.layer(x).flatten(2).mean(2)
    torch.testing.assert_close(model(x)[0], expected)


@pytest.mark.parametrize("base", ["map", "temperature"])
def test_a_posterior_keeps_its_output(base: str) -> None:
    posterior = BASES[base](WithAuxiliary())
    one, _ = loaders(lambda x: x)
    first = RGPR(posterior, output=0).fit(one, progress=False)
    assert posterior.output is None  # it is the user's, and may serve another model
    x = data(8)[0]
    before = first(x)
    second = RGPR(posterior, output=lambda parts: -parts[0]).fit(one, progress=False)
    assert posterior.output is None
    assert second.posterior.network is first.posterior.network is posterior.network
    torch.testing.assert_close(first(x), before)
    torch.testing.assert_close(second(x).argmin(1), before.argmax(1))
    posterior.output = 0
    with pytest.raises(ValueError, match=r"output=1, and this posterior already takes the part 0"):
        RGPR(posterior, output=1)
    torch.testing.assert_close(first(x), before)
    assert RGPR(posterior, output=0).posterior.output == 0
    fresh = BASES[base](WithAuxiliary())
    with pytest.raises(ValueError, match="likelihood"):
        RGPR(fresh, likelihood="nonsense", output=1)
    assert fresh.output is None  # a model that was refused leaves nothing behind


# -- Hugging Face --------------------------------------------------------------------------------


def test_a_hugging_face_image_classifier(tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        image_size=16, patch_size=8, num_labels=3,
    )  # fmt: skip
    network = ViTForImageClassification(config)
    x = torch.randn(24, 3, 16, 16)
    batches = [{"pixel_values": x, "labels": torch.arange(24) % 3}]
    model = RGPR(network).fit(batches, progress=False)
    torch.testing.assert_close(model({"pixel_values": x}), model(x))
    assert float((model(1e6 * x) - 1 / 3).abs().max()) < 1e-2


@pytest.mark.filterwarnings("ignore:.*are training inputs")
def test_a_hugging_face_text_classifier(tmp_path: Path) -> None:
    from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=40, num_labels=3,
    )  # fmt: skip
    network = BertForSequenceClassification(config).eval()
    batches = [
        BatchEncoding({**texts(20, longest, seed=longest), "labels": torch.arange(20) % 3})
        for longest in (5, 9, 7)
    ]
    with pytest.raises(TypeError, match=r"input='bert\.embeddings\.word_embeddings'"):
        RGPR(network).fit(batches, progress=False)
    model = RGPR(network, input="bert.embeddings.word_embeddings").fit(batches, progress=False)
    model.calibrate(batches, progress=False)
    x = texts(20, seed=3)
    difference = model.score(BatchEncoding(padded(x, 15))) - model.score(x)
    assert float(difference.abs().max()) < 1e-5
    assert model.predict_set(x).shape == (20, 3)
