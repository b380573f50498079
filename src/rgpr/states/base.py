"""A state: what was learned from some of the data for one model.

A file holds the state's tensors, the rest of it as JSON, and what tells the model from others.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor

from .._network.batches import Batch
from .._network.guards import evaluating
from .._network.loaders import inputs_and_targets
from ..saving.container import read, write
from ..saving.parts import complete
from .identity import check_same

__all__ = ["State"]

# In JSON, the key under which the name of a tensor stands in the tensor's place.
_TENSOR = "$tensor"


class State(ABC):
    """What was learned from some of the data for one model.

    Args:
        model: The model.

    Attributes:
        model: The model.
    """

    kind: ClassVar[str]

    def __init__(self, model: Any) -> None:
        if not hasattr(model, "posterior"):
            raise TypeError(
                f"a {type(self).__name__} is for a rgpr.RGPR model, and this is a "
                f"{type(model).__name__}; wrap it first: rgpr.RGPR(network)"
            )
        self.model = model
        self._made_for: dict[str, Any] | None = None
        self._whole = True

    @property
    @abstractmethod
    def seen(self) -> int:
        """How many inputs it has seen."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def update(self, x: Any, y: Any = None) -> Self:
        """Take in a batch, as a loader yields it.

        Args:
            x: Inputs and targets ``(x, y)``, inputs alone, or a dict.
            y: Targets, if ``x`` is the inputs alone.

        Returns:
            The state itself.

        Raises:
            TypeError: Inputs are not of the network's dtype, or targets are no numbers.
            ValueError: Inputs of another shape, a value that is not finite, or targets that do not
                fit the outputs.
            RuntimeError: An earlier batch failed half-way.
        """
        network = self.model.posterior.network
        self._identified()  # by the weights that the first data go through
        batch = x if y is None else (x, y)
        pairs = inputs_and_targets([batch], network, progress=False, description="")
        with evaluating(network) as modes, modes, self._step():
            self._take_in(*next(pairs))
        return self

    @torch.inference_mode(False)
    @torch.no_grad()
    def merge(self, other: Self) -> Self:
        """Take in what another state learned from other data; the other stays as it is.

        The order in which states are merged does not matter beyond rounding, unless copies of an
        input are in several states: then it may decide which inputs are in the sample.

        Args:
            other: A state for the same model.

        Returns:
            The state itself.

        Raises:
            TypeError: Not a state of this kind.
            ValueError: A state for another model, or of inputs of another shape, or a model that
                changed since the first data; the message says what differs. This state then stays
                as it was.
        """
        if type(other) is not type(self):
            raise TypeError(
                f"this is a {type(other).__name__}, and a {type(self).__name__} is merged with its "
                "like alone; for a file use add(path)"
            )
        if other is self:
            raise ValueError("a state cannot be merged with itself: its data would count twice")
        ours = self._unchanged()
        # States of one model share the digest of its weights, which takes a while to compute.
        theirs = other._identified() if other.model is self.model else other._unchanged()
        check_same("the other state", theirs, ours)
        state = other._state(history=True)
        if self.seen == 0:
            self._check_choice(state, "the other state")
        with self._step():
            self._merge(state)
        return self

    def remove(self, *data: Any) -> NoReturn:
        """Refuse to take data out again, whatever they are.

        Raises:
            TypeError: Always; the message says why, and what to do instead.
        """
        raise TypeError(
            "no data can be taken out of a state: its sums would keep the rounding of what is "
            "subtracted, and its sample does not know which inputs it passed over in favour of "
            "those that would have to leave; keep a state for each part that may have to go, and "
            "merge the others"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state into one safetensors file, atomically; there is no pickle in it.

        Raises:
            FileNotFoundError: The folder does not exist.
            RuntimeError: A batch failed half-way.
            ValueError: The model changed since the first data, or sums are not finite.
        """
        described, tensors = _taken_apart(self._state(history=True), "state")
        about = {"kind": self.kind, "model": self._unchanged(), "state": described}
        write(path, tensors, about)

    @classmethod
    @torch.inference_mode(False)
    @torch.no_grad()
    def load(cls, path: str | os.PathLike[str], model: Any) -> Self:
        """The state that :meth:`save` wrote, to be merged, or updated with more data.

        Args:
            path: The file.
            model: A model like the one that the state was made for: the same network with the same
                weights, and the same options.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is damaged or holds something else, or belongs to another model;
                the message says what differs.
        """
        return cls(model).add(path)

    @torch.inference_mode(False)
    @torch.no_grad()
    def add(self, path: str | os.PathLike[str]) -> Self:
        """Take in the state that :meth:`save` wrote: :meth:`load` and :meth:`merge` in one.

        Args:
            path: The file.

        Returns:
            The state itself.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: What :meth:`load` and :meth:`merge` refuse. This state then stays as it was.
        """
        tensors, about, _ = read(path)
        with complete(path):
            if not isinstance(about, Mapping) or about.get("kind") != self.kind:
                what = about.get("kind", "a model") if isinstance(about, Mapping) else "something"
                name = type(self).__name__
                raise ValueError(f"{path} holds {what}, and {name} reads {self.kind}")
            check_same(str(path), about["model"], self._identified())
            state = _put_together(about["state"], tensors)
            self._check(state, str(path))
            self._check_choice(state, str(path))
            with self._step():
                self._merge(state)
        return self

    def _identified(self) -> dict[str, Any]:
        """What tells the model that the data went through from others."""
        if self._made_for is None:
            self._made_for = self._identity(self.model)
        return self._made_for

    def _unchanged(self) -> dict[str, Any]:
        """The same, of a model that is what it was when the first data went through it."""
        if self._made_for is None:
            return self._identified()
        self._check_model(self.model)
        return self._made_for

    @contextmanager
    def _step(self) -> Iterator[None]:
        """A step that an interrupt may cut short, after which the state is refused.

        What fails by an error has either changed nothing, or is known to have.
        """
        self._check_whole()
        self._whole = False
        try:
            yield
        except Exception:
            self._whole = True
            raise
        self._whole = True

    def _check_whole(self) -> None:
        if not self._whole:
            raise RuntimeError(
                "this state was interrupted while it took in data, and holds some of them; begin "
                "again with a new state, or load the last one that was saved"
            )

    def _check_model(self, model: Any) -> None:
        """Refuse a model that is not the one the data went through, and a state that is broken."""
        self._check_whole()
        if self._made_for is not None:
            check_same("the state", self._made_for, self._identity(model))

    @staticmethod
    @abstractmethod
    def _identity(model: Any) -> dict[str, Any]:
        """What tells models from each other, for JSON."""

    @abstractmethod
    def _take_in(self, x: Batch, target: Tensor | None) -> None:
        """Learn from a batch."""

    @abstractmethod
    def _merge(self, state: Mapping[str, Any]) -> None:
        """Take in what :meth:`_state` gave; either all of it, or nothing and an error."""

    @abstractmethod
    def _state(self, history: bool) -> dict[str, Any]:
        """Tensors and JSON, in dicts and lists."""

    def _check_choice(self, state: Mapping[str, Any], what: str) -> None:
        """Refuse a state of other parts of the model's network than this one's."""
        return

    @abstractmethod
    def _check(self, state: Mapping[str, Any], path: str) -> None:
        """Refuse what no state gives: a file may have been written by another program."""


def _taken_apart(item: Any, name: str) -> tuple[Any, dict[str, Tensor]]:
    """JSON with names in the place of tensors, and the tensors by their names."""
    if isinstance(item, Tensor):
        return {_TENSOR: name}, {name: item}
    if not isinstance(item, dict | list):
        return item, {}
    pairs = list(item.items() if isinstance(item, dict) else enumerate(item))
    parts = {key: _taken_apart(value, f"{name}.{key}") for key, value in pairs}
    described = {key: part for key, (part, _) in parts.items()}
    tensors = {k: tensor for _, found in parts.values() for k, tensor in found.items()}
    return described if isinstance(item, dict) else list(described.values()), tensors


def _put_together(item: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of :func:`_taken_apart`."""
    if isinstance(item, list):
        return [_put_together(value, tensors) for value in item]
    if not isinstance(item, dict):
        return item
    if _TENSOR in item:
        return tensors[item[_TENSOR]]
    return {key: _put_together(value, tensors) for key, value in item.items()}
