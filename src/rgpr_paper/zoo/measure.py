"""Train an architecture for a few steps, wrap it, and check everything that is promised."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import rgpr

from .batches import Batch, call, rows_of, taken
from .checks import CHECKS, NotApplicable, Subject, state_of
from .entry import Entry
from .samples import Samples

__all__ = ["measure"]

STEPS, BATCH = 10, 16


def measure(entry: Entry, but: Collection[str] = ()) -> dict[str, Any]:
    """The row of an entry: its layers, and for each check its number and whether it holds.

    A check that raises is a failure whose reason is the first line of the error; so is a network
    that cannot be fitted at all.

    Args:
        entry: The entry.
        but: Names of checks to leave out.

    Raises:
        ModuleNotFoundError: The package that has this architecture is not installed.
    """
    torch.manual_seed(0)
    samples = entry.data()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of other libraries about themselves
        network = _trained(entry, samples)
        row: dict[str, Any] = {
            "family": entry.family,
            "name": entry.name,
            "data": samples.about,
            "classes": samples.classes,
            "parameters": sum(p.numel() for p in network.parameters()),
            "excuses": entry.excuses,
            "checks": {},
        }
        before = state_of(network)
        try:
            model = rgpr.RGPR(network, **entry.options).fit(_loader(samples), progress=False)
        except Exception as error:
            return {**row, "error": first_line(error)}
        fresh = partial(_built, entry, samples)
        subject = Subject(model, network, samples, before, fresh)
        row["layers"] = model.layers
        with torch.no_grad():
            row["accuracy"] = float((model(subject.x).argmax(1) == samples.test[1]).double().mean())
            row["checks"] = {
                name: _outcome(check, subject) for name, check in CHECKS.items() if name not in but
            }
    return row


def _outcome(check: Callable[[Subject], tuple[Any, bool]], subject: Subject) -> dict[str, Any]:
    try:
        value, holds = check(subject)
    except NotApplicable as reason:
        return {"value": None, "holds": None, "why": str(reason)}
    except Exception as error:
        return {"value": None, "holds": False, "why": first_line(error)}
    return {"value": value, "holds": holds, "why": ""}


def first_line(error: Exception) -> str:
    """The error in one line that names no file of this machine."""
    lines = re.sub(r"(?<!\w)/[\w./-]+", "PATH", str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _built(entry: Entry, samples: Samples) -> nn.Module:
    network = entry.build(samples.classes)
    return network if entry.after is None else entry.after(network, samples)


def _trained(entry: Entry, samples: Samples) -> nn.Module:
    """A few steps: enough that the network is not the one that it started as."""
    network = entry.build(samples.classes).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    x, y = samples.train
    for _ in range(STEPS):
        rows = torch.randint(len(y), (BATCH,))
        optimizer.zero_grad()
        loss: Any = cross_entropy(call(network, taken(x, rows)), y[rows])
        loss.backward()
        optimizer.step()
    _settle(network, x)
    network.eval()
    return network if entry.after is None else entry.after(network, samples)


@torch.no_grad()
def _settle(network: nn.Module, x: Batch) -> None:
    """Give batch normalisations the statistics of the training data.

    After a few steps their running means still are mostly what they started with, and the logits of
    a deep network would be as large as 1e5 at the data.
    """
    norms = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over all batches
    if norms:
        for start in range(0, rows_of(x), 64):
            call(network, taken(x, slice(start, start + 64)))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def _loader(samples: Samples) -> list[Any]:
    x, y = samples.train
    return [(taken(x, slice(i, i + 64)), y[i : i + 64]) for i in range(0, rows_of(x), 64)]
