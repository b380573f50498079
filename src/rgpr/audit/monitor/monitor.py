r"""A monitor: an alarm when inputs stop being like the validation data.

Each input is ranked among the validation scores and the inputs before it
(:mod:`rgpr.audit.monitor.ranks`), and a martingale bets on the p-values
(:mod:`rgpr.audit.monitor.martingale`). The alarm is raised when the martingale reaches
:math:`1 / \alpha`. As long as validation data and
inputs are exchangeable,

.. math:: P(\text{an alarm is ever raised}) \le \alpha,

however long the stream and however often one looks.

For each representation there is a second martingale, on the strangeness that
``model.explain(x)`` shows for it, against up to 4096 validation inputs. A layer has drifted when
its own reaches :math:`L / \alpha` for ``L`` layers. The chances of the ``L`` layers add up to
:math:`\alpha` at most, so the chance of ever naming any layer wrongly is at most :math:`\alpha`
(Bonferroni), whatever the dependence between layers. This is a second promise beside the first;
the chance of breaking one of the two is at most :math:`2 \alpha`.
"""

from __future__ import annotations

import math
import os
from datetime import datetime
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..._network.batches import Batch
from ...model import RGPR
from . import files, outlets
from .checks import check_predictions, check_settings, input_numbers, seconds
from .martingale import Martingale
from .merging import Merged, merged
from .outlets import LayerDrift, Status
from .performance import Performance, Window, judged
from .pictures import Drawn, draw
from .ranks import Bins
from .trace import Trace

__all__ = ["Monitor"]

_LN10 = math.log(10)

Array = NDArray[np.float64]


class Monitor:
    """Reads inputs batch by batch, and alarms when they are no longer like the validation data.

    "Like" means exchangeable. As long as they are, the chance that an alarm is ever raised is at
    most ``alpha``, however long the stream and however often one looks.

    Memory does not grow with the stream: scores are kept as counts in bins. Of inputs with labels
    it remembers which they are, as the first and last number of each run without a gap. The same
    inputs in the same order give the same numbers, however they are cut into batches.

    Args:
        model: Fitted and calibrated. Its score must stay as it is: do not fit it again.
        alpha: The chance of ever raising a false alarm is at most this.
        bins: The most bins for the scores. It does not touch the promise; fewer bins tell very
            strange inputs less apart.
        layers: Watch each representation as well.
        window: How many inputs make a window of :attr:`performance`.
        seed: Seed of the random numbers that break ties.

    Raises:
        RuntimeError: The model was not calibrated.
        TypeError: It is no :class:`rgpr.RGPR`, or a setting is no number.
        ValueError: ``alpha``, ``bins`` or ``window`` is out of range.

    Example:
        >>> from torch import nn
        >>> import rgpr
        >>> _ = torch.manual_seed(0)
        >>> network = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))
        >>> model = rgpr.RGPR(network).fit([torch.randn(500, 2)], progress=False)
        >>> _ = model.calibrate([torch.randn(500, 2)], progress=False)
        >>> monitor = rgpr.Monitor(model)
        >>> print(monitor.update(torch.randn(200, 2)).alarm)
        False
        >>> print(monitor.update(3 * torch.randn(200, 2)).alarm)
        True
        >>> bool(190 < monitor.since < 220)
        True
    """

    def __init__(
        self,
        model: RGPR,
        alpha: float = 0.01,
        *,
        bins: int = 1024,
        layers: bool = True,
        window: int = 1000,
        seed: int = 0,
    ) -> None:
        if not isinstance(model, RGPR):
            raise TypeError(
                f"Monitor takes a fitted and calibrated rgpr.RGPR, not a {type(model).__name__}; "
                "wrap the network: rgpr.RGPR(network).fit(train), then model.calibrate(val)"
            )
        check_settings(alpha, bins, window)
        references = model._reference_scores()
        self.model, self.alpha = model, float(alpha)
        self.nans = 0
        self._generator = np.random.default_rng(seed)
        columns = [_numbers(references)]
        self.layer_names: list[str] = []
        if layers and model._layer_references is not None:
            self.layer_names = model.layers
            columns += list(_numbers(model._layer_references).T)
        self._bins = [Bins.of(column, bins, self._generator) for column in columns]
        limits = np.full(len(columns), math.log(max(1, len(columns) - 1) / alpha))
        limits[0] = math.log(1 / alpha)
        self._martingale = Martingale(limits)
        self._trace = Trace.empty(len(columns))
        self._performance = Performance(int(window))

    # -- reading ---------------------------------------------------------------------------------

    @torch.no_grad()
    def update(self, x: Batch, *, at: float | datetime | None = None) -> Status:
        """Read a batch of inputs, in the order they came.

        Args:
            x: What ``model.score`` takes.
            at: When they came, such as ``time.time()``, for :attr:`since_time`. A ``datetime``
                stands for its ``timestamp()``.
        """
        return self.update_scores(*self._scores(x), at=at)

    @torch.no_grad()
    def _scores(self, x: Batch) -> tuple[Tensor, Tensor | None]:
        """What :meth:`update_scores` takes for these inputs; the monitor stays as it is."""
        if not self.layer_names:
            return self.model.score(x), None
        explained = self.model.explain(x)
        return explained.score, explained.strangeness

    def update_scores(
        self, scores: Any, strangeness: Any = None, *, at: float | datetime | None = None
    ) -> Status:
        """Read scores that were computed elsewhere, in the order the inputs came.

        Args:
            scores: ``model.score(x)``, ``(B,)``; a NaN counts as the strangest score there is.
            strangeness: ``model.explain(x).strangeness``, ``(B, L)``. Without it the layers skip
                these inputs, and their own numbers of inputs stay behind.
            at: When they came.

        Raises:
            TypeError: ``at`` is no time.
            ValueError: A shape does not fit. The monitor is as it was then.
        """
        time, rows = seconds(at), _numbers(scores)
        if rows.ndim != 1:
            raise ValueError(f"scores have shape {rows.shape}; expected (B,), one for each input")
        rows = rows[:, None]
        if strangeness is not None and self.layer_names:
            more = _numbers(strangeness)
            if more.shape != (len(rows), len(self.layer_names)):
                raise ValueError(
                    f"strangeness has shape {more.shape}; expected "
                    f"({len(rows)}, {len(self.layer_names)}): a row for each input, and a column "
                    f"for each of the layers {self.layer_names}"
                )
            rows = np.concatenate([rows, more], 1)
        before = self.alarm
        self.nans += int(np.isnan(rows[:, 0]).sum())
        # One row after the other, so that batches may be cut anywhere.
        random = self._generator.random((*rows.shape, 2))
        watched = slice(0, rows.shape[1])
        p = np.stack(
            [b.p_values(rows[:, i], random[:, i]) for i, b in enumerate(self._bins[watched])], 1
        )
        path = np.tile(self._martingale.log, (len(rows), 1))
        first = self.count + 1
        path[:, watched] = self._martingale.update(p, watched)
        self._trace.add(first, path, time)
        return self._report(new=self.alarm and not before)

    # -- what was found --------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """How many inputs were read."""
        return int(self._martingale.count[0])

    @property
    def log10_martingale(self) -> float:
        """The evidence now; an alarm is raised at ``log10(1 / alpha)``."""
        return float(self._martingale.log[0] / _LN10)

    @property
    def alarm(self) -> bool:
        """Whether an alarm was ever raised. It stays; begin anew with a new monitor."""
        return bool(self._martingale.when[0])

    @property
    def when(self) -> int | None:
        """Number of the input that raised the alarm, counted from 1."""
        return int(self._martingale.when[0]) or None

    @property
    def since(self) -> int | None:
        """Number of the input from which on inputs seem to have drifted; ``None`` without alarm.

        The beginning of the run of inputs, up to the alarm, that is most likely under the best of
        the bets against uniform p-values before it. It is an estimate, without a promise.
        """
        return int(self._martingale.since[0]) or None

    @property
    def since_time(self) -> float | None:
        """When the input :attr:`since` came, if times were given, as exactly as the trace is."""
        return None if self.since is None else self._trace.time_of(self.since)

    @property
    def layers(self) -> list[LayerDrift]:
        """How much each representation drifted, the one with the most evidence ever first."""
        m = self._martingale
        found = [
            LayerDrift(
                name,
                float(m.log[column] / _LN10),
                bool(m.when[column]),
                int(m.when[column]) or None,
                int(m.since[column]) or None,
            )
            for column, name in enumerate(self.layer_names, 1)
        ]
        order = np.argsort(-m.peak[1:], kind="stable")
        return [found[place] for place in order]

    def _report(self, new: bool = False) -> Status:
        return Status(
            count=self.count,
            log10=self.log10_martingale,
            alarm=self.alarm,
            new=new,
            when=self.when,
            since=self.since,
            since_time=self.since_time,
            drifted=tuple(layer.name for layer in self.layers if layer.drifted),
            nans=self.nans,
            alpha=self.alpha,
        )

    def __repr__(self) -> str:
        return f"Monitor(alpha={self.alpha:g}): {self._report()}"

    # -- labels that come late -------------------------------------------------------------------

    @torch.no_grad()
    def label(self, y: Any, numbers: Any, *, x: Any = None, predicted: Any = None) -> None:
        """Take in labels of inputs that were read before, whenever and in whatever order they come.

        An input has one label: a second one is refused, and nothing of its batch is taken in.

        Args:
            y: Labels or targets, ``(B,)`` or ``(B, C)``.
            numbers: Which inputs they belong to, ``(B,)``, counted from 1 in the order they were
                read: a batch after which ``report.count`` is ``n`` holds ``n - B + 1`` to ``n``.
            x: The inputs, which are then predicted again.
            predicted: Or what the model predicted: probabilities, or the means of a regression.

        Raises:
            TypeError: Not exactly one of ``x`` and ``predicted`` is given.
            ValueError: Numbers of inputs that were not read or have labels already, predictions
                that are not what the model returns, or labels that do not fit.
        """
        if (x is None) == (predicted is None):
            raise TypeError("label takes the inputs as x= or their predictions as predicted=")
        if predicted is None:
            answer = self.model(x)
            predicted = answer[0] if isinstance(answer, tuple) else answer
        predicted, y = torch.as_tensor(predicted), torch.as_tensor(y)
        check_predictions(predicted, self.model, made=x is not None)
        which = input_numbers(numbers, len(predicted), self.count)
        self._performance.check_new(which)
        if len(which) == y.numel() == 0:
            return  # a batch without labels
        right, loss = judged(predicted, y, self.model._likelihood)
        self._performance.add(which, right, loss)

    @property
    def performance(self) -> list[Window]:
        """How good predictions were over time, for the windows that have labels."""
        return self._performance.windows(self.model.likelihood != "regression")

    # -- out -------------------------------------------------------------------------------------

    def to_json_line(self) -> str:
        """Where the monitor stands as one line of JSON, without a line break."""
        about = {"performance": self._last_performance()}
        return outlets.json_line(self._report(), about, self.layers)

    def prometheus(self, **labels: str) -> str:
        """Where the monitor stands, as text that Prometheus reads.

        Args:
            **labels: Names and values for every line, such as ``process="a"``.
        """
        return outlets.prometheus(self._report(), self.layers, self._last_performance(), labels)

    def _last_performance(self) -> dict[str, float]:
        windows = self.performance
        if not windows:
            return {}
        last = windows[-1]
        if last.accuracy is None:
            return {"mean_squared_error": last.loss}
        return {"accuracy": last.accuracy, "nll": last.loss}

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """An array of matplotlib Axes: the evidence, each layer's, and the performance if known.

        Args:
            path: Where to write it as a picture, if anywhere. The figure is closed then.
        """
        found = (self._trace.points, self.alpha, self.when, self.since, self.layer_names)
        return draw(Drawn(*found, self.performance), path)

    # -- several processes -----------------------------------------------------------------------

    def merge(self, *others: Monitor) -> Merged:
        """What this monitor and those of other processes found together; none is changed.

        See :mod:`rgpr.audit.monitor.merging` for what is valid. The merged alarm holds its promise
        at all times; the average does for one look at a moment fixed beforehand.

        Raises:
            ValueError: The monitors have another ``alpha`` or other layers.
        """
        for other in others:
            if (other.alpha, other.layer_names) != (self.alpha, self.layer_names):
                raise ValueError(
                    f"monitors with alpha = {self.alpha:g}, layers {self.layer_names} and alpha = "
                    f"{other.alpha:g}, layers {other.layer_names} promise different things; merge "
                    "monitors that were made alike"
                )
        return merged([m._martingale for m in (self, *others)], self.layer_names)

    # -- files -----------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all of the monitor but the model into one safetensors file, atomically."""
        files.save(path, self._parts())

    def _parts(self) -> files.Parts:
        """All of the monitor but the model."""
        return files.Parts(
            self.alpha,
            self.nans,
            self.layer_names,
            files.fingerprint(self.model),
            self._generator,
            self._bins,
            self._martingale,
            self._trace,
            self._performance,
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: RGPR) -> Monitor:
        """The monitor that :meth:`save` wrote, which goes on as if nothing had happened.

        Args:
            path: The file.
            model: The same model: fitted, calibrated and perhaps loaded from its own file.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is damaged, no monitor's, or of another model.
        """
        parts = files.load(path, files.fingerprint(model))
        monitor = cls.__new__(cls)
        monitor.model, monitor.alpha, monitor.nans = model, parts.alpha, parts.nans
        monitor.layer_names, monitor._generator = parts.layers, parts.generator
        monitor._bins, monitor._martingale = parts.bins, parts.martingale
        monitor._trace, monitor._performance = parts.trace, parts.performance
        return monitor


def _numbers(values: Any) -> Array:
    """Numbers of any kind of array as float64 on the CPU."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)
