"""The comparison with other detectors: its small run, and detectors against references."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rgpr.cli import main
from rgpr.metrics import auroc
from rgpr_paper.detector_claims import verdict
from rgpr_paper.detector_page import page
from rgpr_paper.detector_values import SCORE
from rgpr_paper.experiments import openood
from rgpr_paper.outputs import Outputs, write_some
from rgpr_paper.rivals import RIVALS, Bench, Fitted, Rival, register_rival
from rgpr_paper.rivals.coverage import Coverage, CoverageLayer, edges
from rgpr_paper.rivals.gen import generalised_entropy
from rgpr_paper.section import Table
from rgpr_paper.units import Unit, read_units

CLASSES, WIDTH = 4, 12


@pytest.fixture(scope="module")
def out(run_small: Callable[[Iterable[str]], Path]) -> Path:
    return run_small(["openood"])


@pytest.fixture(scope="module")
def unit(out: Path) -> Unit:
    (found,) = read_units(out / "openood")
    return found


def test_every_detector_is_measured(unit: Unit) -> None:
    found = unit.result["detectors"]
    assert set(found) == set(RIVALS)
    for name, measured in found.items():
        assert "error" not in measured, (name, measured)
        assert (measured["setting"] == "none") == (not RIVALS[name].source)
        assert math.isfinite(measured["fit"])
        assert math.isfinite(measured["microseconds"])
        for where, kinds in (("near", {"mirrored"}), ("far", {"inverted", "UniformNoise"})):
            assert set(measured[where]) == set(openood.METRICS)
            for values in measured[where].values():
                assert set(values) == kinds | {"mean"}
                assert 0 <= values["mean"] <= 1
    assert found[SCORE]["far"]["auroc"]["mean"] > 0.99
    # What detectors know about digits, at least, is more than chance.
    assert min(found[name]["far"]["auroc"]["mean"] for name in found) > 0.55


def test_the_cost_is_that_of_the_fastest_laps_in_turn(unit: Unit) -> None:
    lasting = {"detector": [7.0, 4.0, 5.0], "network": [3.0, 6.0, 2.0]}
    now, order = [0.0], []

    def run(name: str) -> None:
        now[0] += lasting[name][order.count(name)]
        order.append(name)

    clock = openood.Clock("cpu", seconds=lambda: now[0])
    passes = [lambda: run("detector"), lambda: run("network")]
    assert clock.fastest(*passes, laps=3) == [4.0, 2.0]
    assert order == ["detector", "network"] * 3
    assert unit.result["laps"] > 2


@pytest.mark.parametrize(("laps", "words"), [(5, "the fastest of 5 laps"), (None, "a single lap")])
def test_the_caption_says_how_cost_was_measured(
    tmp_path: Path, laps: int | None, words: str
) -> None:
    unit = made("svhn", score=(0.99, 0.02))
    unit.result.update({"laps": laps} if laps else {})
    captions = [b.caption for b in page([unit], tmp_path).blocks if isinstance(b, Table)]
    assert sum(words in caption for caption in captions) == 1


def test_the_mean_over_all_sets_counts_every_set_once(unit: Unit) -> None:
    found = unit.result["detectors"][SCORE]
    values = [v for w in ("near", "far") for k, v in found[w]["fpr95"].items() if k != "mean"]
    assert found["all"]["fpr95"]["mean"] == pytest.approx(np.mean(values))


def test_kept_outputs_give_the_same_numbers(out: Path, unit: Unit) -> None:
    folder = out / "checkpoints"
    kept = np.load(folder / "openood-digits-fast-small-seed0.npz")
    energy = {k: torch.logsumexp(torch.tensor(kept[f"{k}.logits"]).double(), 1) for k in _SETS}
    measured = unit.result["detectors"]["Energy"]
    for where, kind in (("near", "mirrored"), ("far", "inverted")):
        again = auroc(energy["test"], energy[kind])
        assert again == pytest.approx(measured[where]["auroc"][kind], abs=1e-3)
    assert kept["test.u"].shape == (432, len(unit.result["layers"]))
    assert len(kept["test.y"]) == 432
    assert "inverted.y" not in kept
    train = np.load(folder / "openood-digits-train-fast-small-seed0.npz")
    assert train["train.features"].shape == (1257, 1024)
    assert train["train.features"].dtype == np.float16


_SETS = ("test", "mirrored", "inverted")


def test_the_page(out: Path, unit: Unit) -> None:
    text = (out / "openood" / "openood.md").read_text()
    assert f"| → {SCORE} |" in text
    assert "| ReAct | Sun et al. 2021 | pytorch-ood | features | percentile 90" in text
    assert (out / "openood" / "openood.png").exists()
    section = openood.render(out / "openood")
    assert len(section.claims) == 4
    assert all(claim.holds or claim.discussion for claim in section.claims)
    assert all(claim.ours for claim in section.claims)


# -- claims --------------------------------------------------------------------------------------


def made(name: str, **values: tuple[float, float]) -> Unit:
    """A unit in which each detector has one AUROC and one FPR95, near and far.

    Registered detectors that are not named are worse than chance, so that no claim lacks them.
    """
    detectors: dict[str, Any] = {}
    others = {d: (0.1, 0.9) for d, rival in RIVALS.items() if not rival.ours}
    for detector, (area, rate) in {**others, **values}.items():
        metrics = {metric: {"x": area, "mean": area} for metric in openood.METRICS}
        metrics |= {m: {"x": rate, "mean": rate} for m in ("fpr95", "fpr95 openood")}
        shown = SCORE if detector == "score" else detector
        detectors[shown] = {
            **dict.fromkeys(("near", "far", "all"), metrics),
            **{"fit": 1.0, "microseconds": 1.0, "setting": "none", "ours": shown == SCORE},
            **{"paper": "one", "reads": "logits"},
            "code": RIVALS[shown].code if shown in RIVALS else "one",
        }
    result = {
        "set": name,
        "seed": 0,
        "sizes": {},
        "accuracy": 0.9,
        "network": 1.0,
        "seconds": {"training images, one pass": 1.0},
        "detectors": detectors,
    }
    about = {"versions": {}, "date": "today", "hardware": "a CPU", "command": "rgpr"}
    return Unit(f"{name}-seed0", {"small": False}, about, result, {})


def test_a_claim_that_fails_says_who_is_ahead(tmp_path: Path) -> None:
    claims = page([made("cifar100", score=(0.8, 0.3), One=(0.85, 0.4))], tmp_path).claims
    assert [claim.holds for claim in claims] == [False, False, True, True, True, False]
    assert claims[0].discussion == "Ahead by points: One by 5.0."
    assert claims[0].measured == "80.0 % against 85.0 % of One"
    assert claims[4].statement.endswith("is at least 78.7 %, a goal set before the runs")
    assert claims[5].discussion == "Short of it by 3.0 points."


@pytest.mark.parametrize(("lead", "holds"), [(0.004, True), (0.006, False)])
def test_mnist_is_to_be_level_with_the_best_far_away(
    tmp_path: Path, lead: float, holds: bool
) -> None:
    units = [made("mnist", score=(0.99, 0.02), One=(0.99 + lead, 0.02 - lead))]
    assert [claim.holds for claim in page(units, tmp_path).claims] == [False, holds] * 2


def test_a_small_difference_is_shown(tmp_path: Path) -> None:
    units = [made("mnist", score=(0.99, 0.10938), One=(0.98, 0.10924))]
    claim = page(units, tmp_path).claims[2]
    assert not claim.holds
    assert claim.measured == "10.94 % against 10.92 % of One"
    assert claim.discussion == "Ahead by points: One by 0.01."


def test_the_verdict_names_every_place_where_another_is_ahead() -> None:
    units = [
        made("cifar10", score=(0.9, 0.1), One=(0.9, 0.1)),
        made("mnist", score=(0.9, 0.10938), One=(0.8, 0.10924)),
        made("svhn", score=(0.9, 0.1)),
    ]
    # On one set of outliers another is ahead, and its mean is not.
    knn = units[2].result["detectors"]["KNN"]
    knn["near"] = {**knn["near"], "auroc": {"x": 0.95, "mean": 0.1}}
    text = verdict(units).text
    assert f"{len(RIVALS) - 2 + 1} other detectors stand beside the score." in text
    assert "On CIFAR10 and SVHN none of them has a better mean AUROC or FPR95" in text
    assert "On MNIST others are ahead in near FPR95 (One by 0.01 points), far FPR95 (One" in text
    assert "On 3 of 6 single sets of outliers others are ahead" in text
    assert "x against SVHN (AUROC: KNN by 5.0 points)" in text
    assert "Not measured" in verdict([*units, _without(units[0], "KNN")]).text


def _without(unit: Unit, detector: str) -> Unit:
    found = {d: about for d, about in unit.result["detectors"].items() if d != detector}
    return replace(unit, result={**unit.result, "detectors": found, "set": "cifar100"})


def test_where_lll_equals_map_the_page_says_so(tmp_path: Path) -> None:
    unit = made("mnist", score=(0.99, 0.02))
    choice = {"equals_map": True, "precision": 6e6, "variance": 7e-5}
    unit.result["choices"] = [{"LLL": choice}]
    blocks = page([unit], tmp_path).blocks
    assert any("LLL equals MAP over 1 of 1" in getattr(b, "text", "") for b in blocks)


def test_no_claim_holds_while_a_registered_detector_is_not_measured(tmp_path: Path) -> None:
    unit = made("cifar10", score=(0.99, 0.02))
    assert all(claim.holds for claim in page([unit], tmp_path).claims)
    found = unit.result["detectors"]
    about = {key: found["KNN"][key] for key in ("paper", "code", "reads", "ours")}
    unit.result["detectors"] = {**found, "KNN": {**about, "error": "RuntimeError: out of memory"}}
    del unit.result["detectors"]["Energy"]
    claims = page([unit], tmp_path).claims
    assert len(claims) == 4
    for claim in claims:
        assert not claim.holds
        assert claim.discussion == "Not measured: Energy, KNN."


def test_claims_stay_where_the_score_itself_was_not_measured(tmp_path: Path) -> None:
    claims = page([made("svhn", One=(0.9, 0.1))], tmp_path).claims
    assert len(claims) == 5
    for claim in claims:
        assert not claim.holds
        assert SCORE in claim.discussion


def test_a_detector_that_failed_is_shown_with_its_error(tmp_path: Path) -> None:
    unit = made("svhn", score=(0.99, 0.02), One=(0.9, 0.1))
    about = {"paper": "one", "code": "one", "reads": "logits", "ours": False}
    unit.result["detectors"]["Two"] = {**about, "error": "ValueError: no"}
    blocks = page([unit], tmp_path).blocks
    rows = [row for block in blocks for row in getattr(block, "rows", ())]
    assert ["Two", "0", "ValueError: no"] in rows
    assert ["Two", "one", "one", "logits", "failed", "-"] in rows


def test_values_are_the_units_and_their_source_the_registry_s(tmp_path: Path) -> None:
    units = [made(name, score=(0.99, 0.02)) for name in ("mnist", "cifar10")]
    for unit, k in zip(units, ("k = 50, OpenOOD's first", "k = 50, the paper's"), strict=True):
        found = unit.result["detectors"]
        found["DICE"]["setting"] = "sparsity 0.9, as in the paper and in OpenOOD"
        found["KNN"]["setting"] = f"{k} value; all training images"
    tables = [block for block in page(units, tmp_path).blocks if isinstance(block, Table)]
    rows = {row[0]: row[-2:] for row in tables[-1].rows}
    assert rows["DICE"] == ["sparsity 0.9", "OpenOOD's"]
    assert rows["KNN"] == ["k = 50; all training images", RIVALS["KNN"].source]


def test_numbers_of_other_code_are_marked_and_count_as_measured(tmp_path: Path) -> None:
    unit = made("cifar10", score=(0.99, 0.02))
    found = unit.result["detectors"]
    found["GEN"] |= {"code": "pytorch-ood", "setting": "gamma 0.1 as in the paper, the 10 largest"}
    section = page([unit], tmp_path)
    assert all(claim.holds for claim in section.claims)
    tables = [block for block in section.blocks if isinstance(block, Table)]
    for table in tables:
        names = [row[0] for row in table.rows]
        assert "GEN (pytorch-ood)" in names
        assert "GEN" not in names
    (row,) = (row for row in tables[-1].rows if row[0].startswith("GEN"))
    assert row[2] == "pytorch-ood"
    assert row[4] == "gamma 0.1, the 10 largest"
    assert "clamps probabilities" in row[5]


# -- detectors -----------------------------------------------------------------------------------


def bench() -> tuple[Bench, Tensor]:
    """Made features of four classes, a head, and features to be scored."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(400) % CLASSES
    means = 2 * torch.rand(CLASSES, WIDTH, generator=generator)
    features = (means[y] + 0.5 * torch.randn(400, WIDTH, generator=generator)).relu()
    head = nn.Linear(WIDTH, CLASSES)
    with torch.no_grad():
        head.weight.copy_(means - means.mean(0))
        head.bias.copy_(torch.rand(CLASSES, generator=generator))
    seen = Outputs(features, head(features).detach().double(), torch.zeros(400, 1), y)
    context = SimpleNamespace(device="cpu")
    competing: Any = SimpleNamespace(name="cifar10", classes=CLASSES, context=context, seed=0)
    queries = 2 * torch.rand(50, WIDTH, generator=generator)
    return Bench(competing, head, seen, seen), queries


def scores(name: str) -> np.ndarray:
    made_of, queries = bench()
    rival = RIVALS[name]
    read = made_of.head(queries).detach().double() if rival.reads == "logits" else queries
    return rival.fit(made_of).score(read).detach().double().numpy()


def parts() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training features and labels, queries, weight and bias, in float64."""
    made_of, queries = bench()
    train = made_of.train
    tensors = (train.features, train.y, queries, made_of.weight, made_of.bias)
    h, y, q, w, b = (t.numpy() for t in tensors if t is not None)
    return h.astype(float), y, q.astype(float), w.astype(float), b.astype(float)


def test_mahalanobis_plus_plus_is_that_of_features_of_length_one() -> None:
    h, y, q, _, _ = parts()
    h, q = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (h, q))
    means = np.stack([h[y == c].mean(0) for c in range(CLASSES)])
    centred = h - means[y]
    precision = np.linalg.pinv(centred.T @ centred / len(h))
    expected = [min((x - m) @ precision @ (x - m) for m in means) for x in q]
    assert np.allclose(scores("Mahalanobis++"), expected, rtol=1e-3)


def test_fdbd_is_the_mean_distance_to_boundaries_over_that_to_the_mean() -> None:
    h, _, q, w, b = parts()
    expected = []
    for x in q:
        logits = w @ x + b
        top = int(logits.argmax())
        distances = [
            abs(logits[top] - logits[c]) / np.linalg.norm(w[top] - w[c])
            for c in range(CLASSES)
            if c != top
        ]
        expected.append(-np.mean(distances) / np.linalg.norm(x - h.mean(0)))
    assert np.allclose(scores("fDBD"), expected, rtol=1e-4)


@pytest.mark.parametrize("largest", [2, 6])
def test_gen_is_the_generalised_entropy_of_the_largest_probabilities(largest: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = 5 * torch.randn(20, 6, generator=generator, dtype=torch.float64)
    rows[:3, 1] += torch.tensor([30.0, 50.0, 80.0])  # beyond what one minus p can tell from zero
    expected = []
    for logits in rows.numpy():
        e = np.exp(logits - logits.max())
        pairs = sorted(((e[c], np.delete(e, c).sum()) for c in range(6)), reverse=True)
        terms = [(p * rest / e.sum() ** 2) ** 0.1 for p, rest in pairs]
        expected.append(sum(terms[:largest]))
    found = generalised_entropy(rows, 0.1, largest).numpy()
    assert np.allclose(found, expected, rtol=1e-12)
    assert found[0] > found[1] > found[2]


def test_gen_and_vra_read_what_they_are_given() -> None:
    h, _, q, w, b = parts()
    logits = q @ w.T + b
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert np.allclose(scores("GEN"), (p**0.1 * (1 - p) ** 0.1).sum(1), rtol=1e-4)
    expected = []
    for x in q:
        changed = []
        for feature, seen in zip(x, h.T, strict=True):
            alpha, beta = np.quantile(seen, 0.6), np.quantile(seen, 0.9)
            changed.append(0.0 if feature < alpha else min(feature, beta))
        expected.append(-np.log(np.exp(w @ changed + b).sum()))
    assert np.allclose(scores("VRA"), expected, rtol=1e-4)


@pytest.mark.parametrize("name", ["MaxSoftmax", "Energy", "KNN", "ViM"])
def test_one_row_stands_for_this_library_and_for_pytorch_ood(name: str) -> None:
    from pytorch_ood import detector

    made_of, queries = bench()
    logits = made_of.head(queries).detach().double()
    train = made_of.train
    assert train.y is not None
    if name == "KNN":
        theirs = detector.KNN(None, k=50).fit_features(train.features, train.y)
        expected = theirs.predict_features(queries)
    elif name == "ViM":
        theirs = detector.ViM(None, WIDTH // 2, made_of.weight, made_of.bias)
        expected = theirs.fit_features(train.features, train.y).predict_features(queries)
    else:
        kind = {"MaxSoftmax": detector.MaxSoftmax, "Energy": detector.EnergyBased}[name]
        expected = kind(None).predict_logits(logits)
    shift = 1.0 if name == "MaxSoftmax" else 0.0  # one minus the probability, or minus it
    assert np.allclose(scores(name) - shift, expected.double().numpy(), rtol=1e-4, atol=1e-6)


def test_edges_are_narrow_around_one_half() -> None:
    found = edges(50)
    assert found.shape == (50,)
    assert float(found[0]) == 0
    assert float(found[-1]) > 1
    widths = found.diff()
    assert bool((widths > 0).all())
    assert float(widths[:2].min()) > float(widths[22:26].max())


def test_coverage_counts_states_by_hand() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, CLASSES))
    network.double()
    train, x = torch.rand(30, 1, 4, 4).double(), torch.rand(5, 1, 4, 4).double()
    layer = CoverageLayer(network[1], full=4, bins=20, alpha=50.0)
    limits = edges(20).tolist()

    def bins(image: Tensor) -> list[int]:
        hidden = network[:2](image[None]).detach().requires_grad_()
        p = network[2:](hidden).softmax(1)
        (-p.log().mean()).backward()  # the divergence of uniform from p, up to a constant
        found = []
        assert hidden.grad is not None
        for neuron in range(3):
            product = hidden[0, neuron].detach().sum() * hidden.grad[0, neuron].sum()
            state = 1 / (1 + float((-50 * product).exp()))
            found.append(max(i for i in range(19) if limits[i] <= state))
        return found

    seen = [bins(image) for image in train]
    expected = []
    for image in x:
        covered = [
            min(sum(each[n] == b for each in seen) / 4, 1) for n, b in enumerate(bins(image))
        ]
        expected.append(-np.mean(covered))
    detector = Coverage(network, [layer]).fit(train)
    with torch.no_grad():
        assert np.allclose(detector.score(x).numpy(), expected)


# -- what must not go wrong ----------------------------------------------------------------------


def test_a_detector_that_raises_does_not_lose_the_unit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fit(_: Bench) -> Fitted:
        raise RuntimeError("out of\n   luck")

    made_of, _ = bench()
    measuring = openood._Measuring(made_of, {}, {}, {}, 0.0, lambda: None, openood.Clock("cpu"))
    rival = Rival("Unlucky", "nobody", "none", "logits", trains=False, fit=fit)
    assert measuring.tried(rival)["error"] == "RuntimeError: out of luck"
    assert "Unlucky failed" in capsys.readouterr().err


def test_without_pytorch_ood_the_run_stops_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("pytorch_ood", "pytorch_ood.detector"):
        monkeypatch.setitem(sys.modules, module, None)
    options = ["--small", "--seeds", "0", "--out", str(tmp_path)]
    assert main(["paper", "run", "openood", *options]) == 1
    assert "pip install '.[ood]'" in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_two_detectors_cannot_have_one_name() -> None:
    with pytest.raises(ValueError, match="a rival 'KNN' already"):
        register_rival(RIVALS["KNN"])


def test_files_of_outputs_stay_small(tmp_path: Path) -> None:
    def some(rows: int) -> Outputs:
        noise = torch.rand(rows, 512)
        return Outputs(noise, noise[:, :10].double(), noise[:, :5].double(), None)

    path = tmp_path / "some.npz"
    write_some(path, {"test": (some(12_000), 10_000), "other": (some(6000), 5000)}, 0)
    assert 10_000_000 < path.stat().st_size < 14_000_000
    kept = np.load(path)
    rows = {name: len(kept[f"{name}.u"]) for name in ("test", "other")}
    assert rows["test"] == pytest.approx(2 * rows["other"], abs=2)


def test_several_experiments_in_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--small", "--seeds", "0", "--out", str(tmp_path)]
    assert main(["paper", "run", "moons", "nothing", *options]) == 2
    assert "no experiment 'nothing'" in capsys.readouterr().err
    assert main(["paper", "run", "moons", "construction", *options]) == 0
    assert {"moons", "construction"} <= {path.name for path in tmp_path.iterdir()}


def test_without_matplotlib_the_numbers_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr("rgpr_paper.experiments.construction.drawing", missing)
    assert main(["paper", "run", "construction", "--small", "--out", str(tmp_path)]) == 0
    assert "construction: the numbers are written" in capsys.readouterr().err
    assert not (tmp_path / "construction" / "construction.md").exists()
