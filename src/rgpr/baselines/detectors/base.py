"""The contract of all detectors, and the registry that holds them by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from ..._network.batches import Batch, Shape, copied, rows_of, shape_of
from ..._network.checks import check_batch, check_input, network_dtype_device
from ..._network.guards import evaluating
from ..._network.loaders import labelled, on_device
from ..._network.outputs import outputs
from ..._network.running import plain_module, watching
from ..._network.sources import as_batches

__all__ = ["DETECTORS", "Detector", "register_detector"]


class Detector:
    """One score per input, higher for stranger ones; the network is never changed.

    Args:
        network: A trained classifier that returns logits ``(B, C)``.
    """

    #: What a network without a last linear layer can do instead, as the end of an error message.
    without_head = ""

    def __init__(self, network: nn.Module) -> None:
        self.network = plain_module(network)

    def fit(self, train_loader: Iterable[Any], *, progress: bool = True) -> Self:
        """Learn from the training data where the detector needs to; here it does not.

        Args:
            train_loader: Yields ``(x, y)``; batches are moved to the network's device. Arrays
                ``(X, y)`` and data sets will do as well, as for :meth:`rgpr.RGPR.fit`.
            progress: Show a progress bar where there is a terminal.

        Returns:
            The detector itself.
        """
        return self

    @torch.no_grad()
    def score(self, x: Batch) -> Tensor:
        """How strange each input is: ``(B,)`` in float64.

        Raises:
            RuntimeError: The detector must be fitted first.
            TypeError: ``x`` is not of the network's dtype.
            ValueError: ``x`` is on another device, or the features cannot be read.
        """
        check_input(x, self.network, None, measured=False)
        with evaluating(self.network) as modes, modes:
            return self._score(x)

    def _score(self, x: Batch) -> Tensor:
        """Scores, in evaluation mode and without gradients.

        A detector that needs the logits alone writes ``predict_logits(logits)``, and one that needs
        what goes into the last linear layer writes ``predict_features(features)``, the names that
        pytorch-ood has too. Whoever has these from another pass can call them. Others write this
        method.
        """
        for name, read in (("predict_features", self._features), ("predict_logits", self._logits)):
            predict = getattr(self, name, None)
            if predict is not None:
                scores: Tensor = predict(read(x))
                return scores
        raise NotImplementedError(
            f"{type(self).__name__} needs one of predict_logits, predict_features and _score"
        )

    def _features(self, x: Batch) -> Tensor:
        """What goes into the last linear layer, ``(B, D)``."""
        return self._watch_head(x)[1]

    def _watch_head(self, x: Batch) -> tuple[nn.Linear, Tensor, Tensor]:
        """The last linear layer that ran, what went into it, and the logits, from one pass.

        Raises:
            ValueError: The logits are not the output of the last linear layer.
        """
        last: tuple[nn.Linear, Tensor, Tensor] | None = None

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            nonlocal last
            if isinstance(module, nn.Linear):
                last = (module, args[0], output)

        linear = [module for module in self.network.modules() if isinstance(module, nn.Linear)]
        hooks = watching(self.network, dict.fromkeys(linear, after))
        with hooks, hooks:
            logits = self._logits(x)
        if last is None or not _same(last[2].double(), logits):
            raise ValueError(
                f"{type(self).__name__} reads what goes into the last nn.Linear, and this "
                "network's outputs do not come straight out of one; use a network that ends in an "
                f"nn.Linear{self.without_head}"
            )
        head, features, _ = last
        return head, features, logits

    def _logits(self, x: Batch) -> Tensor:
        # The network may change its input in place.
        return outputs(self.network, copied(x)).double()

    def _batches(self, loader: Iterable[Any], progress: bool) -> Iterator[tuple[Batch, Tensor]]:
        """Checked batches of the training data, on the network's device."""
        device = network_dtype_device(self.network)[1]
        description = f"{type(self).__name__} fit"
        shape: Shape | None = None
        loader = as_batches(loader, self.network)
        pairs = labelled(loader, self.network, progress=progress, description=description)
        for number, (x, y) in enumerate(pairs):
            x, y = on_device(x, device), on_device(y, device)
            check_batch(number, x, self.network, shape, measured=False)
            rows = rows_of(x)
            if y.shape != (rows,) or y.is_floating_point():
                raise ValueError(
                    f"batch {number}: labels have dtype {y.dtype} and shape {tuple(y.shape)}; "
                    f"expected one class index for each of {rows} inputs"
                )
            shape = shape_of(self.network, x)
            if rows:
                yield x, y


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


D = TypeVar("D", bound=Detector)

#: Every registered detector by its name, in the order of registration.
DETECTORS: dict[str, type[Detector]] = {}


def register_detector(name: str) -> Callable[[type[D]], type[D]]:
    """A decorator that lists a class of detectors under a name, in the library or outside of it.

    Whatever goes through all detectors, such as the experiment ``detection``, then has it too.

    Args:
        name: The key in :data:`DETECTORS`.

    Raises:
        ValueError: Another class has this name already.
    """

    def register(kind: type[D]) -> type[D]:
        known = DETECTORS.get(name)
        # The same class comes again when a module is reloaded or a notebook cell is run twice.
        if known is not None and (known.__module__, known.__name__) != (
            kind.__module__,
            kind.__name__,
        ):
            raise ValueError(
                f"the detector '{name}' is {known.__module__}.{known.__name__} already; choose "
                "another name"
            )
        DETECTORS[name] = kind
        return kind

    return register
