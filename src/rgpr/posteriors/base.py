"""What a base posterior is, and how anything a user has becomes one."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from .._backend.buffers import StableBuffers
from .._backend.precision import full_precision
from .._network.batches import Batch
from .._network.layers import LayerChoice, choose_of
from .._network.outputs import Output, outputs, returning
from .._network.representation import Representation
from .._network.running import plain_module
from .._network.trace import Trace, few, trace
from .gaussian import Gaussian

__all__ = ["THROUGH_ANOTHER_LIBRARY", "Closed", "Posterior", "as_posterior", "register_posterior"]

# Why some posteriors cannot become a graph.
THROUGH_ANOTHER_LIBRARY = "it predicts through an object of another library"


@dataclass(frozen=True)
class Closed:
    """A posterior in closed form: what follows the pass through the network.

    Attributes:
        gaussian: ``gaussian(mean)`` or ``gaussian(mean, features)`` gives what ``forward`` does.
        head: The name of the module whose input are the features, if they are needed.
    """

    gaussian: Callable[..., Gaussian]
    head: str | None = None

    def given(self, mean: Tensor, seen: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What :attr:`gaussian` takes: the mean, and the features if they are needed.

        Args:
            mean: The network's outputs.
            seen: What went into the head, once for each of its runs.

        Raises:
            ValueError: The head did not run once, or not on one vector for each input.
        """
        return (mean,) if self.head is None else (mean, features_of(self.head, seen))


@cache
def _describes_itself(kind: type[Any]) -> bool:
    """Whether no subclass of the class that has ``closed`` has another ``forward`` or ``point``.

    Args:
        kind: A posterior's class. Where it has such a method, ``closed`` no longer describes it.
    """

    def ancestor(name: str) -> int:
        return next(i for i, each in enumerate(kind.__mro__) if name in vars(each))

    return ancestor("closed") <= min(ancestor("forward"), ancestor("point"))


def features_of(head: str, seen: Sequence[Tensor]) -> Tensor:
    """What went into a last layer, ``(B, D)``, from its inputs in all of its runs.

    Raises:
        ValueError: The layer did not run once, or not on one vector for each input.
    """
    if len(seen) != 1 or seen[0].dim() != 2:
        what = f"{len(seen)} times" if len(seen) != 1 else f"on shape {tuple(seen[0].shape)}"
        raise ValueError(
            f"the last layer '{head}' ran {what}; the closed form needs it to run once, "
            "on one feature vector per input"
        )
    return seen[0]


class Posterior(StableBuffers):
    """A distribution over the outputs of a network: what the residual is added to.

    A subclass sets ``network`` and writes ``forward``; one that can only draw samples writes
    ``sample`` and takes moments of samples in ``forward``. Both must run ``self.point(x)``
    first, once and plainly: the residual reads the representations of the network in that pass.

    Attributes:
        network: The point-estimated network whose representations the residual reads.
        likelihood: ``"classification"`` or ``"regression"`` where the posterior was fitted for
            one of them, else ``None``.
        output: Which part of what the network returns holds its outputs: an index, a key or the
            name of an attribute, or a function; ``None`` for a tensor or ``logits``.
        kind: The name under which it is saved; ``None`` if it cannot be saved.
        kinds: All posteriors that can be saved, by that name; subclasses enter themselves.
    """

    network: nn.Module
    likelihood: str | None = None
    output: Output = None
    kind: str | None = None

    kinds: ClassVar[dict[str, type[Posterior]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Only a class that sets `kind` itself is entered: exporters make subclasses as stand-ins.
        if cls.__dict__.get("kind") is not None:
            Posterior.kinds[cls.__dict__["kind"]] = cls

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = plain_module(network)
        # This module starts in the mode of its network, because a call on modules that are all in
        # evaluation mode need not switch any of them.
        self.training = self.network.training

    @abstractmethod
    def forward(self, x: Batch) -> Gaussian:
        """Distribution of the ``C`` outputs for each of ``B`` inputs."""
        raise NotImplementedError

    def sample(self, x: Batch, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Samples of the outputs, ``(S, B, C)``."""
        gaussian: Gaussian = self(x)
        with full_precision(gaussian.mean):
            return gaussian.sample(n_samples, generator)

    def covariances(self, x: Batch) -> Tensor:
        """Covariance of each output between all inputs, ``(C, B, B)``, or ``(1, B, B)`` if equal.

        Only the marginal likelihood needs it.

        Raises:
            TypeError: This posterior says nothing about several inputs together.
        """
        raise TypeError(
            f"a {type(self).__name__} gives no covariance between inputs, which the marginal "
            "likelihood needs; tune with objective='likelihood' or 'ood', which take any base"
        )

    def mean_parts(self) -> list[tuple[nn.Module, float]] | None:
        """Networks and weights whose weighted sum of outputs is the mean; ``None`` if not known.

        A certificate bounds these networks. The first is the one that is read. A posterior whose
        mean is its network's output returns ``[(self.network, 1.0)]``.
        """
        return None

    @property
    def is_certain(self) -> bool:
        """Whether the outputs have no variance of their own, for any input."""
        return False

    @property
    def no_graph(self) -> str | None:
        """Why a graph cannot hold this posterior; ``None`` if it can.

        Exporting and compiling ask for it. Whatever runs plain torch operations on tensors can be
        held.
        """
        return None

    @property
    def closed(self) -> Closed | None:
        """What follows the pass through the network, if that is a function of tensors alone.

        Then the residual's pass reads the features, too, and no other hooks are needed. On a GPU
        such a function can be recorded (:mod:`rgpr._backend.recording`). Where hooks on the
        posterior want to see its calls, or a subclass has another ``forward`` or ``point`` and says
        nothing of its own here, those are called instead.
        """
        return None

    @property
    def _closed(self) -> Closed | None:
        """:attr:`closed`, unless something else has taken the place of what it describes."""
        own, kind = vars(self), cast(Any, type(self))
        replaced = (
            not _describes_itself(kind)
            or "forward" in own
            or "point" in own
            or self._forward_hooks
            or self._forward_pre_hooks
            or nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
        )
        return None if replaced else self.closed

    def choose_layers(
        self, choice: LayerChoice, x: Batch, seen: Trace | None = None
    ) -> list[Representation]:
        """The representations that ``choice`` stands for, the input first.

        Args:
            choice: What a user gave as ``layers``.
            x: Inputs.
            seen: What :meth:`look` gave for them, if it was called already.
        """
        return choose_of(seen or self.look(x), choice)

    def look(self, x: Batch) -> Trace:
        """What runs inside the network on a few of these inputs, and which layer is the head."""
        with returning(self.network, self.output):
            return trace(self.network, few(x))

    def taking(self, output: Output) -> Self:
        """This posterior over another part of what its network returns; this one stays as it is.

        The two share the network and all tensors, so that moving one to a GPU moves both.
        """
        other = copy.copy(self)
        # The table of modules is the copy's own: a module that is replaced in it stays here.
        other._modules = dict(self._modules)
        other.output = output
        return other

    def own_tensors(self) -> dict[str, Tensor]:
        """What is saved beside the network's own state."""
        state = self.state_dict()
        return {name: t for name, t in state.items() if not name.startswith("network.")}

    def config(self) -> dict[str, Any]:
        """What, beside its own tensors and the network, it takes to build this again; JSON."""
        return {}

    @classmethod
    def from_saved(
        cls, network: nn.Module, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> Self:
        """The inverse of saving: ``config()`` and the posterior's own buffers."""
        return cls(network)

    def point(self, x: Batch) -> Tensor:
        """The network's own outputs, ``(B, C)``.

        Raises:
            TypeError: The network returns something without logits in it.
            ValueError: The outputs are not one vector per input.
        """
        return outputs(self.network, x, self.output)


_Builder = Callable[[Any], Posterior]
_builders: dict[str, _Builder] = {}


def register_posterior(kind: type | str, build: _Builder) -> None:
    """Teach :func:`as_posterior` a new type of base.

    Args:
        kind: A class, or its full name (``"package.module.Class"``) so that its package need not
            be imported. Subclasses are recognised too; the nearest registered one wins.
        build: Makes a :class:`Posterior` of an object of that type.
    """
    _builders[kind if isinstance(kind, str) else _full_name(kind)] = build


@torch.inference_mode(False)  # what is copied here must be usable outside of it
def as_posterior(base: Any) -> Posterior:
    """The posterior that ``base`` stands for.

    Args:
        base: A :class:`Posterior`, an ``nn.Module`` (a point estimate), a fitted laplace-torch
            object, or anything registered with :func:`register_posterior`.

    Raises:
        TypeError: Nothing is registered for this type.
    """
    if isinstance(base, Posterior):
        return base
    for cls in type(base).__mro__:
        build = _builders.get(_full_name(cls))
        if build is not None:
            return build(base)
    raise TypeError(
        f"no posterior is known for {_full_name(type(base))}; pass an nn.Module, a fitted "
        "laplace-torch object or an rgpr.Posterior, or register the type with "
        "rgpr.posteriors.register_posterior"
    )


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
