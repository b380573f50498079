"""States of shards, however cut, saved and merged, against one fit on all of the data."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rgpr
from networks import mlp
from rgpr._network.moments import ClassMoments, Moments
from rgpr._network.reservoir import Reservoir
from rgpr.residual.collecting import Collector
from rgpr.saving.container import read, write

ROWS = 600  # more than the sample that a state keeps


class Two(nn.Module):
    """Takes a dict, with ids that are not measured."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.last = nn.Embedding(5, 4), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x + self.table(kind))))


def network(case: str) -> nn.Module:
    torch.manual_seed(1)
    return (Two() if case == "dict" else mlp(outputs=3, hidden=1)).double()


def data(case: str, seed: int = 0, rows: int = ROWS) -> tuple[Any, Tensor]:
    torch.manual_seed(seed)
    # In float64, since in float32 a network rounds otherwise in batches of another size.
    x = torch.randn(rows, 4).double()
    y: Tensor = torch.randint(3, (rows,))
    if case == "regression":
        y = torch.randn(rows, 3).double()
    if case == "multilabel":
        y = torch.randint(2, (rows, 3))
    return ({"x": x, "kind": torch.randint(5, (rows,))} if case == "dict" else x), y


CASES = ["classification", "regression", "multilabel", "dict"]


def build(case: str, residual: Any = "onset") -> rgpr.RGPR:
    likelihood = "classification" if case == "dict" else case
    return rgpr.RGPR(network(case), likelihood=likelihood, residual=residual)


def rows_of(x: Any, rows: Any) -> Any:
    return {name: part[rows] for name, part in x.items()} if isinstance(x, dict) else x[rows]


def through_a_file(state: Any, model: rgpr.RGPR) -> Any:
    with TemporaryDirectory() as folder:
        state.save(Path(folder) / "s.safetensors")
        return type(state).load(Path(folder) / "s.safetensors", model)


def in_shards(kind: Any, model: rgpr.RGPR, x: Any, y: Tensor, draw: random.Random) -> Any:
    """One state from states of random shards, in batches of random sizes, merged in any order."""
    order = torch.tensor(draw.sample(range(len(y)), len(y)))
    cuts = sorted(draw.sample(range(1, len(y)), draw.randint(0, 4)))
    states = []
    for start, end in zip([0, *cuts], [*cuts, len(y)], strict=True):
        state = kind(model)
        for rows in order[start:end].split(draw.choice([16, 64, 1000])):
            state.update((rows_of(x, rows), y[rows]))
            if draw.random() < 0.1:
                state = through_a_file(state, model)
        states.append(state)
    if draw.random() < 0.3:
        states.append(kind(model))  # a shard without data
    while len(states) > 1:
        state = states.pop(draw.randrange(len(states)))
        other = states.pop(draw.randrange(len(states)))
        states.append(state.merge(through_a_file(other, model) if draw.random() < 0.5 else other))
    return states[0]


def far(x: Any) -> Any:
    return {**x, "x": 5 * x["x"]} if isinstance(x, dict) else 5 * x


def assert_same(model: rgpr.RGPR, expected: rgpr.RGPR, x: Any) -> None:
    assert model.layers == expected.layers
    torch.testing.assert_close(model.sigma2, expected.sigma2, rtol=1e-9, atol=0)
    for points in (x, far(x)):
        torch.testing.assert_close(model.score(points), expected.score(points), rtol=1e-9, atol=0)
        answers = model(points), expected(points)
        if isinstance(answers[0], Tensor):
            answers = (answers[0],), (answers[1],)
        for ours, theirs in zip(*answers, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("residual", ["onset", "paper"])
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=4)
@given(seed=st.integers(0, 10**6))
def test_shards_in_any_order_give_the_model_of_all_data(
    case: str, residual: str, seed: int
) -> None:
    x, y = data(case)
    expected = build(case, residual).fit([(x, y)])
    model = build(case, residual)
    state = in_shards(rgpr.FitState, model, x, y, random.Random(seed))
    assert state.seen == ROWS
    assert_same(model.fit(state), expected, x)
    assert torch.equal(model._fit_keys, expected._fit_keys)


@pytest.mark.parametrize("offset", [1.0, 0.9])
@settings(max_examples=3)
@given(seed=st.integers(0, 10**6))
def test_offsets_are_merged_too(offset: float, seed: int) -> None:
    """The maximum is exact; other quantiles are those of an even sample of rows."""
    recipe = rgpr.ResidualRecipe(
        input=rgpr.Strategy(offset=offset), hidden=rgpr.Strategy("whitened", offset=offset)
    )
    x, y = data("classification")
    expected = build("classification", recipe).fit([(x, y)])
    model = build("classification", recipe)
    model.fit(in_shards(rgpr.FitState, model, x, y, random.Random(seed)))
    assert_same(model, expected, x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=3)
@given(seed=st.integers(0, 10**6))
def test_shards_calibrate_as_all_data_do(case: str, seed: int) -> None:
    model, expected = (build(case).fit([data(case)]) for _ in range(2))
    x, y = data(case, seed=2, rows=400)
    report = expected.calibrate([(x, y)], progress=False)
    state = in_shards(rgpr.CalibrationState, model, x, y, random.Random(seed))
    found = model.calibrate(state)
    assert (found.examples, found.seen, found.labelled) == (400, 400, True)
    assert found.nll == pytest.approx(report.nll, rel=1e-5)
    for name in ("_references", "_label_scores", "temperature"):
        ours, theirs = getattr(model, name), getattr(expected, name)
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert torch.equal(model._val_keys, expected._val_keys)


@pytest.mark.parametrize("residual", ["onset", "paper"])
def test_the_same_batches_give_the_same_bits(residual: str) -> None:
    x, y = data("classification")
    batches = list(zip(x.split(50), y.split(50), strict=True))
    expected, model = (
        build("classification", residual).fit(batches),
        build("classification", residual),
    )
    state = rgpr.FitState(model)
    for batch in batches:
        state.update(*batch)
    for fitted in (
        model.fit(state),
        build("classification", residual).fit(through_a_file(state, model)),
    ):
        assert torch.equal(fitted.sigma2, expected.sigma2)
        assert torch.equal(fitted(5 * x), expected(5 * x))
        assert torch.equal(fitted.score(5 * x), expected.score(5 * x))


def test_data_that_come_later() -> None:
    """Copies of inputs that came before the file was written count as copies after it, too."""
    x, y = data("classification")
    x, y = torch.cat([x, x[:300], x[:300]]), torch.cat([y, y[:300], y[:300]])
    expected = build("classification").fit([(x, y)])
    model = build("classification")
    state = rgpr.FitState(model).update(x[:900], y[:900])
    early = model.fit(state).sigma2
    state = through_a_file(state, model).update(x[900:], y[900:])
    assert_same(model.fit(state), expected, x)
    assert torch.equal(model._fit_keys, expected._fit_keys)
    assert not torch.equal(early, model.sigma2)


def test_r_and_other_models_of_the_same_network() -> None:
    x, y = data("classification")
    state = rgpr.FitState(build("classification")).update(x, y)
    for r in (1.0, 3.0):
        expected = build("classification").fit([(x, y)], r=r)
        assert torch.equal(build("classification").fit(state, r=r).sigma2, expected.sigma2)


def changed(name: str) -> rgpr.RGPR:
    torch.manual_seed(1)
    plain = mlp(outputs=3, hidden=1).double()
    if name == "weights":
        with torch.no_grad():
            plain[0].weight[0, 0] += 1e-3
    if name == "width":
        plain = mlp(outputs=3, hidden=1, width=17).double()
    if name == "dtype":
        plain = plain.float()
    if name == "activation":
        plain[1] = torch.nn.Tanh()
    options: Any = {
        "layers": {"layers": ["0"]},
        "likelihood": {"likelihood": "multilabel"},
        "recipe": {"residual": "paper"},
    }.get(name, {})
    return rgpr.RGPR(plain, **options)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("weights", "weights have other values"),
        ("width", r"'0.weight' was float64 \(16, 4\) and is float64 \(17, 4\)"),
        ("dtype", r"'0.weight' was float64 \(16, 4\) and is float32"),
        ("activation", "'1' was ReLU and is Tanh"),
        ("layers", r"layers \['input', '1'\], and this model reads \['input', '0'\]"),
        ("likelihood", "likelihood was 'classification' and is 'multilabel'"),
        ("recipe", "'combine' was onset and is sum"),
    ],
)
def test_states_of_other_models_are_refused(name: str, words: str, tmp_path: Path) -> None:
    x = data("classification")[0]
    state = rgpr.FitState(build("classification")).update(x)
    state.save(tmp_path / "s")
    other = changed(name)
    with pytest.raises(ValueError, match=words) as caught:
        rgpr.FitState.load(tmp_path / "s", other)
    assert str(tmp_path / "s") in str(caught.value)
    with pytest.raises(ValueError, match=words):
        other.fit(state)
    with pytest.raises(ValueError, match=r"another model|states reads the layers"):
        rgpr.FitState(other).update(x.to(next(other.parameters()).dtype)).merge(state)
    assert state.seen == ROWS


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_weights_that_are_packed_are_compared_too() -> None:
    def quantised(seed: int) -> rgpr.RGPR:
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
        return rgpr.RGPR(torch.ao.quantization.quantize_dynamic(network, {nn.Linear}))

    state = rgpr.FitState(quantised(0)).update(torch.randn(20, 4))
    assert quantised(0).fit(state)._fit_count == 20
    with pytest.raises(ValueError, match="weights have other values"):
        quantised(1).fit(state)


def test_held_out_data_of_another_posterior_are_refused(tmp_path: Path) -> None:
    x = data("classification")[0].float()
    network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 3))
    one = rgpr.RGPR(network).fit(x, progress=False)
    rgpr.CalibrationState(one).update(x).save(tmp_path / "s")
    other = rgpr.RGPR(rgpr.posteriors.MCDropout(network, n_samples=5)).fit(x, progress=False)
    with pytest.raises(ValueError, match="'class' was MAP and is MCDropout"):
        rgpr.CalibrationState.load(tmp_path / "s", other)
    more = rgpr.RGPR(rgpr.posteriors.MCDropout(network, n_samples=9)).fit(x, progress=False)
    rgpr.CalibrationState(other).update(x).save(tmp_path / "s")
    with pytest.raises(ValueError, match=r"'config' was .*'n_samples': 5.* is .*'n_samples': 9"):
        rgpr.CalibrationState.load(tmp_path / "s", more)


def test_inputs_of_another_shape_are_refused() -> None:
    torch.manual_seed(0)
    pool = nn.Sequential(
        nn.Conv1d(2, 4, 1), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    model = rgpr.RGPR(pool)
    state = rgpr.FitState(model).update(torch.randn(9, 2, 5))
    other = rgpr.FitState(model).update(torch.randn(9, 2, 6))
    with pytest.raises(
        ValueError, match=r"shape torch.Size\(\[2, 5\]\), and the other torch.Size\(\[2, 6\]\)"
    ):
        state.merge(other)
    with pytest.raises(ValueError, match=r"one input has shape \(2, 6\)"):
        state.update(torch.randn(9, 2, 6))
    assert model.fit(state)._fit_count == 9  # neither changed it


def test_weights_that_changed_since() -> None:
    model = build("classification")
    x, y = data("classification")
    state = rgpr.FitState(model).update(x, y)
    with torch.no_grad():
        model.posterior.network[0].weight.mul_(1.01)
    with pytest.raises(ValueError, match="weights have other values"):
        model.fit(state)


def test_weights_that_change_between_updates(tmp_path: Path) -> None:
    x, y = data("classification")
    for kind in (rgpr.FitState, rgpr.CalibrationState):
        model, same = (build("classification").fit([(x, y)]) for _ in range(2))
        good, state = kind(model).update(x, y), kind(same).update(x, y)
        with torch.no_grad():
            same.posterior.network[0].weight.mul_(1.01)
        state.update(x, y)
        with pytest.raises(ValueError, match="weights have other values"):
            state.save(tmp_path / "s")
        with pytest.raises(ValueError, match="weights have other values"):
            good.merge(state)
        with pytest.raises(ValueError, match="weights have other values"):
            state.merge(good)
        assert good.seen == ROWS


def test_a_batch_that_fails() -> None:
    x, y = data("classification")
    state = rgpr.FitState(build("classification")).update(x, y)
    with pytest.raises(ValueError, match="not finite"):
        state.update(x[:3] * torch.nan, y[:3])
    assert state.update(x[:5], y[:5]).seen == ROWS + 5  # nothing of it went in
    with pytest.raises(ValueError, match="class"):
        state.update(x[:5], torch.full((5,), 7))
    assert state.update(x[5:10], y[5:10]).seen == ROWS + 10
    expected = build("classification").fit([(x, y), (x[:10], y[:10])])
    assert_same(build("classification").fit(state), expected, x)
    model = build("classification")
    model.posterior.network[0].weight.data *= 1e10
    state = rgpr.FitState(model).update(x, y)
    with pytest.raises(ValueError, match="layer '1' gives values that are not finite"):
        state.update(1e300 * x[:5], y[:5])
    with pytest.raises(RuntimeError, match="failed half-way"):
        state.update(x[:5], y[:5])
    with pytest.raises(RuntimeError, match="failed half-way"):
        model.fit(state)


@pytest.mark.parametrize("residual", ["onset", "paper"])
def test_sums_that_overflowed_stay_refused(residual: str, tmp_path: Path) -> None:
    """A finite value whose square is not."""
    x, y = data("classification")
    state = rgpr.FitState(build("classification", residual)).update(x, y)
    huge = x[:5].clone()
    huge[0, 0] = 1e200
    state.update(huge, y[:5])
    for _ in range(2):
        with pytest.raises(ValueError, match="not finite"):
            state.save(tmp_path / "s")
    with pytest.raises(ValueError, match="not finite"):
        state.update(x[:5], y[:5]).save(tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_targets_beside_a_state() -> None:
    x, y = data("classification")
    model = build("classification")
    state = rgpr.FitState(model).update(x)
    with pytest.raises(TypeError, match=r"update\(x, y\)"):
        model.fit(state, y)
    held_out = rgpr.CalibrationState(model.fit(state)).update(x)
    with pytest.raises(TypeError, match=r"update\(x, y\)"):
        model.calibrate(held_out, y)


@pytest.mark.filterwarnings("ignore:only .* of the labels agree")
def test_a_model_that_is_fitted_again() -> None:
    """A calibration state belongs to the fit that its first data went through."""
    (x, y), (v, w) = data("classification"), data("classification", seed=2)
    model, expected = (build("classification").fit([(x, y)]) for _ in range(2))
    state = rgpr.CalibrationState(model)
    for each in (model, expected):
        each.fit([(3 * x, y)])
    model.calibrate(state.update(v, w))
    expected.calibrate([(v, w)], progress=False)
    assert torch.equal(model._references, expected._references)
    model.fit([(x, y)])
    with pytest.raises(ValueError, match="fitted on other data"):
        model.calibrate(state)


def test_columns_that_never_vary(tmp_path: Path) -> None:
    """Of equal values the sums of squares are zero, and rounding must not make them negative."""
    torch.manual_seed(0)
    model = rgpr.RGPR(mlp(inputs=200), residual="paper")
    values = torch.rand(200)
    total = rgpr.FitState(model)
    for rows in range(3, 20):
        x = values.expand(rows, 200).clone()
        x[:, 0] = torch.randn(rows)
        total.merge(rgpr.FitState(model).update(x))
    total.save(tmp_path / "s")
    assert rgpr.FitState.load(tmp_path / "s", model).seen == total.seen


def test_what_cannot_be_merged() -> None:
    model = build("classification").fit(data("classification")[0])
    state = rgpr.FitState(model)
    with pytest.raises(ValueError, match="with itself"):
        state.merge(state)
    with pytest.raises(TypeError, match="CalibrationState"):
        state.merge(rgpr.CalibrationState(model))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fewer than two inputs"):
        model.fit(state)
    with pytest.raises(RuntimeError, match="not fitted"):
        rgpr.CalibrationState(build("classification"))
    x, y = data("classification")
    labelled, bare = (rgpr.CalibrationState(model).update(x, t) for t in (y, None))
    with pytest.raises(ValueError, match="some of the examples have targets"):
        labelled.merge(bare)
    with pytest.raises(ValueError, match="fitted on other data"):
        build("classification").fit(x[:100]).calibrate(labelled)


def test_no_data_can_be_taken_out() -> None:
    x, y = data("classification")
    model = build("classification").fit([(x, y)])
    for state in (rgpr.FitState(model), rgpr.CalibrationState(model)):
        state.update(x, y)
        with pytest.raises(TypeError, match=r"keep the rounding .* keep a state for each part"):
            state.remove(x[:5], y[:5])
        assert state.seen == ROWS


# -- files ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["fit", "calibration"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("states") / f"{request.param}.safetensors"
    fresh(path).update(*data("classification", rows=60)).save(path)
    return path


def fresh(path: Path) -> Any:
    model = build("classification").fit(data("classification")[0], progress=False)
    return (rgpr.FitState if "fit" in path.name else rgpr.CalibrationState)(model)


def refused(path: Path) -> None:
    state = fresh(path)
    with pytest.raises(ValueError, match=r".") as caught:
        type(state).load(path, state.model)
    assert str(path) in str(caught.value)


@settings(max_examples=12)
@given(st.data())
def test_no_changed_byte_goes_unseen(saved: Path, data: st.DataObject) -> None:
    content = bytearray(saved.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    end = data.draw(st.sampled_from([8, header, len(content)]))
    content[data.draw(st.integers(0, end - 1))] ^= data.draw(st.integers(1, 255))
    changed = saved.with_name(f"changed-{saved.name}")
    changed.write_bytes(content)
    refused(changed)
    changed.write_bytes(saved.read_bytes()[: data.draw(st.integers(0, len(content) - 1))])
    refused(changed)


def test_no_changed_part_goes_unseen(saved: Path) -> None:
    """What another program wrote, with a checksum that is right."""
    tensors, about, _ = read(saved)
    assert type(fresh(saved)).load(saved, fresh(saved).model).seen == 60
    changed = saved.with_name(f"changed-{saved.name}")
    tried = 0

    def attempt(tensors: dict[str, Tensor], about: Any) -> None:
        nonlocal tried
        write(changed, tensors, about)
        refused(changed)
        tried += 1

    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        attempt({k: t for k, t in tensors.items() if k != name}, about)
        attempt({**tensors, name: torch.cat([tensor, tensor])}, about)
        attempt({**tensors, name: tensor[..., None]}, about)
        if tensor.is_floating_point():
            spoilt = tensor.clone()
            spoilt.view(-1)[-1] = torch.nan
            attempt({**tensors, name: spoilt}, about)
    for key in about:
        attempt(tensors, {k: v for k, v in about.items() if k != key})
    state = about["state"]
    for key, value in state.items():
        attempt(tensors, {**about, "state": {k: v for k, v in state.items() if k != key}})
        if isinstance(value, int):
            attempt(tensors, {**about, "state": {**state, key: -1}})
            attempt(tensors, {**about, "state": {**state, key: "many"}})
    attempt(tensors, {**about, "state": []})
    attempt(tensors, [])
    assert tried > 20


def test_files_of_other_kinds(saved: Path, tmp_path: Path) -> None:
    model = fresh(saved).model
    model.save(tmp_path / "model")
    for kind in (rgpr.FitState, rgpr.CalibrationState):
        with pytest.raises(ValueError, match="model holds a model"):
            kind.load(tmp_path / "model", model)
    with pytest.raises(ValueError, match="state and no model"):
        rgpr.load(saved, network("classification"))
    other = rgpr.CalibrationState if "fit" in saved.name else rgpr.FitState
    with pytest.raises(ValueError, match="holds a"):
        other.load(saved, model)
    with pytest.raises(FileNotFoundError):
        other.load(tmp_path / "nothing", model)


PROCESS = """
import sys, torch, rgpr
sys.path.insert(0, {tests!r})
from test_states import build, data
folder, number = sys.argv[1], int(sys.argv[2])
model, (x, y) = build("classification"), data("classification")
if number < 2:
    state = rgpr.FitState(model)
    for rows in torch.arange(600)[number::2].split(100):
        state.update(x[rows], y[rows])
    state.save(f"{{folder}}/{{number}}.safetensors")
else:
    states = [rgpr.FitState.load(f"{{folder}}/{{each}}.safetensors", model) for each in (0, 1)]
    model.fit(states[0].merge(states[1])).save(f"{{folder}}/model.safetensors")
"""


def test_plain_processes_and_files_alone(tmp_path: Path) -> None:
    """Two processes write states, and a third merges them."""
    code = PROCESS.format(tests=str(Path(__file__).parent))
    command = [sys.executable, "-c", code, str(tmp_path)]
    shards = [subprocess.Popen([*command, str(number)]) for number in range(2)]
    assert [shard.wait(timeout=600) for shard in shards] == [0, 0]
    subprocess.run([*command, "2"], check=True, timeout=600)
    x, y = data("classification")
    model = rgpr.load(tmp_path / "model.safetensors", network("classification"))
    assert_same(model, build("classification").fit([(x, y)]), x)


# -- the statistics themselves ---------------------------------------------------------------------


def sampled(x: Tensor, shard: int) -> Reservoir:
    total = Reservoir(512)
    for rows in x.split(shard):
        part = Reservoir(512)
        part.add(rows)
        total.merge(part.state_and_history)
    return total


def test_copies_in_several_shards_are_sampled_as_in_one() -> None:
    x = torch.randint(1500, (3000, 1), generator=torch.Generator().manual_seed(0)).float()
    (alone,), (merged,) = sampled(x, 3000).items, sampled(x, 30).items
    assert torch.equal(alone.sort(0).values, merged.sort(0).values)
    # Shards that did not keep all of their rows: they keep the same ones, but not for the total.
    x = torch.randint(1000, (200_000, 1), generator=torch.Generator().manual_seed(0)).float()
    assert len(sampled(x, len(x)).items[0].unique()) == 392
    assert len(sampled(x, 8192).items[0].unique()) == 303  # and not 38


def test_copies_in_many_shards_have_their_share() -> None:
    """Every second row is one that comes in all shards, and the others are there once."""
    rows = 600
    often = torch.arange(rows).repeat(40).view(40, rows)
    once = torch.arange(40 * rows).view(40, rows) + 1000
    x = torch.stack([often, once], 2).float().view(-1, 1)
    found = sampled(x, 2 * rows).items[0].flatten()
    share = (found < rows).double().mean()
    assert abs(share - 0.5) < 4 * (0.25 / 512) ** 0.5  # four standard errors
    # As many as 256 draws from 600 find, where shards that keep the same rows find a dozen.
    assert len(found[found < rows].unique()) > 100


def test_a_total_knows_what_has_settled() -> None:
    collector = Collector(rgpr.Strategy("prototypes"))
    bad, good = torch.full((2, 3), torch.nan), torch.zeros(2, 3)
    collector.update(bad, torch.zeros(2).long())
    collector.state()
    collector.update(good, torch.zeros(2).long())
    assert not bool(collector.total.isfinite())


@given(st.integers(1, 40), st.sampled_from([2, 12, 100]), st.integers(0, 10**6))
def test_merged_moments_against_plain_sums(n: int, classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    h = 1e3 + torch.randn(n, 3, generator=generator).double()
    y = torch.randint(classes, (n,), generator=generator)
    by_class, plain = ClassMoments(classes), Moments()
    for rows in torch.randperm(n, generator=generator).split(7):
        one, other = ClassMoments(classes), Moments()
        for part in rows.split(3):
            one.update(h[part], y[part])
            other.update(h[part], extremes=True)
        by_class.merge(one.state)
        plain.merge(other.state)
    present = y.unique()
    means = torch.stack([h[y == c].mean(0) for c in present])
    deviations = h - means[torch.searchsorted(present, y)]
    torch.testing.assert_close(by_class.means[present], means, rtol=1e-12, atol=0)
    assert torch.equal(by_class.counts, torch.bincount(y, minlength=classes).double())
    torch.testing.assert_close(by_class.scatter, deviations.T @ deviations, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(plain.mean, h.mean(0), rtol=1e-12, atol=0)
    torch.testing.assert_close(plain.squares, (h - h.mean(0)).square().sum(0), rtol=1e-8, atol=1e-9)
    assert torch.equal(plain.low, h.amin(0))
    assert torch.equal(plain.high, h.amax(0))


def test_an_interrupted_state_is_refused() -> None:
    """Whatever it has taken in of a batch by then, nobody can tell."""

    class Stopping(nn.Module):
        stops = False

        def forward(self, x: Tensor) -> Tensor:
            if self.stops:
                raise KeyboardInterrupt
            return x

    stopping = Stopping()
    model = rgpr.RGPR(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), stopping, nn.Linear(8, 3)))
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    model.fit(x, y, progress=False)
    for state in (rgpr.FitState(model), rgpr.CalibrationState(model)):
        state.update(x, y)
        stopping.stops = True
        with pytest.raises(KeyboardInterrupt):
            state.update(x, y)
        stopping.stops = False
        with pytest.raises(RuntimeError, match=r"interrupted|half-way"):
            state.update(x, y)
        with pytest.raises(RuntimeError, match=r"interrupted|half-way"):
            state.save("never.safetensors")


def test_a_state_of_a_network_says_what_to_wrap_it_in() -> None:
    with pytest.raises(TypeError, match=r"wrap it first: rgpr\.RGPR\(network\)"):
        rgpr.FitState(mlp())


def test_an_empty_state_does_not_take_over_other_layers() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    full = rgpr.FitState(rgpr.RGPR(network)).update(torch.randn(60, 4), torch.arange(60) % 3)
    with pytest.raises(ValueError, match=r"layers \['input', '1'\], and this model reads"):
        rgpr.FitState(rgpr.RGPR(network, layers="input")).merge(full)
