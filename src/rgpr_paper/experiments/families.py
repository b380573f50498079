"""Do automatic layers lose signal? Six networks of five families, each read in three ways.

Not in the paper. Each network is trained on CIFAR-10, or on the made sequences of
:mod:`rgpr_paper.data.sequences`. The default residual is fitted on the training data and reads

- ``automatic``: what ``layers="auto"`` picks;
- ``input and head``: the input and what goes into the last linear layer, nothing between them;
- ``every block``: the output of each block of each stage, named by hand, and what goes into the
  last linear layer;

and what a family lists under ``extra``. The measures are FPR95 (the share of outliers that pass
where 95 % of the test data do) and AUROC of `score`, against near and far outliers. The score reads
mean outputs alone and nothing that `calibrate` sets. The base is therefore the network itself, and
nothing is calibrated.

``--sets`` takes names of families, or of the data that they are trained on. Beside its checkpoint
every network leaves an ``.npz`` file with logits, labels and each layer's strangeness for up to
2000 examples of every set, so that rules which pick layers can be compared without the network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rgpr._network.layers import LayerChoice
from rgpr.metrics import accuracy, auroc, confidence, fpr95
from rgpr.model import RGPR

from ..comparison import over_seeds, stand_ins
from ..context import Context
from ..data import Loader
from ..experiment import Experiment, register
from ..families import CHOICES, DATA, FAMILIES, Data
from ..figures import drawing
from ..networks import SETTINGS, kept, trained_on
from ..section import Claim, Figure, Section, Table, Text, provenance, spread
from ..units import Result, Unit, read_units, run_units

__all__ = ["render", "run"]

NAME = "families"
MARGIN = 2.0
KEPT_ROWS = 2000
_METRICS = {"fpr95": fpr95, "auroc": auroc}
_PLACES = tuple((where, metric) for where in ("near", "far") for metric in _METRICS)


def run(context: Context) -> None:
    """A unit for each family and seed."""
    units = {
        f"{name}-seed{seed}": partial(_unit, context, name, seed)
        for name, family in FAMILIES.items()
        if context.sets is None or {name, family.data} & set(context.sets)
        for seed in context.seeds
    }
    run_units(context, NAME, units)


def _unit(context: Context, name: str, seed: int) -> Result:
    family = FAMILIES[name]
    data = DATA[family.data](context, seed)
    started = time.perf_counter()
    network = _network(context, name, data, seed)
    seconds = time.perf_counter() - started
    train = Loader(data.train.x, data.train.y)
    RGPR(network).fit([next(iter(train))], progress=False)  # a GPU's kernels are compiled here
    choices: dict[str, Any] = {}
    cache = _Cache(network, data)
    for choice, layers in family.choices(network).items():
        model, fitting = _fitted(network, layers, train)
        found = _detection(lambda x, model=model: -model.score(x), data)  # type: ignore[misc]
        choices[choice] = {"layers": model.layers, "fit seconds": fitting, **found}
        cache.add(choice, model)
    np.savez_compressed(kept(context, f"{NAME}-{name}", seed, "npz"), **cache.arrays)
    p = torch.cat([_softmax(network, x) for x, _ in data.test])
    assert data.test.y is not None
    return {
        "family": name,
        "data": data.train.name,
        "seed": seed,
        "notes": data.notes,
        "missing": data.missing,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "training seconds": seconds,
        "accuracy": accuracy(p, data.test.y),
        "confidence": _detection(lambda x: confidence(_softmax(network, x)), data),
        "choices": choices,
    }


def _network(context: Context, name: str, data: Data, seed: int) -> nn.Module:
    """The trained network; one that other experiments train too is theirs."""
    family = FAMILIES[name]
    setting, label = family.setting, f"{NAME}-{name}"
    if context.small:
        setting = family.small
    elif setting is SETTINGS.get(family.data):
        label = family.data
    return trained_on(context, data.train, setting, label, seed)


def _fitted(network: nn.Module, layers: LayerChoice, train: Loader) -> tuple[RGPR, float]:
    """A model that reads these layers, and the seconds that its fit took."""
    started = time.perf_counter()
    model = RGPR(network, layers).fit(train, progress=False)
    if train.x.is_cuda:
        torch.cuda.synchronize()
    return model, time.perf_counter() - started


@torch.no_grad()
def _softmax(network: nn.Module, x: Tensor) -> Tensor:
    logits: Tensor = network(x)
    return logits.double().softmax(1)


@torch.no_grad()
def _detection(certainty: Callable[[Tensor], Tensor], data: Data) -> dict[str, Any]:
    """FPR95 and AUROC against near and far outliers: of each kind, and their mean."""
    inside = torch.cat([certainty(x) for x, _ in data.test])
    result: dict[str, Any] = {}
    for where, sets in data.outliers.items():
        outside = {
            kind: torch.cat([certainty(x) for x in Loader(found.x)]) for kind, found in sets.items()
        }
        result[where] = {}
        for name, metric in _METRICS.items():
            values = {kind: metric(inside, scores) for kind, scores in outside.items()}
            result[where][name] = {**values, "mean": mean(values.values())}
    return result


class _Cache:
    """What rules that pick layers need to know of a network: numbers for each set and layer."""

    def __init__(self, network: nn.Module, data: Data) -> None:
        self.sets = {"train": Loader(data.train.x[:KEPT_ROWS], data.train.y[:KEPT_ROWS])}
        for name, loader in (("validation", data.validation), ("test", data.test)):
            assert loader.y is not None
            self.sets[name] = Loader(loader.x[:KEPT_ROWS], loader.y[:KEPT_ROWS])
        for where, kinds in data.outliers.items():
            for kind, found in kinds.items():
                self.sets[f"{where}:{kind}"] = Loader(found.x[:KEPT_ROWS], found.y[:KEPT_ROWS])
        self.arrays: dict[str, Any] = {}
        for name, loader in self.sets.items():
            assert loader.y is not None
            with torch.no_grad():
                logits = torch.cat([network(x) for x, _ in loader])
            self.arrays[f"{name}|logits"] = logits.float().cpu().numpy()
            self.arrays[f"{name}|labels"] = loader.y.cpu().numpy().astype(np.int16)

    def add(self, choice: str, model: RGPR) -> None:
        """Each layer's strangeness by a model, ``(N, L)``: ``u`` in units of its median."""
        self.arrays[f"layers|{choice}"] = np.array(model.layers)
        for name, loader in self.sets.items():
            found = torch.cat([model.explain(x).strangeness for x, _ in loader])
            self.arrays[f"{name}|{choice}"] = found.float().cpu().numpy()


# -- what it shows -------------------------------------------------------------------------------


def render(folder: Path) -> Section:
    """One table of the networks, one of what each choice of layers finds, and a picture."""
    units = read_units(folder)
    families = {
        name: found
        for name in FAMILIES
        if (found := [unit for unit in units if unit.result["family"] == name])
    }
    section = Section(
        [
            Text(
                "The score of the default residual, fitted on the training data of networks of "
                'several families, by the layers that it reads: those that `layers="auto"` '
                "picks, the input and the head's own input alone, or every block of every stage "
                "named by hand. FPR95 is the share of outliers that pass where 95 % of the test "
                "data do; both measures are in %, means over the kinds of outliers. Fits were "
                "timed while other networks used the same device."
            )
        ]
    )
    section.add(*stand_ins(units), _networks(families), _choices(families))
    section.add(_picture(folder, families))
    section.claims += [_claim(FAMILIES[name].title, found) for name, found in families.items()]
    section.add(*provenance(units))
    return section


_ByFamily = dict[str, list[Unit]]


def _networks(families: _ByFamily) -> Table:
    rows = []
    for name, units in families.items():
        first = units[0].result
        outliers = [
            ", ".join(kind for kind in first["confidence"][where]["fpr95"] if kind != "mean")
            for where in ("near", "far")
        ]
        rows.append(
            [
                FAMILIES[name].title,
                first["data"],
                f"{first['parameters'] / 1e6:.2f}",
                spread(over_seeds(units, "accuracy"), 1, 100),
                spread(over_seeds(units, "training seconds"), 0),
                *outliers,
            ]
        )
    head = ["network", "data", "parameters, millions", "accuracy", "training, s", "near", "far"]
    return Table(head, rows)


def _choices(families: _ByFamily) -> Table:
    rows = []
    for name, units in families.items():
        for choice, found in units[0].result["choices"].items():
            rows.append(
                [
                    f"{FAMILIES[name].title}, {choice}",
                    str(len(found["layers"])),
                    spread(over_seeds(units, "choices", choice, "fit seconds"), 1),
                    *(_cells(units, "choices", choice)),
                ]
            )
        rows.append([f"{FAMILIES[name].title}, confidence", "-", "-", *_cells(units, "confidence")])
    head = ["layers", "representations", "fit, s", "near: FPR95 / AUROC", "far: FPR95 / AUROC"]
    return Table(head, rows)


def _cells(units: Sequence[Unit], *keys: str) -> list[str]:
    return [
        " / ".join(spread(over_seeds(units, *keys, where, m, "mean"), 1, 100) for m in _METRICS)
        for where in ("near", "far")
    ]


def _picture(folder: Path, families: _ByFamily) -> Figure:
    caption = "FPR95 of the score, by network and by the layers that it reads. Less is better."
    with drawing(folder, NAME, caption, ncols=2, figsize=(8, 2.8), sharey=True) as (_, axes, block):
        for axis, where in zip(axes, ("near", "far"), strict=True):
            for number, choice in enumerate(CHOICES):
                values = [_value(units, choice, where, "fpr95") for units in families.values()]
                places = [place + 0.26 * (number - 1) for place in range(len(values))]
                axis.bar(places, values, width=0.24, label=choice)
            axis.set_title(f"{where} outliers")
            titles = [FAMILIES[name].title for name in families]
            axis.set_xticks(range(len(titles)), titles, rotation=30, ha="right")
        axes[0].set_ylabel("FPR95, %")
        axes[1].legend()
    return block


def _value(units: Sequence[Unit], choice: str, where: str, metric: str) -> float:
    """A measure in %, the mean over kinds of outliers and over seeds."""
    return 100 * float(mean(over_seeds(units, "choices", choice, where, metric, "mean")))


def _claim(title: str, units: Sequence[Unit]) -> Claim:
    measured, behind = [], []
    for where, metric in _PLACES:
        values = {choice: _value(units, choice, where, metric) for choice in CHOICES}
        best = (min if metric == "fpr95" else max)(values, key=values.__getitem__)
        label = f"{where} {metric.upper()}"
        measured.append(f"{label} {values['automatic']:.1f} (best {values[best]:.1f})")
        lost = abs(values["automatic"] - values[best])
        if lost > MARGIN:
            behind.append(f"{label} is {lost:.1f} points better with {best}")
    return Claim(
        f"{title}: automatic layers are within {MARGIN:g} points of the best of the three",
        "; ".join(measured),
        not behind,
        "; ".join(behind),
        ours=True,
    )


register(
    Experiment(
        name=NAME,
        title="Automatic layers in networks of several families",
        paper="ours",
        place=170,
        run=run,
        render=render,
    )
)
