"""What one pass over images leaves behind: logits, penultimate features and the residual's ``u``.

Detectors that read logits or features are fitted and measured on these tensors, so that the network
runs once on every image however many detectors there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from rgpr._atomic import replacing
from rgpr._network.outputs import outputs_of
from rgpr.audit.passes import head_of, overheard
from rgpr.model import RGPR

from .data import Loader

__all__ = ["Outputs", "head", "outputs", "write_some"]

# Bytes of the arrays in one file.
_BYTES = 13_500_000


@dataclass(frozen=True)
class Outputs:
    """What is known about ``N`` images after one pass.

    Attributes:
        features: What went into the last linear layer, ``(N, D)`` in the network's dtype.
        logits: ``(N, C)`` in float64, because a softmax in float32 makes ties at one.
        u: The residual's ``u`` of every layer, the input first, ``(N, L)`` in float64.
        y: Labels ``(N,)``; ``None`` for outliers.
    """

    features: Tensor
    logits: Tensor
    u: Tensor
    y: Tensor | None


def head(model: RGPR, loader: Loader) -> nn.Linear:
    """The last linear layer of the model's network.

    Raises:
        ValueError: The network does not end in one.
    """
    x = next(iter(Loader(loader.x[:8])))
    found = head_of(model.posterior.network, x)
    assert isinstance(found, nn.Linear)
    return found


@torch.no_grad()
def outputs(model: RGPR, last: nn.Linear, loader: Loader) -> Outputs:
    """Run the model once on every image.

    Args:
        model: A fitted model.
        last: Its network's last linear layer.
        loader: The images, with or without labels.
    """
    extension, network = model._extension(), model.posterior.network
    rows: list[tuple[Tensor, ...]] = []
    for x in Loader(loader.x, size=loader.size):
        hooks, heard = overheard(network, last)
        with hooks, hooks:
            u = extension.read(x).u
        logits = outputs_of(heard[network], x, model.posterior.output)
        rows.append((heard[last], logits.double(), u))
    features, all_logits, all_u = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return Outputs(features, all_logits, all_u, loader.y)


def write_some(path: Path, found: Mapping[str, tuple[Outputs, int]], seed: int) -> None:
    """Write randomly drawn rows of outputs as a compressed file of at most 14 MB.

    Features and logits are rounded to float16, ``u`` to float32. The arrays are called
    ``NAME.features``, ``NAME.logits``, ``NAME.u`` and, with labels, ``NAME.y``.

    Args:
        path: The file, whose name ends in ``.npz``.
        found: For each name the outputs and the number of rows that is wanted. Where all of them
            together would take too much, each name gets the same share of its number.
        seed: Seed of the draw.
    """
    first = next(iter(found.values()))[0]
    row = 2 * (first.features.shape[1] + first.logits.shape[1]) + 4 * first.u.shape[1] + 8
    wanted = {name: min(count, len(each.u)) for name, (each, count) in found.items()}
    share = min(1.0, _BYTES / row / sum(wanted.values()))
    generator = torch.Generator().manual_seed(seed)
    arrays: dict[str, np.ndarray] = {}
    for name, (each, _) in found.items():
        drawn = torch.randperm(len(each.u), generator=generator)[: int(share * wanted[name])]
        drawn = drawn.sort().values.to(each.u.device)
        parts = {
            "features": each.features.half(),
            "logits": each.logits.half(),
            "u": each.u.float(),
        }
        if each.y is not None:
            parts["y"] = each.y
        arrays |= {f"{name}.{part}": t[drawn].cpu().numpy() for part, t in parts.items()}
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
