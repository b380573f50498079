from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import rgpr
from devices import needs_gpu
from networks import LeNet, Reused, Task, convolutional, laplace_over_blobs, mlp
from rgpr.saving.container import FORMAT, read, write

both_residuals = pytest.mark.parametrize("residual", ["onset", "paper"])


def saved(
    tmp_path: Path, network: nn.Module | None = None, residual: str = "onset"
) -> tuple[Path, rgpr.RGPR]:
    model = rgpr.RGPR(network or mlp(), residual=residual).fit([torch.randn(40, 4)])
    model.sigma2 = torch.rand(len(model.layers))
    path = tmp_path / "m.safetensors"
    model.save(path)
    return path, model


@both_residuals
def test_round_trip(tmp_path: Path, residual: str) -> None:
    path, model = saved(tmp_path, Reused(), residual)
    loaded = rgpr.load(path, Reused())
    x = 20 * torch.randn(9, 4)
    assert (model.variance(x) > 0).any()
    assert torch.equal(loaded(x), model(x))
    assert torch.equal(loaded.variance(x), model.variance(x))
    assert torch.equal(loaded.score(x), model.score(x))
    assert torch.equal(loaded.sigma2, model.sigma2)
    assert loaded.recipe == model.recipe
    assert loaded.layers == model.layers == ["input", "relu#0", "relu#1"]
    assert os.listdir(tmp_path) == ["m.safetensors"]


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_round_trip_of_last_layer_laplace(tmp_path: Path, structure: str, likelihood: str) -> None:
    la, x, _ = laplace_over_blobs(likelihood, structure)
    model = rgpr.RGPR(la).fit([x])
    model.save(tmp_path / "m.safetensors")
    loaded = rgpr.load(tmp_path / "m.safetensors", mlp())
    assert loaded.likelihood == likelihood
    for expected, ours in zip(
        model(x) if likelihood == "regression" else [model(x)],
        loaded(x) if likelihood == "regression" else [loaded(x)],
        strict=True,
    ):
        assert torch.equal(ours, expected)


def test_buffers_layout_dtype_and_options_come_back(tmp_path: Path) -> None:
    network = LeNet().to(memory_format=torch.channels_last)
    x = torch.randn(40, 1, 8, 8)
    network(x)  # moves BatchNorm's statistics
    model = rgpr.RGPR(network, nan="raise").fit([x])
    model.save(tmp_path / "m")
    loaded = rgpr.load(tmp_path / "m", LeNet())
    torch.testing.assert_close(loaded(x), model(x))
    assert loaded.nan == "raise"
    wide = rgpr.RGPR(mlp().double()).fit([torch.randn(40, 4).double()])
    wide.save(tmp_path / "wide")
    loaded = rgpr.load(tmp_path / "wide", mlp().double())
    x = torch.randn(5, 4).double()
    assert torch.equal(loaded(x), wide(x))


def test_tied_weights(tmp_path: Path) -> None:
    def tied() -> nn.Sequential:
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        second.weight = first.weight
        return nn.Sequential(first, nn.ReLU(), second)

    path, model = saved(tmp_path, tied())
    x = torch.randn(5, 4)
    assert torch.equal(rgpr.load(path, tied())(x), model(x))


SAVED = """
import hashlib, sys
from pathlib import Path
import torch
sys.path.insert(0, {tests!r})
import rgpr
from networks import mlp
torch.manual_seed(0)
network, x = mlp().eval(), torch.randn(200, 4)
model = rgpr.RGPR(network).fit((x[:100], torch.arange(100) % 3), progress=False)
model.calibrate(x[100:], progress=False)
for number in range(6):  # safetensors throws its dice at every save
    path = Path(sys.argv[1]) / f"{{number}}.safetensors"
    model.save(path)
    print(hashlib.sha256(path.read_bytes()).hexdigest())
"""


def test_equal_models_give_equal_files(tmp_path: Path) -> None:
    """In two processes, whose hashes of words differ."""
    script, found = SAVED.format(tests=str(Path(__file__).parent)), set()
    for seed in ("1", "2"):
        folder = tmp_path / seed
        folder.mkdir()
        made = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script, str(folder)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        )
        found |= set(made.stdout.split())
    assert len(found) == 1


def test_names_with_any_characters(tmp_path: Path) -> None:
    """The header is written anew, so it must be escaped as safetensors does."""
    path, odd = tmp_path / "m.safetensors", 'höhe\t\x01\x7f\\"\u2028🙂/'
    write(path, {odd: torch.arange(5.0), "a": torch.ones(2)}, {odd: odd})
    tensors, about, version = read(path)
    assert torch.equal(tensors[odd], torch.arange(5.0))
    assert torch.equal(tensors["a"], torch.ones(2))
    assert (about, version) == ({odd: odd}, FORMAT)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.safetensors"):
        rgpr.load(tmp_path / "missing.safetensors", mlp())
    with pytest.raises(FileNotFoundError, match="no file"):
        rgpr.load(tmp_path, mlp())  # a folder


def test_no_such_folder(tmp_path: Path) -> None:
    model = saved(tmp_path)[1]
    with pytest.raises(FileNotFoundError, match=r"no folder .*missing to save m\.safetensors"):
        model.save(tmp_path / "missing" / "m.safetensors")


def test_truncated_file(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    whole = path.read_bytes()
    for length in (0, 4, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="not a complete safetensors file"):
            rgpr.load(path, mlp())


def test_wrong_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(mlp().state_dict(), path)
    with pytest.raises(ValueError, match=r"not one that RGPR\.save wrote"):
        rgpr.load(path, mlp())


def test_newer_format_and_unknown_posterior(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    for number in (0, FORMAT + 1):
        save_file({"x": torch.ones(1)}, path, metadata={"rgpr_format": str(number), "rgpr": "{}"})
        with pytest.raises(ValueError, match=f"has format {number}.*upgrade"):
            rgpr.load(path, mlp())
    network = mlp()
    weights = {f"network.{k}": v for k, v in network.state_dict().items()}
    write(path, weights, {"posterior": "oracle", "config": {}, "layers": []})
    with pytest.raises(ValueError, match=r"kind 'oracle'.*'last-layer-laplace', 'map'"):
        rgpr.load(path, network)


def test_incomplete_content(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    tensors, about, version = read(path)
    assert version == FORMAT
    for missing in (
        "residual.sigma2",
        "residual.onset",
        "residual.typical",
        "residual.unit",
        "temperature",
        "layer.0.mean",
        "layer.1.axes",
    ):
        write(path, {k: v for k, v in tensors.items() if k != missing}, about)
        name = missing.rpartition(".")[2]
        with pytest.raises(ValueError, match=f"is incomplete: it has no '{name}'"):
            rgpr.load(path, mlp())
    for missing in ("nan", "residual", "coordinates"):
        write(path, tensors, {k: v for k, v in about.items() if k != missing})
        with pytest.raises(ValueError, match=f"is incomplete: it has no '{missing}'"):
            rgpr.load(path, mlp())


def test_a_file_sets_nothing_but_what_was_learned(tmp_path: Path) -> None:
    path, model = saved(tmp_path)
    tensors, about, _ = read(path)
    for name in ("training", "_layers", "score"):
        tensors[f"learned.{name}"] = torch.ones(1)
    write(path, tensors, about)
    loaded = rgpr.load(path, mlp())
    assert loaded.training is True
    assert loaded.layers == model.layers
    x = torch.randn(5, 4)
    assert torch.equal(loaded.score(x), model.score(x))


def test_a_point_regressor_comes_back_as_one(tmp_path: Path) -> None:
    x = torch.randn(40, 4)
    model = rgpr.RGPR(mlp(), likelihood="regression").fit([x])
    model.save(tmp_path / "m")
    loaded = rgpr.load(tmp_path / "m", mlp())
    assert loaded.likelihood == "regression"
    assert torch.equal(loaded(x)[1], model(x)[1])


def test_wrong_network_is_refused_and_left_alone(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    for network, message in (
        (mlp(width=17), r"'0\.weight' was float32 \(16, 4\) and is float32 \(17, 4\) in"),
        (mlp().double(), r"was float32 \(16, 4\) and is float64"),
        (mlp(hidden=1), r"no '4\.weight' in the network"),
        (mlp(hidden=3), r"no '6\.weight' was saved"),
    ):
        before = {k: v.clone() for k, v in network.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            rgpr.load(path, network)
        assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())


def test_a_network_that_differs_much_is_told_in_short(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    with pytest.raises(ValueError, match=r"another network: '0\.bias' .* and 2 more\. Pass"):
        rgpr.load(path, mlp(width=17))
    with pytest.raises(ValueError, match=r"'4\.weight' was [^;]* \(2, 16\) in the network\. Pass"):
        rgpr.load(path, mlp(outputs=2))


@both_residuals
def test_a_file_without_axes_means_the_usual_ones(tmp_path: Path, residual: str) -> None:
    """As files had it before networks were read along other axes than batch and channel."""
    x, path = torch.randn(40, 2, 8, 8), tmp_path / "m.safetensors"
    model = rgpr.RGPR(convolutional(), residual=residual).fit(x, progress=False)
    model.save(path)
    tensors, about, _ = read(path)
    write(path, tensors, {name: value for name, value in about.items() if name != "axes"})
    loaded = rgpr.load(path, convolutional())
    assert torch.equal(loaded.score(3 * x), model.score(3 * x))
    channels = [each.channel for each in loaded._extension().representations]
    # Which axis was pooled depends on the layer: channels are last in sequences, first in images.
    assert channels == [1, *[1 if residual == "paper" else None] * (len(channels) - 1)]


def test_references_that_are_equal_come_back(tmp_path: Path) -> None:
    x = torch.randn(60, 4)
    model = rgpr.RGPR(mlp()).fit(x[:30], progress=False)
    model.calibrate(x[30:].repeat(2, 1), progress=False)
    model.save(tmp_path / "m")
    loaded = rgpr.load(tmp_path / "m", mlp())
    assert torch.equal(loaded.p_value(x), model.p_value(x))


def test_writing_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = saved(tmp_path)
    before = path.read_bytes()

    def fail(*args: object, **kwargs: object) -> None:
        Path(str(args[1])).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("rgpr.saving.container.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        model.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["m.safetensors"]


def test_a_layer_may_ask_for_the_version_of_its_state(tmp_path: Path) -> None:
    """As torchvision's MNASNet does; a file holds tensors and no versions."""

    class Versioned(nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state, prefix, metadata, *rest):  # type: ignore[no-untyped-def]
            assert metadata.get("version") == 2
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    network = nn.Sequential(Versioned(4, 4), nn.ReLU(), nn.Linear(4, 3))
    path, model = saved(tmp_path, network)
    x = torch.randn(5, 4)
    twin = nn.Sequential(Versioned(4, 4), nn.ReLU(), nn.Linear(4, 3))
    assert torch.equal(rgpr.load(path, twin)(x), model(x))


def test_extra_state_is_not_lost_silently(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"steps": 3}

        def set_extra_state(self, state: dict[str, int]) -> None:
            pass

    model = rgpr.RGPR(nn.Sequential(Extra(4, 4), nn.ReLU(), nn.Linear(4, 3)))
    model.fit([torch.randn(40, 4)])
    with pytest.raises(TypeError, match=r"'network\.0\._extra_state' is dict.*lost"):
        model.save(tmp_path / "m")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_quantised_network_is_saved_as_a_state(tmp_path: Path) -> None:
    def network() -> nn.Module:
        return torch.ao.quantization.quantize_dynamic(mlp(), {nn.Linear})

    x, path = torch.randn(60, 4), tmp_path / "model.pt"
    model = rgpr.RGPR(network()).fit(x)
    with pytest.raises(TypeError, match=r"part of a quantised network.*torch\.save\(model\.state"):
        model.save(tmp_path / "model.safetensors")
    torch.save(model.state_dict(), path)
    again = rgpr.RGPR(network())
    again.load_state_dict(torch.load(path))
    torch.testing.assert_close(again(3 * x), model(3 * x))


def test_the_metadata_is_plain_json(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    header_length = int.from_bytes(path.read_bytes()[:8], "little")
    metadata = json.loads(path.read_bytes()[8 : 8 + header_length])["__metadata__"]
    assert metadata["rgpr_format"] == str(FORMAT)
    assert json.loads(metadata["rgpr"])["layers"] == ["input", "1", "3"]
    # As readable as any file that this user makes.
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


FORMATS = sorted((Path(__file__).parent / "formats").glob("*.safetensors"))


def test_every_format_has_a_file() -> None:
    """Whoever raises FORMAT puts a file that this version wrote beside the older ones."""
    assert {int(path.stem.partition("-")[0]) for path in FORMATS} == set(range(1, FORMAT + 1))


@pytest.mark.parametrize("path", FORMATS, ids=lambda path: path.stem)
def test_files_of_every_format_give_what_their_version_gave(path: Path) -> None:
    expected = json.loads(path.with_suffix(".json").read_text())
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model = rgpr.load(path, network)
    probes = torch.tensor(expected.pop("probes"))
    answers: dict[str, Callable[[Tensor], Tensor]] = {
        "probabilities": model,
        "variance": model.variance,
        "score": model.score,
        "p_value": model.p_value,
    }
    for name, numbers in expected.items():
        found = answers[name](probes).detach().double()
        wanted = torch.tensor(numbers, dtype=torch.float64)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


# -- files of rgpr 0.1 ---------------------------------------------------------------------------


def in_first_format(
    path: Path, change: Callable[[dict[str, Tensor]], None] = lambda tensors: None
) -> None:
    """Write a file anew as rgpr 0.1 did: one sigma2, and a recipe with more numbers in it."""
    tensors, about, _ = read(path)
    first = {k: t for k, t in tensors.items() if not k.startswith(("residual.", "learned."))}
    first["sigma2"] = tensors["residual.sigma2"]
    change(first)
    recipe: dict[str, Any] = {name: about["residual"][name] for name in ("input", "hidden")}
    recipe |= {"tied": 0.0, "input_share": 1.0, "calibrated": False, "ood_weight": 0.5}
    recipe["max_ece_increase"] = None
    about = about | {"residual": recipe}
    save_file(first, path, metadata={"rgpr_format": "1", "rgpr": json.dumps(about)})


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_the_papers_residual_in_the_first_format(tmp_path: Path, likelihood: str) -> None:
    x, path = torch.randn(40, 4), tmp_path / "m.safetensors"
    model = rgpr.RGPR(mlp(), likelihood=likelihood, residual="paper").fit([x])
    model.sigma2, model.temperature = [0.3, 0.0, 2.0], 1.5
    model.save(path)
    in_first_format(path)
    loaded = rgpr.load(path, mlp())
    assert loaded.layers == model.layers
    assert loaded.recipe == model.recipe
    assert float(loaded.temperature) == 1.5
    far = torch.cat([x, 30 * x])
    assert torch.equal(loaded.variance(far), model.variance(far))
    for ours, expected in zip(
        loaded(far) if likelihood == "regression" else [loaded(far)],
        model(far) if likelihood == "regression" else [model(far)],
        strict=True,
    ):
        assert torch.equal(ours, expected)
    # It is a model like any other: it can be scored, calibrated, saved and loaded again.
    assert loaded.score(far).isfinite().all()
    assert (loaded.score(30 * x) > loaded.score(x)).all()
    loaded.calibrate([torch.randn(50, 4)], progress=False)
    loaded.save(path)
    again = rgpr.load(path, mlp())
    assert read(path)[2] == FORMAT
    assert torch.equal(again.p_value(far), loaded.p_value(far))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["threshold"], "its confidence threshold is left out"),
        (["calibration"], "its calibration of the confidence is left out"),
        (["calibration", "threshold"], "the confidence and its confidence threshold are left out"),
    ],
)
def test_what_the_first_format_had_and_is_gone_is_told(
    tmp_path: Path, names: list[str], message: str
) -> None:
    path, model = saved(tmp_path, residual="paper")
    in_first_format(path, lambda tensors: tensors.update({name: torch.ones(()) for name in names}))
    with pytest.warns(UserWarning, match=rf"rgpr 0\.1; .*{message}.*model\.calibrate") as record:
        loaded = rgpr.load(path, mlp())
    assert record[0].filename == __file__  # it is about the call, and not about this library
    x = torch.randn(9, 4)
    assert torch.equal(loaded(x), model(x))
    with pytest.raises(RuntimeError, match="not calibrated"):
        loaded.flag(x)


def test_prototypes_in_the_first_format_are_refused(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    in_first_format(path)
    network = mlp()
    before = {k: v.clone() for k, v in network.state_dict().items()}
    with pytest.raises(ValueError, match=r"rgpr 0\.1 .*replaced; .*RGPR\(network\)\.fit\(train_"):
        rgpr.load(path, network)
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())


def test_an_incomplete_file_in_the_first_format(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, residual="paper")
    in_first_format(path, lambda tensors: tensors.pop("sigma2"))
    with pytest.raises(ValueError, match="is incomplete: it has no 'sigma2'"):
        rgpr.load(path, mlp())


# -- what calibrating learned --------------------------------------------------------------------


def held_out(digits: Task) -> list[tuple[Tensor, Tensor]]:
    """Enough examples to choose everything that can be chosen.

    Every tenth label is wrong, so that the network is too sure and a temperature is found.
    """
    generator = torch.Generator().manual_seed(0)
    x, y = digits.x[:250].repeat(5, 1), digits.y[:250].repeat(5)
    x = x + 0.02 * torch.randn(x.shape, generator=generator)
    wrong = torch.arange(len(y)) % 10 == 0
    return [(x, torch.where(wrong, (y + 1) % 10, y))]


@pytest.fixture
def calibrated(digits: Task) -> rgpr.RGPR:
    model = rgpr.RGPR(copy.deepcopy(digits.network)).fit(digits.loader())
    model.calibrate(held_out(digits), progress=False)
    assert model.temperature > 1.2
    assert model.residual is not None
    assert float(model.residual.slope) != 1  # it chose a slope, too
    return model


def answers(model: rgpr.RGPR, x: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return {
            "probabilities": model(x),
            "score": model.score(x),
            "p_value": model.p_value(x),
            "flag": model.flag(x, alpha=0.1),
            "found": model.flag(x, fdr=0.2),
            "set": model.predict_set(x, 0.8),
            "temperature": model.temperature,
            "sigma2": model.sigma2,
        }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture
def strange(digits: Task) -> Tensor:
    return torch.cat([digits.x[250:350], torch.rand(50, 64), 3 * digits.x[:50]])


def test_a_calibration_is_saved(
    calibrated: rgpr.RGPR, digits: Task, strange: Tensor, tmp_path: Path
) -> None:
    expected = answers(calibrated, strange)
    assert 0 < expected["flag"].sum() < len(strange)
    assert 1 < expected["set"].sum(1).double().mean() < 10
    calibrated.save(tmp_path / "m")
    loaded = rgpr.load(tmp_path / "m", copy.deepcopy(digits.network))
    assert_same(answers(loaded, strange), expected)
    # Calibrating again starts anew from what the fit left, and not from what calibrating found.
    reports = [model.calibrate(held_out(digits)) for model in (loaded, calibrated)]
    assert reports[0] == reports[1]
    assert_same(answers(loaded, strange), expected)
    with pytest.warns(UserWarning, match="training inputs that fit saw"):
        loaded.calibrate(digits.loader(), progress=False)


def test_a_calibration_is_part_of_the_state(
    calibrated: rgpr.RGPR, digits: Task, strange: Tensor
) -> None:
    expected = answers(calibrated, strange)
    state = {name: tensor.clone() for name, tensor in calibrated.state_dict().items()}
    fresh = rgpr.RGPR(copy.deepcopy(digits.network)).fit([(digits.x, digits.y)])
    before = copy.deepcopy(fresh)
    fresh.load_state_dict(state)
    assert_same(answers(fresh, strange), expected)
    # What was there goes with it: sets are those of the state, and so are the given scales.
    for name in ("_given_onset", "_given_temperature", "_fit_keys"):
        assert torch.equal(getattr(fresh, name), getattr(calibrated, name))
    # A state without a calibration takes that of the model away.
    fresh.load_state_dict(before.state_dict())
    with pytest.raises(RuntimeError, match="not calibrated"):
        fresh.p_value(strange)
    with pytest.raises(RuntimeError, match="not calibrated"):
        fresh.predict_set(strange)
    assert float(fresh.temperature) == 1
    # Loading in place must not have changed the other model's tensors.
    assert_same(answers(calibrated, strange), expected)


def test_a_copy_is_calibrated_and_its_own(calibrated: rgpr.RGPR, strange: Tensor) -> None:
    expected = answers(calibrated, strange)
    twin = copy.deepcopy(calibrated)
    assert_same(answers(twin, strange), expected)
    twin.temperature = 7.0
    twin.sigma2 = 0.0
    with pytest.raises(RuntimeError, match="was set afterwards"):
        twin.predict_set(strange)
    assert torch.equal(twin.p_value(strange), expected["p_value"])  # these do not rest on scales
    assert_same(answers(calibrated, strange), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_moves_leave_a_calibration_its_digits(
    calibrated: rgpr.RGPR, digits: Task, strange: Tensor, dtype: torch.dtype
) -> None:
    """References are float64 whatever the network computes in: their ranks are the promise."""
    expected = answers(calibrated, strange)
    twin = copy.deepcopy(calibrated).to("cpu").to(dtype)
    for name in ("_references", "_label_scores", "_given_onset", "_given_temperature"):
        assert getattr(twin, name).dtype == torch.float64
        assert torch.equal(getattr(twin, name), getattr(calibrated, name))
    assert torch.equal(twin._fit_keys, calibrated._fit_keys)
    assert torch.equal(twin.temperature, calibrated.temperature)
    found = answers(twin, strange.to(dtype))
    # The network's own rounding moves a score past few of the references, and next to no class
    # across the border of a set.
    moved, agreement = (2 / 1251, 1.0) if dtype == torch.float64 else (0.05, 0.97)
    assert (found["p_value"] - expected["p_value"]).abs().max() <= moved
    assert (found["set"] == expected["set"]).double().mean() >= agreement
    # There and back, it is the same model, but for the rounding of the network's weights.
    if dtype == torch.float64:
        assert_same(answers(twin.float(), strange), expected)


@needs_gpu
def test_a_calibration_moves_to_a_gpu(
    calibrated: rgpr.RGPR, digits: Task, strange: Tensor, tmp_path: Path
) -> None:
    expected = answers(calibrated, strange)
    calibrated.save(tmp_path / "m")
    for model in (
        copy.deepcopy(calibrated).cuda(),
        rgpr.load(tmp_path / "m", copy.deepcopy(digits.network).cuda()),
    ):
        found = answers(model, strange.cuda())
        assert all(tensor.is_cuda for tensor in found.values())
        assert (found["p_value"].cpu() - expected["p_value"]).abs().max() <= 4 / 1251
        assert (found["set"].cpu() == expected["set"]).double().mean() > 0.99
        assert torch.equal(found["temperature"].cpu(), expected["temperature"])


@both_residuals
def test_intervals_survive_as_well(tmp_path: Path, residual: str) -> None:
    torch.manual_seed(0)
    x, network = torch.randn(300, 4), mlp(4, 2)
    y = network(x).detach() + 0.3 * torch.randn(300, 2)
    model = rgpr.RGPR(network, likelihood="regression", residual=residual).fit([x[:150]])
    model.calibrate([(x[150:], y[150:])], progress=False)
    model.save(tmp_path / "m")
    loaded = rgpr.load(tmp_path / "m", mlp(4, 2))
    fresh = rgpr.RGPR(mlp(4, 2), likelihood="regression", residual=residual).fit([x])
    fresh.load_state_dict(model.state_dict())
    far = torch.cat([x[:20], 10 * x[:20]])
    for other in (loaded, fresh, copy.deepcopy(model)):
        for found, expected in zip(other.interval(far), model.interval(far), strict=True):
            assert torch.equal(found, expected)
        assert torch.equal(other.p_value(far), model.p_value(far))


def test_sets_of_a_loaded_laplace(tmp_path: Path) -> None:
    la, x, y = laplace_over_blobs("classification", "kron")
    model = rgpr.RGPR(la).fit([(x[:60], y[:60])])
    model.calibrate([(x[60:], y[60:])], progress=False)
    model.save(tmp_path / "m")
    loaded = rgpr.load(tmp_path / "m", mlp())
    with torch.no_grad():
        assert torch.equal(loaded.predict_set(3 * x), model.predict_set(3 * x))
        assert torch.equal(loaded.p_value(3 * x), model.p_value(3 * x))
    assert F.one_hot(model(x).argmax(1), 3).bool()[loaded.predict_set(x).sum(1) == 1].any()


def test_what_fit_saw_survives(tmp_path: Path) -> None:
    """Calibrating on training data is noticed by a model that was loaded, too."""
    x, y = torch.randn(2000, 4), torch.arange(2000) % 3
    model = rgpr.RGPR(mlp()).fit([(x, y)])
    model.save(tmp_path / "m")
    fresh = rgpr.RGPR(mlp()).fit([(torch.randn(64, 4), y[:64])])
    fresh.load_state_dict(model.state_dict())
    for other in (rgpr.load(tmp_path / "m", mlp()), fresh):
        with pytest.warns(UserWarning, match="are training inputs that fit saw"):
            other.calibrate([x[:100]], progress=False)


def test_a_state_is_no_model(tmp_path: Path) -> None:
    model, path = rgpr.RGPR(mlp()), tmp_path / "state.safetensors"
    rgpr.FitState(model).update(torch.randn(20, 4)).save(path)
    with pytest.raises(ValueError, match="holds a fit state and no model; load it by the class"):
        rgpr.load(path, mlp())
