"""How well outliers are found, and what that costs at the data: ten methods on the same networks.

For each seed a network is trained, 2000 images are split off the test set for validation, and the
metrics are those of the rest. Outliers for tuning are smoothed noise made of training images and
never one of the test sets. A finished seed is one JSON file, so a run that was stopped goes on
where it was; the summary is made of these files alone.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from .. import __version__, noise
from ..baselines.detectors import KNN, Detector, Energy, Mahalanobis, ViM
from ..metrics import accuracy, auroc, confidence, ece, fpr95, nll
from ..model import RGPR
from ..posteriors import Temperature
from ..posteriors.weight_laplace import choose_prior_precision
from ..storage import replacing
from ..training import Recipe, lenet, resnet18, train
from ..tuning import TuningResult
from .data import Images, Loader, digits, grey, read_images, some, three_channels

__all__ = ["METHODS", "SETS", "run"]

VALIDATION = OUTLIERS_TO_TUNE = FAR = 2000
MOST_OUTLIERS = 5000
ALPHAS = (1.0, 10.0, 100.0, 1e4)


@dataclass(frozen=True)
class Setting:
    """An in-distribution set.

    Attributes:
        network: Builds the network.
        recipe: Trains it.
        images: Training and test images, from the data root.
        outliers: The test outliers, from the data root and the test images.
        grid: How many prior precisions, from 1e-4 to 1e4, last-layer Laplace is tried with.
    """

    network: Callable[[], nn.Module]
    recipe: Recipe
    images: Callable[[Path | None], tuple[Images, Images]]
    outliers: dict[str, Callable[[Path | None, Tensor], Tensor]]
    grid: int = 41

    def smaller(self) -> Setting:
        """A tenth of the training and of the grid."""
        recipe = dataclasses.replace(self.recipe, epochs=max(1, self.recipe.epochs // 10))
        return dataclasses.replace(self, recipe=recipe, grid=3)


@dataclass(frozen=True)
class Prepared:
    """What every method gets: the network, last-layer Laplace, and loaders."""

    network: nn.Module
    la: Any
    train: Loader
    validation: Loader
    outliers: Loader


@dataclass(frozen=True)
class Built:
    """A method, ready to be measured.

    Attributes:
        predict: Probabilities ``(B, C)``, or scores ``(B,)``, higher for more in-distribution.
        seconds: How long its parts took.
        tuning: What tuning chose, where there was some.
    """

    predict: Callable[[Tensor], Tensor]
    seconds: dict[str, float]
    tuning: TuningResult | None = None


def run(
    out: Path,
    *,
    seed: int = 0,
    small: bool = False,
    data: Path | None = None,
    name_of_set: str = "digits",
    seeds: list[int] | None = None,
    device: str = "cpu",
) -> None:
    """Write ``SET-seedN.json`` for each seed, then ``detection.json`` and ``detection.md``.

    Args:
        out: The folder. Seeds whose file is there are not run again.
        seed: The only seed, unless ``seeds`` are given.
        small: A tenth of the training.
        data: The folder of images, see :mod:`rgpr.paper.data`.
        name_of_set: ``"mnist"``, ``"cifar10"``, or ``"digits"``, which needs no ``data``.
        seeds: One network each.
        device: Where to train and predict.

    Raises:
        FileNotFoundError: A set of images is missing.
        ValueError: No such set, or a file of a run with other settings is in the way.
    """
    if name_of_set not in SETS:
        raise ValueError(f"no set '{name_of_set}' for detection; there are {', '.join(SETS)}")
    seeds = [seed] if seeds is None else seeds
    command = ["rgpr paper run detection", "--small" if small else "", f"--set {name_of_set}"]
    command += [f"--data {data}" if data else "", f"--seeds {' '.join(map(str, seeds))}"]
    command += [f"--device {device}", f"--out {out}"]
    paths = {number: out / f"{name_of_set}-seed{number}.json" for number in seeds}
    waiting = [number for number, path in paths.items() if not _done(path, small)]
    if waiting:
        setting = SETS[name_of_set].smaller() if small else SETS[name_of_set]
        images = _on_device(setting, data, device)
        about = _about(device, " ".join(part for part in command if part))
        for number in tqdm(waiting, desc=f"detection, {name_of_set}", disable=None):
            checkpoint = _checkpoints(out) / f"{name_of_set}-seed{number}.safetensors"
            with _exact_products():
                result = _one_seed(setting, *images, number, device, checkpoint)
            head = {"set": name_of_set, "seed": number, "small": small}
            _write_json(paths[number], {**head, **result, "about": about})
    text = _write_summary(out)
    print(f"{text}\nwritten to {(out / 'detection.md').resolve()}")


def _done(path: Path, small: bool) -> bool:
    if not path.exists():
        return False
    if json.loads(path.read_text())["small"] != small:
        raise ValueError(
            f"{path} is of a run {'without' if small else 'with'} --small; remove it, or choose "
            "another --out"
        )
    return True


def _checkpoints(out: Path) -> Path:
    """A folder that version control leaves alone."""
    folder = out / "checkpoints"
    folder.mkdir(exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    return folder


def _about(device: str, command: str) -> dict[str, Any]:
    cuda = torch.device(device).type == "cuda"
    packages = {name: version(name) for name in ("torch", "laplace-torch", "pytorch-ood", "numpy")}
    return {
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": torch.cuda.get_device_name(device) if cuda else f"CPU, {platform.machine()}",
        "versions": {"rgpr": __version__, "python": platform.python_version(), **packages},
    }


@contextmanager
def _exact_products() -> Iterator[None]:
    """Matrix products in full float32, also where the device has faster ones."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _on_device(
    setting: Setting, data: Path | None, device: str
) -> tuple[Images, Images, dict[str, Tensor]]:
    """Training and test images, and the outliers, at most 5000 of each kind."""
    (x_train, y_train), (x, y) = setting.images(data)
    outliers = {name: make(data, x) for name, make in setting.outliers.items()}
    outliers["uniform noise"] = noise.uniform(
        some(x, MOST_OUTLIERS, 0).float(), generator=torch.Generator().manual_seed(0)
    )
    outliers = {name: some(o, MOST_OUTLIERS, 0).to(device) for name, o in outliers.items()}
    return (x_train.to(device), y_train.to(device)), (x.to(device), y.to(device)), outliers


def _one_seed(
    setting: Setting,
    training: Images,
    test: Images,
    outliers: dict[str, Tensor],
    seed: int,
    device: str,
    checkpoint: Path,
) -> dict[str, Any]:
    started = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = setting.network()
    train(network, training, setting.recipe, device=device, seed=seed, checkpoint=checkpoint)
    seconds: dict[str, Any] = {"training": time.perf_counter() - started}
    x, y = test
    rows = some(torch.arange(len(x), device=device), len(x), seed)
    held_out, rest = rows.tensor_split([min(VALIDATION, len(x) // 5)])
    originals = Loader(some(training[0], OUTLIERS_TO_TUNE, seed))
    noisy = noise.NoiseLoader(noise.smoothed, originals, seed=seed)
    train_loader, validation = Loader(*training), Loader(x[held_out], y[held_out])
    started = time.perf_counter()
    la = _laplace(network, train_loader, validation, setting.grid)
    seconds["LLL, fit"] = time.perf_counter() - started
    prepared = Prepared(network, la, train_loader, validation, Loader(torch.cat(list(noisy))))
    measured: dict[str, Any] = {}
    tuning: dict[str, Any] = {}
    far: dict[str, float] = {}
    for name, build in tqdm(METHODS.items(), desc="methods", leave=False, disable=None):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what tuning says is kept in the file
            built = build(prepared)
        measured[name] = _measure(built.predict, Loader(x[rest], y[rest]), outliers)
        seconds |= {f"{name}, {part}": value for part, value in built.seconds.items()}
        if built.tuning is not None:
            tuning[name] = _shortened(built.tuning)
        if name == "RGPR adaptive":
            far = _far_away(built.predict, x[rest][:FAR])
    return {
        "sizes": {
            "train": len(training[0]),
            "validation": len(held_out),
            "test": len(rest),
            "outliers": {name: len(o) for name, o in outliers.items()},
        },
        "methods": measured,
        "confidence far away": far,
        "prior precision": float(la.prior_precision.mean()),
        "tuning": tuning,
        "seconds": seconds,
    }


def _laplace(network: nn.Module, train_loader: Loader, validation: Loader, grid: int) -> Any:
    """Last-layer Laplace, its prior precision the best of a grid for the validation data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice about its own defaults
        from laplace import Laplace

        la: Any = Laplace(
            copy.deepcopy(network),
            "classification",
            subset_of_weights="last_layer",
            hessian_structure="kron",
        )
        la.fit(train_loader)
        choose_prior_precision(la, validation, grid_size=grid)
    return la


@torch.no_grad()
def _measure(
    predict: Callable[[Tensor], Tensor], test: Loader, outliers: dict[str, Tensor]
) -> dict[str, Any]:
    """All metrics of one method; those of probabilities only where it has some."""

    def scores(loader: Loader) -> Tensor:
        output = torch.cat([predict(x) for x in loader])
        return output if output.dim() == 1 else confidence(output)

    p = torch.cat([predict(x) for x, _ in test])
    inside = p if p.dim() == 1 else confidence(p)
    outside = {name: scores(Loader(x)) for name, x in outliers.items()}
    result: dict[str, Any] = {}
    for metric, measure in (("fpr95", fpr95), ("auroc", auroc)):
        values = {name: measure(inside, scores) for name, scores in outside.items()}
        result[metric] = {**values, "mean": mean(values.values())}
    if p.dim() == 2:
        assert test.y is not None
        result |= {"ece": ece(p, test.y), "nll": nll(p, test.y), "accuracy": accuracy(p, test.y)}
    return result


@torch.no_grad()
def _far_away(predict: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, float]:
    """Mean confidence at ``alpha * x``."""
    return {
        f"{alpha:g}": confidence(torch.cat([predict(alpha * b) for b in Loader(x)])).mean().item()
        for alpha in ALPHAS
    }


def _shortened(result: TuningResult) -> dict[str, Any]:
    names = ("objective", "sigma2", "ood_weight", "calibration", "metrics", "converged", "warnings")
    return {name: getattr(result, name) for name in names}


# -- methods -------------------------------------------------------------------------------------


def _base(base: Any, prepared: Prepared) -> Built:
    """A posterior alone: the residual's variance is zero."""
    model = RGPR(base, layers="input", residual="paper").fit(prepared.validation, progress=False)
    model.sigma2 = 0.0
    return Built(model, {})


def _temperature(prepared: Prepared) -> Built:
    started = time.perf_counter()
    base = Temperature(prepared.network).fit(prepared.validation, progress=False)
    seconds = time.perf_counter() - started
    return dataclasses.replace(_base(base, prepared), seconds={"fit": seconds})


def _detector(kind: Callable[[nn.Module], Detector], prepared: Prepared) -> Built:
    started = time.perf_counter()
    detector = kind(prepared.network).fit(prepared.train, progress=False)
    return Built(lambda x: -detector.score(x), {"fit": time.perf_counter() - started})


def _rgpr(residual: str, options: dict[str, Any], prepared: Prepared) -> Built:
    started = time.perf_counter()
    model = RGPR(prepared.la, residual=residual).fit(prepared.train, progress=False)
    fitted = time.perf_counter()
    if options.get("objective") != "likelihood":
        options = {**options, "ood": prepared.outliers}
    result = model.tune(prepared.validation, progress=False, **options)
    return Built(model, {"fit": fitted - started, "tune": result.seconds}, result)


METHODS: dict[str, Callable[[Prepared], Built]] = {
    "MAP": lambda prepared: _base(prepared.network, prepared),
    "temperature": _temperature,
    "energy": partial(_detector, Energy),
    "KNN": partial(_detector, KNN),
    "Mahalanobis": partial(_detector, Mahalanobis),
    "ViM": partial(_detector, ViM),
    "LLL": lambda prepared: _base(prepared.la, prepared),
    "RGPR paper-LL": partial(_rgpr, "paper", {"objective": "likelihood"}),
    "RGPR paper-OOD": partial(_rgpr, "paper", {"objective": "ood", "ood_weight": 0.5}),
    "RGPR adaptive": partial(_rgpr, "adaptive", {}),
    "adaptive, temperature": partial(_rgpr, "adaptive", {"calibrate": False, "temperature": True}),
}


# -- report --------------------------------------------------------------------------------------

NOTES = """\
Means over the seeds, after ± the standard deviation between them. FPR95 (less is better) and AUROC
(more is better) are means over the sets of outliers; the score is the largest probability, or the
detector's own. ECE has 15 bins. Detectors have no probabilities of their own. Outliers for tuning
are smoothed noise made of training images; no test set of outliers is looked at before the end.
Training on a GPU does not repeat itself bit by bit, so another run gives other networks.

SVHN is re-cropped from the full-number release, not the published 32 x 32 files; scenes stand in
for LSUN; letters are handwritten capitals A-Z and stand in for EMNIST letters."""


def _write_json(path: Path, content: Any) -> None:
    _write(path, json.dumps(_finite(content), indent=2, allow_nan=False) + "\n")


def _finite(content: Any) -> Any:
    """The same with ``None`` for infinities, such as the NLL of a probability of zero."""
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text)


def _write_summary(out: Path) -> str:
    """``detection.json`` and ``detection.md`` from all seeds in the folder; gives the latter."""
    by_set: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(out.glob("*-seed*.json")):
        result = json.loads(path.read_text())
        by_set.setdefault(result["set"], []).append(result)
    summary = {}
    for name, results in by_set.items():
        results.sort(key=lambda result: int(result["seed"]))
        abouts = [result["about"] for result in results]
        summary[name] = {
            "seeds": [result["seed"] for result in results],
            "small": any(result["small"] for result in results),
            "sizes": results[0]["sizes"],
            **{
                part: _over_seeds([result[part] for result in results])
                for part in ("methods", "confidence far away", "seconds")
            },
            "about": [about for i, about in enumerate(abouts) if about not in abouts[:i]],
        }
    _write_json(out / "detection.json", summary)
    parts = ["# Detection of outliers, and calibration", NOTES]
    parts += [_markdown(name, content) for name, content in summary.items()]
    text = "\n\n".join(parts) + "\n"
    _write(out / "detection.md", text)
    return text


def _over_seeds(trees: list[Any]) -> dict[str, Any]:
    """Trees of numbers, one a seed, as one tree of mean, spread and list."""
    if isinstance(trees[0], dict):
        return {key: _over_seeds([tree[key] for tree in trees]) for key in trees[0]}
    if None in trees:
        return {"mean": None, "spread": None, "seeds": trees}
    spread = stdev(trees) if len(trees) > 1 else None
    return {"mean": mean(trees), "spread": spread, "seeds": trees}


def _markdown(name: str, content: dict[str, Any]) -> str:
    methods, sizes = content["methods"], content["sizes"]
    kinds = list(sizes["outliers"])
    numbers = f"{sizes['train']} training, {sizes['validation']} validation, {sizes['test']} test"
    lines = [
        f"## In-distribution: {name}{' (small)' if content['small'] else ''}",
        "",
        f"Seeds {', '.join(map(str, content['seeds']))}; {numbers} images. All in %, but the NLL.",
        "",
        *_head(["method", "FPR95", "AUROC", "ECE", "NLL", "accuracy"]),
    ]
    for method, found in methods.items():
        cells = [_percent(found["fpr95"]["mean"], 1, True), _percent(found["auroc"]["mean"], 1)]
        if "ece" in found:
            loss = found["nll"]["mean"]
            cells += [_percent(found["ece"], 2, True), "inf" if loss is None else f"{loss:.4f}"]
        cells += [_percent(found["accuracy"], 2)] if "accuracy" in found else ["-"] * 3
        lines.append(_row([method, *cells]))
    lines += ["", *_head(["FPR95 against", *kinds])]
    for method, found in methods.items():
        lines.append(_row([method, *(_percent(found["fpr95"][kind], 1) for kind in kinds)]))
    far, seconds = content["confidence far away"], content["seconds"]
    lines += ["", *_head(["RGPR adaptive, mean confidence at", *(f"{alpha} x" for alpha in far)])]
    lines += [_row(["test images", *(f"{value['mean']:.4f}" for value in far.values())])]
    lines += ["", *_head(["what takes time", "seconds"])]
    lines += [_row([part, f"{value['mean']:.1f}"]) for part, value in seconds.items()]
    for about in content["about"]:
        versions = ", ".join(f"{package} {number}" for package, number in about["versions"].items())
        lines += ["", f"{about['date']}, {about['hardware']}; {versions}; by", ""]
        lines += [f"    {about['command']}"]
    return "\n".join(lines)


def _head(cells: list[str]) -> list[str]:
    return [_row(cells), "|---" * len(cells) + "|"]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _percent(value: dict[str, Any], digits: int, spread: bool = False) -> str:
    text = f"{100 * value['mean']:.{digits}f}"
    if spread and value["spread"] is not None:
        text += f" ± {100 * value['spread']:.{digits}f}"
    return text


# -- data ----------------------------------------------------------------------------------------


def _files(name: str) -> Callable[[Path | None], tuple[Images, Images]]:
    return lambda data: (read_images(data, name, "train"), read_images(data, name, "test"))


def _others(
    name: str, change: Callable[[Tensor], Tensor] = lambda x: x
) -> Callable[[Path | None, Tensor], Tensor]:
    """The test images of another set, at most 5000, changed to fit the network."""
    return lambda data, _: change(some(read_images(data, name)[0], MOST_OUTLIERS, 0))


SETS = {
    "mnist": Setting(
        lenet,
        Recipe.fast(augment="crop"),  # mirrored digits are other digits
        _files("mnist"),
        {
            "Fashion-MNIST": _others("fashion_mnist"),
            "KMNIST": _others("kmnist"),
            "letters": _others("letters_az_sample"),
            "grey CIFAR-10": _others("cifar10", grey),
        },
    ),
    "cifar10": Setting(
        resnet18,
        Recipe.fast(),
        _files("cifar10"),
        {
            "SVHN": _others("svhn"),
            "scenes": _others("scenes32"),
            "CIFAR-100": _others("cifar100"),
            "Fashion-MNIST": _others("fashion_mnist", three_channels),
        },
    ),
    "digits": Setting(
        partial(lenet, size=16),
        Recipe.fast(augment="none", batch_size=64, lr=0.02),
        lambda _: digits(),
        {"inverted": lambda _, x: 255 - x, "mirrored": lambda _, x: x.flip(3)},
    ),
}
