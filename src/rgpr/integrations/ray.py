"""Scoring past one machine: a saved model over a Ray dataset.

Each actor loads the file once and scores batches; Ray starts a new one for any that is lost and
runs its batch again, so every row is in the result exactly once.

Example:
    >>> import ray
    >>> from rgpr.integrations.ray import score
    >>> images = ray.data.read_parquet("s3://bucket/images")      # doctest: +SKIP
    >>> scored = score(images, "model.safetensors", lenet)        # doctest: +SKIP
    >>> scored.write_parquet("s3://bucket/scores")                # doctest: +SKIP
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .._network.checks import network_dtype_device
from ..likelihoods import LabelLikelihood, likelihood_named
from ..model import load

__all__ = ["Predictor", "score"]

# Workers that may be lost for each actor; one that cannot even start is not tried for ever.
_RETRIES = 10


class Predictor:
    """A saved model as a callable on batches of columns, for ``map_batches``.

    Args:
        path: The file that :meth:`rgpr.RGPR.save` wrote; every machine must see it.
        network: Makes the network that the weights go into.
        column: Name of the inputs.
        keep: Other columns to keep; all but the inputs by default.
        scale: What inputs are multiplied by, e.g. ``1 / 255`` for bytes.
        device: Where to compute; by default a GPU if Ray gave this actor one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        network: Callable[[], nn.Module],
        *,
        column: str = "x",
        keep: Sequence[str] | None = None,
        scale: float = 1.0,
        device: str | None = None,
    ) -> None:
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.model = load(path, network()).to(self.device).eval()
        self.column, self.keep, self.scale = column, keep, scale

    @torch.inference_mode()
    def __call__(self, batch: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
        if self.column not in batch:
            raise KeyError(
                f"the dataset has the columns {sorted(batch)}, and no '{self.column}'; name the "
                "inputs with column="
            )
        names = set(batch) - {self.column} if self.keep is None else self.keep
        result = {name: batch[name] for name in names}
        inputs = np.stack(list(batch[self.column])) if batch[self.column].dtype == object else None
        values = torch.from_numpy(
            np.ascontiguousarray(batch[self.column] if inputs is None else inputs)
        )
        dtype = network_dtype_device(self.model.posterior.network)[0] or torch.float32
        # Scaled in at least float32, also for networks in half precision.
        wide = torch.promote_types(dtype, torch.float32)
        x = (values.to(self.device, wide) * self.scale).to(dtype)
        *answers, last = self.model._everything(x, diagonal_output=True)
        calibrated = self.model._references is not None
        found = {"p_value": last, "score": answers.pop()} if calibrated else {"score": last}
        likelihood = likelihood_named(self.model.likelihood)
        if isinstance(likelihood, LabelLikelihood):
            (probabilities,) = answers
            found |= {
                "prediction": likelihood.prediction(probabilities),
                "confidence": likelihood.confidence(probabilities).float(),
                "probabilities": probabilities.float(),
            }
        else:
            mean, variance = answers
            found |= {"mean": mean.float(), "variance": variance}
        return {**result, **{name: value.cpu().numpy() for name, value in found.items()}}


def score(
    dataset: Any,
    path: str | os.PathLike[str],
    network: Callable[[], nn.Module],
    *,
    column: str = "x",
    keep: Sequence[str] | None = None,
    scale: float = 1.0,
    batch_size: int = 512,
    actors: int | tuple[int, int] = 1,
    gpus: float = 0.0,
    cpus: float = 1.0,
) -> Any:
    """The dataset with predictions in place of its inputs, computed as it is read.

    Args:
        dataset: A ``ray.data.Dataset`` with a column of arrays.
        path: The file that :meth:`rgpr.RGPR.save` wrote.
        network: Makes the network that the weights go into.
        column: Name of the inputs.
        keep: Other columns to keep; all but the inputs by default.
        scale: What inputs are multiplied by, e.g. ``1 / 255`` for bytes.
        batch_size: Rows scored together.
        actors: How many, or the fewest and the most.
        gpus: Number of GPUs that each actor reserves.
        cpus: Number of CPUs that each actor reserves.

    Returns:
        A lazy dataset with ``prediction``, ``confidence`` and ``probabilities`` (regression:
        ``mean`` and ``variance``), ``score``, and ``p_value`` if the model was calibrated. The
        prediction of several labels is a zero or a one for each.

    Raises:
        FileNotFoundError: There is no such file.
    """
    import ray

    if not Path(path).exists():
        raise FileNotFoundError(
            f"no file {path}: save a model there first, where every node sees it"
        )
    # `concurrency` became `compute` in later releases; both take a pool of actors.
    low, high = actors if isinstance(actors, tuple) else (actors, actors)
    return dataset.map_batches(
        Predictor,
        fn_constructor_args=(str(Path(path).resolve()), network),
        fn_constructor_kwargs={"column": column, "keep": keep, "scale": scale},
        batch_size=batch_size,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(min_size=low, max_size=high),
        num_gpus=gpus,
        num_cpus=cpus,
        max_restarts=_RETRIES,
        max_task_retries=_RETRIES,
    )
