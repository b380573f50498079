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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..._network.checks import check_counts, check_input
from ...likelihoods import LabelLikelihood, likelihood_named
from ...model import load
from ...saving.export import program
from .columns import Array, Inputs, Workers, check_keep, kept_names

__all__ = ["Predictor", "check_file", "check_names", "check_network", "score"]


class Predictor:
    """A saved model as a callable on batches of columns, for ``map_batches``.

    Args:
        path: The file that :meth:`rgpr.RGPR.save` wrote; every machine must see it.
        network: Makes the network that the weights go into.
        column: Name of the inputs.
        keep: Other columns to keep; all but the inputs by default.
        scale: What inputs are multiplied by, e.g. ``1 / 255`` for bytes.
        preprocess: What is done to a batch of inputs after that: a function of a tensor on the
            device of the network, such as ``lambda x: x.permute(0, 3, 1, 2)`` for images whose
            channels come last.
        autocast: A dtype that ``torch.autocast`` runs the network in, such as ``torch.bfloat16``.
        compile: Compile network and model as one graph, at the first batch.
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
        preprocess: Callable[[Tensor], Tensor] | None = None,
        autocast: torch.dtype | None = None,
        compile: bool = False,
        device: str | None = None,
    ) -> None:
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.model = load(path, network()).to(self.device).eval()
        ids = self.model.input is not None
        self.inputs, self.keep = Inputs(column, scale, preprocess, ids), check_keep(keep)
        self.autocast, self.compile = autocast, compile
        self._graph: Callable[[Tensor], Any] | None = None

    def __call__(self, batch: dict[str, Array]) -> dict[str, Array]:
        x = self.inputs.of(batch, self.model.posterior.network, self.device)
        names = kept_names(list(batch), self.inputs.column, self.keep)
        answers = self.answers(x)
        check_names(names, answers)
        return {**{name: batch[name] for name in names}, **answers}

    @torch.inference_mode()
    def answers(self, x: Tensor) -> dict[str, Array]:
        """What the model says of a batch of inputs, as arrays by name."""
        *answers, last = self._run(x)
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
        return {name: value.cpu().numpy() for name, value in found.items()}

    def _run(self, x: Tensor) -> tuple[Tensor, ...]:
        kind = torch.device(self.device).type
        with torch.autocast(kind, self.autocast, enabled=self.autocast is not None):
            if not self.compile or len(x) == 0:
                return self.model._everything(x, diagonal_output=True)
            check_input(x, self.model.posterior.network, self.model._input_shape)
            if self._graph is None:
                with torch.inference_mode(False):  # in which nothing can be exported
                    exported = program(self.model, x.clone(), everything=True)
                self._graph = torch.compile(exported.module())
            found: tuple[Tensor, ...] = tuple(self._graph(x))
        if not isinstance(likelihood_named(self.model.likelihood), LabelLikelihood):
            mean, covariance, *rest = found
            return mean, covariance.diagonal(dim1=-2, dim2=-1), *rest
        return found


def score(
    dataset: Any,
    path: str | os.PathLike[str],
    network: Callable[[], nn.Module],
    *,
    column: str = "x",
    keep: Sequence[str] | None = None,
    scale: float = 1.0,
    preprocess: Callable[[Tensor], Tensor] | None = None,
    autocast: torch.dtype | None = None,
    compile: bool = False,
    batch_size: int = 512,
    actors: int | tuple[int, int] = 1,
    gpus: float = 0.0,
    cpus: float = 1.0,
) -> Any:
    """The dataset with predictions in place of its inputs, computed as it is read.

    Args:
        dataset: A ``ray.data.Dataset`` with a column of arrays, such as ``ray.data.read_images``
            gives.
        path: The file that :meth:`rgpr.RGPR.save` wrote.
        network: Makes the network that the weights go into.
        column: Name of the inputs.
        keep: Other columns to keep; all but the inputs by default.
        scale: What inputs are multiplied by, e.g. ``1 / 255`` for bytes.
        preprocess: What is done to a batch of inputs after that; see :class:`Predictor`.
        autocast: A dtype that ``torch.autocast`` runs the network in.
        compile: Compile network and model as one graph, at the first batch of each actor.
        batch_size: Rows scored together.
        actors: How many, or the fewest and the most.
        gpus: Number of GPUs that each actor reserves.
        cpus: Number of CPUs that each actor reserves.

    Returns:
        A lazy dataset in the order of the rows, with ``prediction``, ``confidence`` and
        ``probabilities`` (regression: ``mean`` and ``variance``), ``score``, and ``p_value`` if the
        model was calibrated. The prediction of several labels is a zero or a one for each. Ray has
        one context for a dataset and what is made of it, so the given dataset keeps the order of
        its rows from now on, too.

    Raises:
        FileNotFoundError: There is no such file.
        TypeError: ``network`` is no function.
    """
    check_counts(batch_size=batch_size)
    workers = Workers(actors, gpus, cpus)
    workers.leave_room()
    scored = workers.map(
        dataset,
        Predictor,
        batch_size,
        path=check_file(path),
        network=check_network(network),
        column=column,
        keep=check_keep(keep),
        scale=scale,
        preprocess=preprocess,
        autocast=autocast,
        compile=compile,
    )
    # Without a column that says which row is which, answers are told apart by their order alone.
    scored.context.execution_options.preserve_order = True
    return scored


def check_names(kept: Iterable[str], answers: Iterable[str]) -> None:
    """Refuse columns to keep that have the name of an answer."""
    both = sorted(set(kept) & set(answers))
    if both:
        raise ValueError(
            f"the data have a column '{both[0]}', and so have the answers; rename it, or leave it "
            "out: keep= names the columns that are kept"
        )


def check_network(network: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Refuse a network where a function is wanted that makes one."""
    if isinstance(network, nn.Module) or not callable(network):
        raise TypeError(
            f"network= is a {type(network).__name__}; give a function that makes the network, "
            "which every worker calls, such as lambda: MyNetwork()"
        )
    return network


def check_file(path: str | os.PathLike[str]) -> str:
    """The whole path of a model's file, which must be there."""
    if not Path(path).exists():
        raise FileNotFoundError(
            f"no file {path}: save a model there first, where every node sees it"
        )
    return str(Path(path).resolve())
