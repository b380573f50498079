"""RGPR: a trained network or Bayesian network, extended by the ReLU-GP residual.

Every method hands its work over to one of the folders beside this file and keeps the tensors that
come back. This file is long because it documents each of them where users look for it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from ._backend.buffers import StableBuffers
from ._backend.compiled import CompiledCall
from ._network.batches import Batch, Shape, dtype_of, gathered, run
from ._network.checks import check_input, check_source, network_dtype_device, one_of
from ._network.columns import check_columns
from ._network.layers import LayerChoice, as_choice, check_layers
from ._network.loaders import inputs, on_device
from ._network.outputs import Output
from ._network.representation import Representation, names_of
from ._network.running import plain_module
from ._network.sources import Batches, as_batches
from ._network.table import LayerTable, table_of
from .answers import conformal, probabilities
from .answers.calibration import Calibration, calibrate
from .answers.explanation import Explanation, explain
from .answers.predictions import (
    Predictions,
    Promises,
    Said,
    SaidByGraph,
    SaidByReading,
    class_set,
    everything,
    interval,
    predict,
)
from .answers.recorded import RecordedCalls
from .extension import Extension, Reading
from .extension.fitting import fit
from .extension.plan import Plan
from .guarantee.assumptions import Check, check_assumptions
from .guarantee.certificate import Certificate, certify
from .likelihoods import LabelLikelihood, likelihood_named
from .posteriors import Posterior, as_posterior
from .posteriors.gaussian import Gaussian
from .residual.recipes import RESIDUALS, ResidualRecipe
from .residual.variance import Residual
from .saving import model_file, state
from .saving.export import check_exportable, program_of
from .saving.parts import Parts, complete
from .states import CalibrationState, FitState
from .states.identity import check_ranks, of_answers, of_choice
from .tuning.options import Options
from .tuning.result import TuningResult
from .tuning.run import tune

__all__ = ["RGPR", "check", "layers", "load"]

# Tensors that a fit or a calibration makes: there or not, and of whatever size.
_LEARNED = (
    "_given_onset",
    "_given_temperature",
    "_fit_keys",
    "_fit_count",
    "_references",
    "_label_scores",
    "_layer_references",
    "_val_keys",
)


class RGPR(StableBuffers):
    r"""Adds :math:`N(0, v(x) I)` to the outputs of ``base``: zero at the data, cubic far away.

    Near the data the predictions stay those of ``base``; as an input is scaled away from it the
    confidence goes to ``1 / C``. Beside probabilities there is :meth:`score`, how strange an input
    is. The network is never changed: it is evaluated in evaluation mode and its own modes come
    back after every call.

    Args:
        base: An ``nn.Module`` (a point estimate) that returns logits or regression outputs, a
            fitted laplace-torch object, or any :class:`rgpr.Posterior`.
        layers: Which representations the residual reads beside the input: ``"auto"`` for up to
            eleven hidden stages, names of modules, globs, or a function of (name, module) to bool.
            A dict says how each is read: ``{"encoder.*": 1}`` names the axis of the channels,
            ``"first"``, ``"last"`` or ``"mean"`` the position of a sequence, ``None`` leaves both
            to the modules around it. :func:`rgpr.layers` shows what would be read.
        likelihood: What the outputs are: ``"classification"`` (logits of classes of which one is
            right; one output is the logit of class 1 of two), ``"multilabel"`` (a logit for each
            of several labels, which are independent of each other) or ``"regression"`` (numbers);
            by default what ``base`` was fitted for, else classification. A network with one output
            that is fitted without targets gets a warning then.
        residual: ``"onset"`` (exactly zero at most data), ``"paper"`` or a
            :class:`rgpr.ResidualRecipe`: in which coordinates the distance from the data is
            measured, and how the representations become one variance.
        nan: What a row with a NaN gets: ``"propagate"`` (NaN, in that row alone) or ``"raise"``,
            which has to wait for the device at every call.
        input: Where the input holds ids instead of real numbers, the name of the module that reads
            them, such as ``"bert.embeddings.word_embeddings"``: its output, averaged over
            positions, is then the representation ``"input"``.
        output: Which part of what the network returns holds its outputs, where that is neither a
            tensor nor has ``logits``: an index, a key or the name of an attribute, or a function,
            with which the model cannot be saved. A given :class:`rgpr.Posterior` is left as it is,
            and one whose own ``output`` is another is refused.

    Example:
        >>> from torch import nn
        >>> network = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))
        >>> x = torch.randn(64, 2)
        >>> model = RGPR(network).fit([x])
        >>> model.layers
        ['input', '1']
        >>> model(1e8 * x).shape
        torch.Size([64, 3])
        >>> bool((model(1e12 * x) - 1 / 3).abs().max() < 1e-3)
        True
        >>> bool((model.score(1e3 * x) > model.score(x)).all())
        True
    """

    posterior: Posterior
    residual: Residual | None
    _temperature: Tensor
    _given_onset: Tensor | None
    _given_temperature: Tensor | None
    _fit_keys: Tensor | None
    _fit_count: Tensor | None
    _references: Tensor | None
    _label_scores: Tensor | None
    _layer_references: Tensor | None
    _val_keys: Tensor | None

    def __init__(
        self,
        base: Any,
        layers: LayerChoice = "auto",
        likelihood: str | None = None,
        *,
        residual: str | ResidualRecipe = "onset",
        nan: str = "propagate",
        input: str | None = None,
        output: Output = None,
    ) -> None:
        super().__init__()
        if not isinstance(residual, str | ResidualRecipe):
            raise TypeError(f"residual={residual!r}; expected a word or a rgpr.ResidualRecipe")
        if isinstance(residual, str):
            residual = RESIDUALS[one_of("residual", residual, tuple(RESIDUALS))]
        self.recipe = residual
        self.posterior = as_posterior(base)
        check_source(self.posterior.network, input)
        self.input = input
        fitted_for = self.posterior.likelihood
        self._likelihood = likelihood_named(likelihood or fitted_for or "classification")
        self._likelihood_is_guessed = (likelihood or fitted_for) is None
        if fitted_for not in (None, self.likelihood):
            raise ValueError(
                f"the base was fitted for {fitted_for}, so likelihood='{self.likelihood}' cannot "
                f"be; pass likelihood='{fitted_for}' or leave it out, or wrap the network itself"
            )
        self.nan = one_of("nan", nan, ("propagate", "raise"))
        self._choice = layers
        check_layers(self.posterior.network, layers)
        if output is not None:
            before = self.posterior.output
            if before not in (None, output):
                raise ValueError(
                    f"output={output!r}, and this posterior already takes the part {before!r} of "
                    f"what its network returns; set posterior.output = {output!r}, or leave "
                    "output= out"
                )
            # The posterior may serve other models, so the user's own is left as it is.
            self.posterior = self.posterior.taking(output)
        self._layers: list[Representation] = []
        self._input_shape: Shape | None = None
        self._columns: tuple[str, ...] | None = None
        self.residual = None
        # What the last calibration warned of, which a report says again; a file does not keep it.
        self._notes: list[str] = []
        self._recorded = RecordedCalls()
        self._compiled: CompiledCall | None = None
        device = network_dtype_device(self.posterior.network)[1]
        one = torch.ones((), dtype=torch.float64, device=device)
        self.register_buffer("_temperature", one)
        for name in _LEARNED:
            self.register_buffer(name, None)

    @property
    def likelihood(self) -> str:
        """What the outputs are: ``"classification"``, ``"multilabel"`` or ``"regression"``."""
        return self._likelihood.name

    # -- fitting ---------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def fit(
        self, train_loader: Any, y: Any = None, *, r: float = 1.0, progress: bool = True
    ) -> RGPR:
        """Learn how far every representation usually is, in one pass over the training inputs.

        Also sets where the variance sets in and how fast it grows, from up to 512 training inputs
        that are drawn evenly from the pass: 98 % of inputs like them get none, and at twice the
        strangeness of the onset logits are divided by the root of seven. With
        ``residual="paper"`` it sets ``sigma2`` to equal shares of a variance of 0.1 at the 95 %
        quantile of 256 of them instead. The unit of a regression's variance is 0.1 times the
        variance of its outputs on these inputs. A ``sigma2`` or a temperature that was set before
        is replaced, the latter by one. Either all of it succeeds or the model stays as it was.

        Args:
            train_loader: Yields ``(x, y)``, ``x``, ``(a, b, y)`` for a network that takes two
                tensors, or dicts with entries named like the parameters of the network; batches
                are moved to the network's device. Instead of a loader it may be inputs ``X`` or a
                pair ``(X, y)``, as tensors, numpy arrays or pandas frames, a dict of them, a torch
                or Hugging Face data set; floating-point numbers of numpy and pandas take the
                network's dtype. Targets must fit the likelihood. Prototypes are of classes, and
                take the network's own predictions if there are no targets. It may also be a
                :class:`rgpr.FitState`, which was updated with the data before.
            y: Targets, if ``train_loader`` is the inputs alone.
            r: Factor on the standard deviations: larger makes the residual flatter.
            progress: Show a progress bar where there is a terminal.

        Returns:
            The model itself.

        Raises:
            TypeError: Inputs are not floating point, or not of the network's dtype, targets are no
                numbers, or a frame has columns that are no numbers.
            ValueError: No batch, fewer than two inputs, inputs of differing shapes, a value that
                is not finite, targets that do not fit the outputs, or a network that ends in a
                softmax or a sigmoid; the message names the batch.
        """
        check_ranks(lambda: of_choice(self, r=r))
        if isinstance(train_loader, FitState):
            _no_targets(y)
        state = train_loader if isinstance(train_loader, FitState) else FitState(self)
        data = None if state is train_loader else self._data(train_loader, y, fitted=False)
        fitted = fit(state.statistics_for(self), data, r=r, progress=progress)
        self._columns = data.columns if isinstance(data, Batches) else None
        self._layers, self._input_shape = fitted.layers, fitted.shape
        self.residual = fitted.residual
        for name in _LEARNED:
            setattr(self, name, None)
        self._notes = []
        self._fit_keys = fitted.keys
        self._fit_count = torch.tensor(fitted.count, device=self._device)
        self._temperature = torch.ones_like(self._temperature)
        self._given_temperature = self._temperature.clone()
        onset = fitted.residual.onset
        self._given_onset = None if onset is None else onset.clone()
        if self._likelihood_is_guessed and fitted.outputs == 1 and not fitted.labelled:
            warnings.warn(
                "this network has one output, and nothing says what it is: neither likelihood= nor "
                "targets were given. It is taken for the logit of class 1 of two classes. If that "
                "is right, pass RGPR(network, likelihood='classification'); if the output is a "
                "number to predict, pass RGPR(network, likelihood='regression')",
                stacklevel=4,  # through the decorators of this method
            )
        return self

    def _plan(self) -> Plan:
        return Plan(self.posterior, self._choice, self.recipe, self._likelihood, self.input)

    def _data(self, source: Any, y: Any = None, *, fitted: bool = True) -> Iterable[Any]:
        """Batches of what a user passes as data, whose columns must be those of the fit."""
        data = as_batches(source, self.posterior.network, y)
        check_columns(data, self._columns if fitted else None)
        return data

    @property
    def layers(self) -> list[str]:
        """Names of the representations, ``"input"`` first."""
        self._fitted()
        return names_of(self._layers)

    @property
    def sigma2(self) -> Tensor:
        """Scale of each representation's kernel, ``(L,)``. Zero switches one off; settable.

        All zeros give the base's answers exactly. Setting other values drops what
        :meth:`calibrate` found for sets and intervals, which belong to other scales; p-values stay.
        """
        return self._fitted().sigma2

    @sigma2.setter
    @torch.inference_mode(False)  # what is kept must be usable outside of it
    def sigma2(self, value: float | Sequence[float] | Tensor) -> None:
        residual = self._fitted()
        new = torch.as_tensor(value, dtype=torch.float64, device=residual.sigma2.device).detach()
        if new.shape not in (torch.Size([]), residual.sigma2.shape):
            raise ValueError(
                f"sigma2 has shape {tuple(new.shape)}; expected a number or one for each of the "
                f"{len(self._layers)} layers {self.layers}"
            )
        if not bool((new.isfinite() & (new >= 0)).all()):
            raise ValueError(f"sigma2 = {new.tolist()} must be finite and not negative")
        # A tensor that was changed in place, as by `*=`, is no other tensor.
        shared = new.data_ptr() == residual.sigma2.data_ptr()
        if bool((new == residual.sigma2).all()) and not shared:
            return  # sets and intervals stay
        residual.sigma2 = new.expand_as(residual.sigma2).clone()
        self._label_scores = None

    @property
    def temperature(self) -> Tensor:
        """What goes into the final softmax is divided by it; 1 at first, settable.

        It changes how sharp probabilities are, but neither which class wins nor the limit far
        away, where what it divides goes to zero. Setting it drops what :meth:`calibrate` found for
        sets and intervals; p-values stay.
        """
        return self._temperature

    @temperature.setter
    @torch.inference_mode(False)
    def temperature(self, value: float | Tensor) -> None:
        number = float(value)
        if not 0 < number < torch.inf:
            raise ValueError(f"temperature = {number} must be positive and finite")
        if number == float(self._temperature):
            return  # what calibrate chose stays its choice
        self._temperature = torch.full_like(self._temperature, number)
        self._given_temperature = self._temperature.clone()
        self._label_scores = None

    def _extension(self) -> Extension:
        """The parts that make an answer, as they are now."""
        if self.residual is None or self._input_shape is None:
            raise RuntimeError("this model was not fitted: call model.fit(train_loader) first")
        return Extension(
            self.posterior,
            self.residual,
            self._layers,
            self._input_shape,
            self._likelihood,
            self._temperature,
            self.nan,
        )

    def _as_given(self) -> Extension:
        """The parts with the onset and the temperature that the fit or the user set.

        Sets and intervals are ranked by these. What :meth:`calibrate` chooses depends on the very
        data that it ranks.
        """
        now = self._extension()
        given = self._temperature if self._given_temperature is None else self._given_temperature
        slope = torch.ones_like(now.residual.slope)
        residual = now.residual.with_onset(self._given_onset, slope)
        return replace(now, residual=residual, temperature=given)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Recordings hold memory on the device that the model leaves.
        self._recorded = self._recorded.anew()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # Models that were pickled whole by earlier versions have none.
        self.__dict__.setdefault("_recorded", RecordedCalls())
        self.__dict__.setdefault("_compiled", None)

    def _load_from_state_dict(self, state_dict, prefix, *rest):  # type: ignore[no-untyped-def]
        key = prefix + state.KEY
        if key not in state_dict:  # earlier versions wrote no description
            mine = self.state_dict(prefix=prefix)
            described = mine.pop(key)
            if mine.keys() <= state_dict.keys():
                state_dict[key] = described
        if len(state_dict.get(key, ())):  # a fitted model, which this one becomes
            self._become(state.parts_of(state_dict, prefix, self.posterior))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @property
    def _fitted_on(self) -> tuple[Tensor, int] | None:
        """Keys of some training inputs, and how many inputs there were."""
        return None if self._fit_keys is None else (self._fit_keys, int(self._fit_count or 0))

    @property
    def _device(self) -> torch.device:
        return self._temperature.device

    @torch.inference_mode(False)
    @torch.no_grad()
    def calibrate(
        self,
        val_loader: Any,
        y: Any = None,
        *,
        max_nll_increase: float = 0.005,
        progress: bool = True,
    ) -> Calibration:
        """Learn from held-out data what only such data can tell; one pass over them.

        - References for :meth:`p_value` and :meth:`flag`, from the inputs alone.
        - With labels, what :meth:`predict_set` and :meth:`interval` promise.
        - With at least 100 labelled examples, the temperature (never below its present value).
        - With at least 1000, where the residual's variance sets in: as early as the budget
          allows, from the 95 % quantile of these data on, and at twice the onset up to six times
          its unit. With fewer it moves only if they show, beyond two standard errors, that the
          budget is broken.

        It never makes the residual weaker than the fit left it: if the budget allows, no input gets
        less variance; else the onset moves out, and beyond twice the new one no input gets less.
        It never makes the likelihood of these data worse than the budget says, or than it was.
        Calibrating again starts anew.

        Args:
            val_loader: Yields ``(x, y)`` or ``x``, held out from training and exchangeable with
                what is to be predicted; or data in one of the other forms that :meth:`fit` takes,
                or a :class:`rgpr.CalibrationState`, which was updated with the data before.
            y: Targets, if ``val_loader`` is the inputs alone.
            max_nll_increase: How much the mean negative log-likelihood of these data may rise
                above the base's. Of several labels an example's is the sum over its labels.
            progress: Show a progress bar where there is a terminal.

        Returns:
            What was done; ``print`` it.

        Raises:
            RuntimeError: The model was not fitted.
            ValueError: No example, labels that do not fit the outputs, or a negative budget.
        """
        check_ranks(lambda: of_answers(self, max_nll_increase=max_nll_increase))
        given = isinstance(val_loader, CalibrationState)
        if given:
            _no_targets(y)
        state = val_loader if given else CalibrationState(self)
        found, report = calibrate(
            state.shard_for(self, progress),
            None if given else self._data(val_loader, y),
            self._fitted_on,
            max_nll_increase=max_nll_increase,
        )
        residual = self._fitted()
        residual.onset, residual.slope = found.chosen.onset, found.chosen.slope
        self._temperature = found.chosen.temperature
        self._references, self._label_scores = found.references, found.label_scores
        self._layer_references, self._val_keys = found.layers, found.keys
        self._notes = report.warnings
        return report

    @torch.inference_mode(False)
    @torch.no_grad()
    def tune(
        self,
        val_loader: Any,
        y: Any = None,
        objective: str = "likelihood",
        *,
        ood: Any = None,
        ood_weight: float | None = None,
        link_approx: str = "probit",
        n_samples: int = 20,
        temperature: bool = False,
        max_nll_increase: float | None = None,
        max_ece_increase: float | None = None,
        noise: float | None = None,
        max_examples: int | None = 20_000,
        seed: int = 0,
        progress: bool = True,
    ) -> TuningResult:
        r"""Choose the paper's ``sigma2`` in seconds: one pass, then never the network again.

        For ``residual="paper"`` and recipes with ``combine="sum"``; the default residual needs no
        tuning and is set by :meth:`calibrate`.

        ``"likelihood"`` maximises the mean log-likelihood of validation data (the paper's
        :math:`L_\text{LL}`). ``"ood"`` adds ``ood_weight`` times the mean, over outliers, of the
        negative cross-entropy to the uniform distribution (:math:`L_\text{OOD}`; means instead of
        sums, so that the weight means the same whatever the sizes of the sets).
        ``"marginal-likelihood"`` is that of the Gaussian process, for up to a few thousand
        examples. All start from several scales and never end worse than they began, unless a
        calibration budget asks for it.

        Args:
            val_loader: Yields ``(x, y)``, or data in one of the other forms that :meth:`fit`
                takes. Held out from training for the first two objectives.
            y: Targets, if ``val_loader`` is the inputs alone. A word here is the objective.
            objective: One of the three.
            ood: Outliers for ``"ood"``: a loader or generator of inputs, or an array. By default
                noise made from the validation inputs, see :func:`rgpr.noise.like_data`. A
                generator without a length is read for as many outliers as there are validation
                examples.
            ood_weight: The paper's lambda; 0.5 by default as there. With a budget, the largest
                that is tried, 100 unless given.
            link_approx: ``"probit"`` or ``"mc"``: what the likelihood is computed with.
            n_samples: Samples for each example with ``"mc"``, the same for every ``sigma2``.
            temperature: Tune the model's temperature too: it gives the data back the confidence
                that added variance takes from it.
            max_nll_increase: A budget: the largest weight is chosen whose validation NLL is at
                most this much above the base's own.
            max_ece_increase: Likewise for the expected calibration error.
            noise: Regression: variance of the observations; found together with ``sigma2`` if
                not given.
            max_examples: At most so many examples of each set are kept, drawn evenly; beyond
                1 GiB they are thinned whatever this says.
            seed: Seed of everything random.
            progress: Show a progress bar where there is a terminal.

        Returns:
            What was done; ``print`` it. The model has the new ``sigma2`` (and temperature).

        Raises:
            RuntimeError: The model was not fitted.
            TypeError: ``"marginal-likelihood"`` over a base without covariances between inputs.
            ValueError: The default residual, options that do not fit together, targets that do
                not fit the outputs, or too many examples for ``"marginal-likelihood"``.
        """
        extension = self._extension()
        if isinstance(y, str):
            if objective != "likelihood":
                raise TypeError("outliers go by their name: model.tune(data, 'ood', ood=outliers)")
            y, objective = None, y
        options = Options(
            objective,
            None if ood is None else self._data(ood),
            ood_weight,
            link_approx=link_approx,
            n_samples=n_samples,
            temperature=temperature,
            max_nll_increase=max_nll_increase,
            max_ece_increase=max_ece_increase,
            noise=noise,
            max_examples=max_examples,
            seed=seed,
            progress=progress,
        )
        check_ranks(lambda: of_answers(self, **options.numbers))
        tuned, result = tune(extension, self._data(val_loader, y), options)
        self.sigma2 = tuned.sigma2
        if temperature:
            self.temperature = tuned.temperature
        return result

    # -- probabilities ---------------------------------------------------------------------------

    def compile(self, **options: Any) -> None:
        """Compile predictions in place as graphs of the network, its posterior and the residual.

        One function is the plain call, ``model(x)``. Another one gives :meth:`p_value`,
        :meth:`flag`, :meth:`predict_set`, :meth:`interval`, :meth:`predict` and, where gradients
        are switched off, :meth:`score` all that they need, from one pass. Graphs are for batches of
        one real tensor. Other batches, and calls with other options, gradients of ``x``, autocast,
        transforms of ``torch.func`` or an empty batch run as before, and so do all while parts of
        the network have hooks that came later, or with ``nan="raise"``.

        Either function is compiled for the first size of a batch, then once for all other sizes,
        and once for a single row; on a GPU, batches of more than 1024 rows count apart, and so do
        calls with gradients, under ``torch.no_grad()`` and in ``torch.inference_mode()``. The first
        calls of these kinds take as long as a compilation does, and so do those after the model was
        fitted, calibrated or moved, or its ``sigma2`` or temperature was set. Let them end before
        other threads predict.

        Hooks of the network that are there now become parts of the graph, so what they do beside
        changing tensors is done once. While there are others, calls run as before.

        Attributes of the network that are no tensors, such as ``eps``, are constants of the graph.
        In half precision a graph rounds in another way than the calls by which :meth:`calibrate`
        ranks the held-out data, so scores may differ in their third digit.
        ``torch.compile(model)`` works too, but cuts the graph at every layer that is read.

        Args:
            options: For ``torch.compile``, such as ``mode="max-autotune"``. With CUDA graphs
                (``mode="reduce-overhead"``) the next call writes into what ``model(x)`` returned.

        Raises:
            RuntimeError: The model was not fitted.
            TypeError: The base predicts by random samples, or through another library's object.
        """
        check_exportable(self)

        def export(what: str, model: RGPR, x: Tensor, dynamic: bool) -> ExportedProgram:
            return program_of(what, model, x, dynamic=dynamic)

        def check(x: Tensor) -> None:
            check_input(x, self.posterior.network, self._input_shape)

        def allowed() -> bool:
            return self.nan == "propagate"

        def without_gradients() -> bool:
            return allowed() and not torch.is_grad_enabled()

        call, said = partial(export, "call"), partial(export, "said")
        self._compiled_call_impl = CompiledCall(self, call, check, options, allowed)
        self._compiled = CompiledCall(self, said, check, options, without_gradients)

    def __getstate__(self) -> dict[str, Any]:
        # Torch leaves out compiled calls as well: a copy has other tensors.
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return state | {"_compiled": None}

    def forward(
        self,
        x: Batch | None = None,
        *others: Tensor,
        link_approx: str = "probit",
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        diagonal_output: bool = False,
        pred_type: str = "glm",
        **parts: Tensor,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Predict, in one pass through the network.

        A row with an infinite entry gets the limit: the uniform distribution, for labels 1/2
        each, or for regression an infinite variance around a NaN. So does a row so far away that
        the network itself overflows. A row with a NaN gets what ``nan`` says. No row touches
        another.

        Args:
            x: ``(B, ...)``, of the shape, dtype and device that the network takes; or a dict or a
                tuple of such tensors, for a network that takes several.
            others: The other tensors, if ``x`` is the first of several.
            link_approx: ``"probit"``, ``"mc"`` or, for classification alone, ``"bridge"``.
            n_samples: Number of samples for ``"mc"``. A multiple of the number of classes (of two
                for labels) makes the confidence far away exactly ``1 / C``.
            generator: Source of the samples for ``"mc"``.
            diagonal_output: For regression, return variances instead of covariances.
            pred_type: Only ``"glm"``, which laplace-torch's calls often name; to predict by
                samples of weights, wrap a posterior that draws them.
            parts: Tensors by the names of the network's parameters, as an alternative to a dict.

        Returns:
            Classification: probabilities ``(B, C)`` in the dtype of ``x``, two columns for a
            network with one output.
            Multilabel: the probability of each label, ``(B, C)`` in the dtype of ``x``.
            Regression: the mean ``(B, C)`` and the covariance ``(B, C, C)``, or variances
            ``(B, C)``, of the noise-free function; variances are float64.

        Raises:
            RuntimeError: The model was not fitted.
            TypeError: ``x`` has the wrong dtype, or an argument is no tensor.
            ValueError: ``x`` has the wrong shape or device, or a NaN with ``nan="raise"``.
        """
        if x is None or others or parts:
            x = gathered(self.posterior.network, x, others, parts)
        if link_approx != "probit":
            probabilities.check_link(link_approx, self._likelihood)
        if pred_type != "glm":
            one_of("pred_type", pred_type, ("glm",))
        extension = self._extension()
        if link_approx == "mc" and isinstance(self._likelihood, LabelLikelihood):
            drawn, limit = probabilities.draw(extension, x, n_samples, generator)
            dtype = dtype_of(self.posterior.network, x)
            return probabilities.monte_carlo(self._likelihood, drawn, limit).to(dtype)
        if link_approx == "probit" and not diagonal_output:
            answered = self._recorded(extension, x)
            if answered is not None:
                return answered  # type: ignore[no-any-return]
        return probabilities.answer(extension, extension.read(x), link_approx, diagonal_output)

    def predictive_samples(
        self,
        x: Batch,
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        *,
        symmetric: bool = True,
    ) -> Tensor:
        """Samples of the logits (divided by the temperature) or outputs, ``(S, B, C)``, float64.

        A row at the limit (see :meth:`forward`) has samples at plus and minus infinity.

        Args:
            x: ``(B, ...)``.
            n_samples: How many.
            generator: Source of the samples.
            symmetric: For labels, spread the residual's noise evenly over the alternatives, as
                ``link_approx="mc"`` does: each sample has the same law, but they are not
                independent of each other. ``False`` for samples that are.
        """
        extension = self._extension()
        return probabilities.draw(extension, x, n_samples, generator, symmetric=symmetric)[0]

    def variance(self, x: Batch) -> Tensor:
        """The residual's variance ``v(x)``, ``(B,)`` in float64."""
        extension, network = self._extension(), self.posterior.network
        return probabilities.variance(extension, extension.read(x, partial(run, network)))

    # -- how strange, and what follows -----------------------------------------------------------

    def score(self, x: Batch) -> Tensor:
        """How strange each input is, ``(B,)`` in float64: higher is stranger.

        See :mod:`rgpr.answers.score` for the formula. It is fixed by :meth:`fit`: neither
        calibrating nor tuning changes it. Along every ray away from the data it grows without
        bound; a row at the limit (see :meth:`forward`) has an infinite score.
        """
        return self._said(x).score

    def _said(self, x: Batch) -> Said:
        """What one pass says, by the compiled graph where there is one that can do this call."""
        tensors = None if self._compiled is None else self._compiled.of(x)
        if tensors is None:
            return self._say(x)
        return SaidByGraph.of(self._likelihood, tensors)

    def _say(self, x: Batch) -> SaidByReading:
        extension = self._extension()
        return SaidByReading(extension, self._as_given, extension.read(x))

    def _everything(self, x: Batch, diagonal_output: bool = False) -> tuple[Tensor, ...]:
        """What a plain call returns, the score, and the p-value if there is one, from one pass."""
        extension = self._extension()
        reading: Reading[Gaussian] = extension.read(x)
        return everything(extension, reading, self._references, diagonal_output)

    @torch.no_grad()
    def p_value(self, x: Batch) -> Tensor:
        """The share of data like the validation data that is at least as strange, ``(B,)``.

        A conformal p-value: for inputs exchangeable with those that :meth:`calibrate` saw, it is at
        most ``alpha`` with a probability of at most ``alpha``, for every ``alpha`` and however few
        they were.

        Raises:
            RuntimeError: The model was not calibrated.
        """
        references = self._reference_scores()
        return conformal.p_values(self.score(x), references)

    @torch.no_grad()
    def flag(self, x: Batch, alpha: float | None = None, *, fdr: float | None = None) -> Tensor:
        """Which inputs are too strange to be like the validation data, ``(B,)``.

        Args:
            x: ``(B, ...)``.
            alpha: At most this share of inputs like the validation data is flagged; 0.05 unless
                ``fdr`` is given.
            fdr: Instead of ``alpha``, for a batch: of the flagged inputs at most this share, on
                average, is like the validation data (Benjamini and Hochberg).

        Returns:
            Booleans; a row with a NaN is flagged.

        Raises:
            RuntimeError: The model was not calibrated.
            ValueError: ``alpha`` or ``fdr`` is no share, both are given, or it is smaller than
                any p-value can be.
        """
        references = self._reference_scores()
        if alpha is not None and fdr is not None:
            raise ValueError(f"alpha = {alpha} and fdr = {fdr}: give one of them, not both")
        alpha = 0.05 if alpha is None else alpha
        name, level = ("alpha", alpha) if fdr is None else ("fdr", fdr)
        conformal.check_level(name, level, references)
        p = self.p_value(x)
        flagged = p <= level if fdr is None else conformal.false_discoveries(p, level)
        return flagged | p.isnan()

    @torch.no_grad()
    def predict_set(self, x: Batch, coverage: float = 0.9) -> Tensor:
        """Sets of classes that hold the right one with this probability, ``(B, C)`` booleans.

        The promise is about inputs exchangeable with the labelled data of :meth:`calibrate`, on
        average over them. The most probable class is always in; far away every class is. See
        :mod:`rgpr.answers.conformal` for the conformal score and why.

        Raises:
            RuntimeError: The model was not calibrated with labels.
            ValueError: Not a classification, or a coverage that is no share.
        """
        if not self._likelihood.sets:
            raise ValueError(
                "sets are of classes of which one is right; this model is for "
                f"{self.likelihood}: use model.interval"
            )
        bound = self._bound(coverage)
        return class_set(self._said(x).ranks, bound)

    @torch.no_grad()
    def interval(self, x: Batch, coverage: float = 0.9) -> tuple[Tensor, Tensor]:
        """Bounds that hold the target with this probability, each ``(B, C)``.

        The promise is that of :meth:`predict_set`, for all outputs at once. For regression the
        bounds are float64, and their width is proportional to the predictive standard deviation,
        so it grows away from the data. For several labels they are booleans: the lower are the
        labels that are surely there, the upper those that may be; far away none and all.

        Raises:
            RuntimeError: The model was not calibrated with targets.
            ValueError: A classification, or a coverage that is no share.
        """
        if self._likelihood.sets:
            raise ValueError("intervals are of numbers; this model classifies: use predict_set")
        bound = self._bound(coverage)
        return interval(self._said(x).ranks, bound)

    def predict(
        self, data: Any, *, alpha: float = 0.05, coverage: float = 0.9, progress: bool = True
    ) -> Predictions:
        """Everything for many inputs, as arrays on the CPU, from one pass over them.

        Each answer is that of the call of its name: :meth:`forward` (with variances instead of
        covariances), :meth:`score` and, once :meth:`calibrate` was called, :meth:`p_value`,
        :meth:`flag`, and :meth:`predict_set` or :meth:`interval`.

        Args:
            data: A loader, or data in one of the other forms that :meth:`fit` takes. Targets are
                not looked at. A frame must have the columns of the one that the model was fitted
                on.
            alpha: The level of flags.
            coverage: That of sets and intervals.
            progress: Show a progress bar where there is a terminal.

        Raises:
            RuntimeError: The model was not fitted.
            TypeError: Inputs are not of the network's dtype, or a frame holds no numbers.
            ValueError: Inputs of another shape, a frame with other columns, no batch at all, or a
                level that :meth:`flag` or :meth:`predict_set` refuses.
        """
        extension = self._extension()
        conformal.check_share("coverage", coverage)
        if self._references is None:
            conformal.check_share("alpha", alpha)
        else:
            conformal.check_level("alpha", alpha, self._references)
        bound = None if self._label_scores is None else self._bound(coverage)
        promises = Promises(self._references, alpha, bound)
        return predict(self._said, extension, promises, self._data(data), progress)

    @torch.no_grad()
    def explain(self, x: Batch) -> Explanation:
        """Which representation made each input how strange; ``print`` it."""
        extension = self._extension()
        return explain(extension, extension.read(x))

    def certify(self, eps: float = 0.05) -> Certificate:
        """A distance beyond which every input has a confidence of at most ``1 / C + eps``.

        Of several labels each is there with a probability between ``1 / 2 - eps`` and
        ``1 / 2 + eps`` beyond it.

        The promise is about the probit, for every direction. It is the smaller of two radii: one
        rests on a rigorous upper bound of the network's Lipschitz constant, the other on the
        residual of the head's own input and holds at every depth; see
        :mod:`rgpr.guarantee.certificate`.

        Raises:
            TypeError: Neither can be had; the message names what is in the way of both.
            ValueError: Nothing to certify: regression, or a scale of zero.
        """
        return certify(self._extension(), eps)

    def _reference_scores(self) -> Tensor:
        self._fitted()
        if self._references is None:
            raise RuntimeError(
                "this model was not calibrated: call model.calibrate(val_loader) first, with "
                "inputs that were held out from training"
            )
        return self._references

    def _bound(self, coverage: float) -> Tensor:
        """The largest conformal score that belongs to a set or interval of this coverage."""
        conformal.check_share("coverage", coverage)
        self._reference_scores()
        if self._label_scores is None:
            raise RuntimeError(
                "nothing is known about targets: this model was calibrated without them, or its "
                "sigma2 or temperature was set afterwards. Call model.calibrate(val_loader) with a "
                "loader of (x, y)"
            )
        return conformal.quantile(self._label_scores, coverage)

    def _fitted(self) -> Residual:
        if self.residual is None:
            raise RuntimeError("this model was not fitted: call model.fit(train_loader) first")
        return self.residual

    # -- files -----------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write network weights, posterior and residual into one safetensors file, atomically.

        Raises:
            RuntimeError: The model was not fitted.
            TypeError: The posterior still needs the object it was made from, or ``output`` is a
                function.
        """
        model_file.save(path, self._parts())

    def _parts(self) -> Parts:
        """All that is kept of a fitted model."""
        learned = {name: getattr(self, name) for name in _LEARNED}
        tensors = {name: tensor for name, tensor in learned.items() if tensor is not None}
        return Parts(self._extension(), self.recipe, tensors, self._columns)

    def _become(self, parts: Parts) -> None:
        """Be the model that the parts were taken from."""
        now, device = parts.extension, self._device
        self.posterior, self.recipe, self._columns = now.posterior, parts.recipe, parts.columns
        self._likelihood, self.nan, self.input = now.likelihood, now.nan, now.source
        self._likelihood_is_guessed, self._notes = False, []
        self._layers, self._input_shape = list(now.representations), now.input_shape
        self._choice = as_choice(now.representations)
        self.residual = now.residual.to(device)
        self._temperature = now.temperature.to(device)
        # A state may name these tensors alone, and none of the model's other attributes.
        learned = {"_given_temperature": self._temperature.clone(), **parts.learned}
        for name in _LEARNED:
            tensor = learned.get(name)
            setattr(self, name, None if tensor is None else tensor.to(device))

    def get_extra_state(self) -> Tensor:
        """What ``state_dict`` holds beside tensors: JSON as bytes, empty before the fit."""
        return state.described(None if self.residual is None else self._parts())

    def set_extra_state(self, _: Tensor) -> None:
        """Nothing is left to do: the state was read before the tensors."""

    def extra_repr(self) -> str:
        layers = names_of(self._layers) or self._choice
        done = [f"{what} {data}" for what, data in self._learned_from().items()]
        words = [f"likelihood={self.likelihood!r}, layers={layers!r}", *(done or ["not fitted"])]
        return ", ".join(words)

    def _learned_from(self) -> dict[str, str]:
        """Which data the model was fitted and calibrated on, in words; nothing before the fit."""
        if self.residual is None:
            return {}
        count = "some" if self._fit_count is None else int(self._fit_count)
        found = {"fitted on": f"{count} inputs"}
        if self._references is not None:
            labels = "without" if self._label_scores is None else "with"
            found["calibrated on"] = f"{len(self._references)} inputs {labels} labels"
        return found


def _no_targets(y: Any) -> None:
    """Refuse targets beside a state, which has taken in its own."""
    if y is not None:
        raise TypeError(
            "y= was given beside a state, which takes targets with their inputs alone: pass them "
            "to its update(x, y), and the state without y"
        )


def load(path: str | os.PathLike[str], network: nn.Module) -> RGPR:
    """The model that :meth:`RGPR.save` wrote.

    Files of rgpr 0.1 with ``residual="paper"`` load as well. Those with its default residual, which
    this version replaced, are refused: fit such a model again.

    Args:
        path: The file.
        network: A network of the same architecture. The saved weights are loaded into it, as
            with ``load_state_dict``, once everything else in the file has been checked.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged or not ours, or belongs to another network.
    """
    network = plain_module(network)
    # What is loaded must be usable outside of inference mode.
    with torch.inference_mode(False), complete(path):
        parts, weights = model_file.load(path, network)
        now = parts.extension
        model = RGPR(
            now.posterior,
            now.layers,
            now.likelihood.name,
            residual=parts.recipe,
            nan=now.nan,
            input=now.source,
        )
        model._become(parts)
    state = network.state_dict()  # with the versions of its modules, which some of them ask for
    state.update(weights)
    network.load_state_dict(state)
    device = network_dtype_device(network)[1]
    return model if device is None else model.to(device)


def layers(
    base: Any,
    example: Any,
    choice: LayerChoice = "auto",
    *,
    input: str | None = None,
    output: Output = None,
) -> LayerTable:
    """Every layer that runs in a network, which of them a model would read, and why; ``print`` it.

    Nothing is fitted: the network runs on a few rows, in evaluation mode.

    Args:
        base: What :class:`RGPR` takes.
        example: A batch of inputs, best of more than one row, or anything that :meth:`RGPR.fit`
            takes, of which the first batch is looked at.
        choice: What :class:`RGPR` would get as ``layers``.
        input: The same as of :class:`RGPR`.
        output: The same as of :class:`RGPR`.

    Example:
        >>> from torch import nn
        >>> network = nn.Sequential(nn.Conv1d(3, 8, 5), nn.ReLU(), nn.Flatten(), nn.Linear(96, 2))
        >>> print(layers(network, torch.randn(4, 3, 16)))
           name     kind     shape       channels    why
        *  input             (B, 3, 16)  axis 1: 3   always read: it carries the guarantee
           0        Conv1d   (B, 8, 12)  axis 1: 8   not read
        *  1        ReLU     (B, 8, 12)  axis 1: 8   read
           2        Flatten  (B, 96)     axis 1: 96  not read
        *  3:input  Linear   (B, 96)     axis 1: 96  read: what goes into it
           3        Linear   (B, 2)      axis 1: 2   makes the outputs
        * read: 3 of 6
    """
    model = RGPR(base, choice, input=input, output=output)
    network = model.posterior.network
    batches = inputs(as_batches(example, network), network, progress=False, description="")
    x = on_device(next(batches), network_dtype_device(network)[1])
    seen = model.posterior.look(x)
    return table_of(seen, model._plan().choose(x, seen))


def check(model: RGPR, *, seed: int = 0) -> Check:
    """Which of the theorem's assumptions a fitted classifier meets, and what follows for it.

    Args:
        model: The model.
        seed: Seed of the random directions in which the model is measured far away.
    """
    return check_assumptions(model._extension(), seed)
