"""RGPR: a trained network or Bayesian network, extended by the ReLU-GP residual."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ._backend.arithmetic import ProbitScales, fused_probit
from ._backend.buffers import StableBuffers
from ._backend.precision import full_precision
from ._network.checks import check_input, check_n_samples, one_of
from ._network.layers import LayerChoice, check_layers
from ._network.running import network_dtype_device
from .answers import conformal
from .answers.calibration import Calibration, calibrate
from .answers.explanation import Explanation, explain
from .answers.limits import at_limit, far, finite_outputs, known, set_limit
from .answers.predictions import deviations, log_probabilities
from .answers.score import score
from .extension.fitting import fit
from .guarantee.certificate import Certificate, certify
from .posteriors import Posterior, as_posterior
from .posteriors.gaussian import Gaussian, standard_normal, symmetric_normal
from .posteriors.links import bridge, bridge_logits, monte_carlo, probit, twice_probit
from .residual.recipes import RESIDUALS, ResidualRecipe
from .residual.variance import SHARE, Residual
from .tuning.result import TuningResult
from .tuning.run import tune

__all__ = ["RGPR"]

T = TypeVar("T")
# Tensors that a fit or a calibration makes: there or not, and of whatever size.
_LEARNED = (
    "_given_onset",
    "_given_temperature",
    "_fit_keys",
    "_fit_count",
    "_references",
    "_label_scores",
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
        layers: Which representations the residual reads beside the input: ``"auto"`` for the
            hidden stages, names of modules, globs, or a function of (name, module) to bool.
        likelihood: ``"classification"`` or ``"regression"``; by default what ``base`` was
            fitted for, else classification.
        residual: ``"onset"`` (exactly zero at most data), ``"paper"`` or a
            :class:`rgpr.ResidualRecipe`: in which coordinates the distance from the data is
            measured, and how the representations become one variance.
        nan: What a row with a NaN gets: ``"propagate"`` (NaN, in that row alone) or ``"raise"``,
            which has to wait for the device at every call.

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

    def __init__(
        self,
        base: Any,
        layers: LayerChoice = "auto",
        likelihood: str | None = None,
        *,
        residual: str | ResidualRecipe = "onset",
        nan: str = "propagate",
    ) -> None:
        super().__init__()
        if not isinstance(residual, str | ResidualRecipe):
            raise TypeError(f"residual={residual!r}; expected a word or a rgpr.ResidualRecipe")
        if isinstance(residual, str):
            residual = RESIDUALS[one_of("residual", residual, tuple(RESIDUALS))]
        self.recipe = residual
        self.posterior = as_posterior(base)
        fitted_for = self.posterior.likelihood
        self.likelihood = one_of(
            "likelihood",
            likelihood or fitted_for or "classification",
            ("classification", "regression"),
        )
        if fitted_for not in (None, self.likelihood):
            raise ValueError(
                f"the base was fitted for {fitted_for}, so likelihood='{self.likelihood}' cannot "
                f"be; pass likelihood='{fitted_for}' or leave it out"
            )
        self.nan = one_of("nan", nan, ("propagate", "raise"))
        self._choice = layers
        check_layers(self.posterior.network, layers)
        self._layers: list[str] = []
        self._input_shape: torch.Size | None = None
        self.residual = None
        device = network_dtype_device(self.posterior.network)[1]
        one = torch.ones((), dtype=torch.float64, device=device)
        self.register_buffer("_temperature", one)
        for name in _LEARNED:
            self.register_buffer(name, None)

    # -- fitting ---------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def fit(self, train_loader: Iterable[Any], *, r: float = 1.0, progress: bool = True) -> RGPR:
        """Learn how far every representation usually is, in one pass over the training inputs.

        Also sets where the variance sets in and how fast it grows, from up to 512 training inputs
        that are drawn evenly from the pass: 98 % of inputs like them get none, and at twice the
        strangeness of the onset logits are divided by the root of seven. With
        ``residual="paper"`` it sets ``sigma2`` to equal shares of a variance of 0.1 at the 95 %
        quantile of 256 of them instead. The unit of a regression's variance is 0.1 times the
        variance of its outputs on these inputs. Either all of it succeeds or the model stays as
        it was.

        Args:
            train_loader: Yields ``(x, y)``, ``x`` or dicts; batches are moved to the network's
                device. Labels are looked at by prototypes alone, which take the network's own
                predictions where there are no class indices.
            r: Factor on the standard deviations: larger makes the residual flatter.
            progress: Show a progress bar where there is a terminal.

        Returns:
            The model itself.

        Raises:
            TypeError: Inputs are not floating point, or not of the network's dtype.
            ValueError: No batch, fewer than two inputs, inputs of differing shapes, or a value
                that is not finite; the message names the batch.
        """
        fitted = fit(
            self.posterior, self._choice, self.recipe, self.likelihood, train_loader, r, progress
        )
        self._layers, self._input_shape = fitted.layers, fitted.shape
        self.residual = fitted.residual
        for name in _LEARNED:
            setattr(self, name, None)
        self._fit_keys = fitted.keys
        self._fit_count = torch.tensor(fitted.count, device=self._device)
        self._temperature = torch.ones_like(self._temperature)
        self._given_temperature = self._temperature.clone()
        onset = fitted.residual.onset
        self._given_onset = None if onset is None else onset.clone()
        return self

    @property
    def layers(self) -> list[str]:
        """Names of the representations, ``"input"`` first."""
        self._fitted()
        return list(self._layers)

    @property
    def sigma2(self) -> Tensor:
        """Scale of each representation's kernel, ``(L,)``. Zero switches one off; settable.

        All zeros give the base's answers exactly. Setting it drops what :meth:`calibrate` found
        for sets and intervals, which belong to other scales; p-values stay.
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
                f"{len(self._layers)} layers {self._layers}"
            )
        if not bool((new.isfinite() & (new >= 0)).all()):
            raise ValueError(f"sigma2 = {new.tolist()} must be finite and not negative")
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

    def _as_given(self) -> tuple[Residual, Tensor]:
        """The residual and the temperature as the fit or the user set them.

        Sets and intervals are ranked by these. What :meth:`calibrate` chooses depends on the very
        data that it ranks.
        """
        residual = self._fitted()
        given = self._temperature if self._given_temperature is None else self._given_temperature
        return residual.with_onset(self._given_onset, torch.ones_like(residual.slope)), given

    def _load_from_state_dict(self, state_dict, prefix, *rest):  # type: ignore[no-untyped-def]
        for name in _LEARNED:  # there, or not, and of the size that they have in the state
            saved = state_dict.get(prefix + name)
            there = None if saved is None else torch.empty_like(saved, device=self._device)
            setattr(self, name, there)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @property
    def _device(self) -> torch.device:
        return self._temperature.device

    @torch.inference_mode(False)
    @torch.no_grad()
    def calibrate(
        self,
        val_loader: Iterable[Any],
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
                what is to be predicted.
            max_nll_increase: How much the mean negative log-likelihood of these data may rise
                above the base's.
            progress: Show a progress bar where there is a terminal.

        Returns:
            What was done; ``print`` it.

        Raises:
            RuntimeError: The model was not fitted.
            ValueError: No example, labels that do not fit the outputs, or a negative budget.
        """
        return calibrate(self, val_loader, max_nll_increase, progress)

    @torch.inference_mode(False)
    @torch.no_grad()
    def tune(
        self,
        val_loader: Iterable[Any],
        objective: str = "likelihood",
        ood: Iterable[Any] | None = None,
        ood_weight: float | None = None,
        *,
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
            val_loader: Yields ``(x, y)``. Held out from training for the first two objectives.
            objective: One of the three.
            ood: Outliers for ``"ood"``: a loader or generator of inputs. By default noise made
                from the validation inputs, see :func:`rgpr.noise.like_data`. A generator without
                a length is read for as many outliers as there are validation examples.
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
        return tune(
            self,
            val_loader,
            objective=objective,
            ood=ood,
            ood_weight=ood_weight,
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

    # -- probabilities ---------------------------------------------------------------------------

    def compile(self, **options: Any) -> None:
        """Compile predictions in place as one graph: the network, its posterior and the residual.

        Applies to plain calls, ``model(x)``; those with options, gradients of ``x``, autocast or
        an empty batch run as before, and so do all while parts of the network have hooks that came
        later. The first call takes as long as a compilation does, and so does the first one after
        the model was fitted, calibrated or moved. Let it end before other threads predict.
        Attributes of the network that are no tensors, such as ``eps``, are constants of the graph.
        ``torch.compile(model)`` works too, but cuts the graph at every layer that is read.

        Args:
            options: For ``torch.compile``, such as ``mode="max-autotune"``.

        Raises:
            RuntimeError: The model was not fitted.
            TypeError: The base predicts by random samples, or through another library's object.
        """
        from ._backend.compiled import CompiledCall  # it knows this module

        self._compiled_call_impl = CompiledCall(self, options)

    def forward(
        self,
        x: Tensor,
        *,
        link_approx: str = "probit",
        n_samples: int = 100,
        generator: torch.Generator | None = None,
        diagonal_output: bool = False,
        pred_type: str = "glm",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Predict, in one pass through the network.

        A row with an infinite entry gets the limit: the uniform distribution, or for regression
        an infinite variance around a NaN. So does a row so far away that the network itself
        overflows. A row with a NaN gets what ``nan`` says. No row touches another.

        Args:
            x: ``(B, ...)``, of the shape, dtype and device that the network takes.
            link_approx: ``"probit"``, ``"mc"`` or ``"bridge"``; for classification.
            n_samples: Number of samples for ``"mc"``. A multiple of the number of classes makes
                the confidence far away exactly ``1 / C``.
            generator: Source of the samples for ``"mc"``.
            diagonal_output: For regression, return variances instead of covariances.
            pred_type: Only ``"glm"``, which laplace-torch's calls often name; to predict by
                samples of weights, wrap a posterior that draws them.

        Returns:
            Classification: probabilities ``(B, C)`` in the dtype of ``x``, two columns for a
            network with one output.
            Regression: the mean ``(B, C)`` and the covariance ``(B, C, C)``, or variances
            ``(B, C)``, of the noise-free function; variances are float64.

        Raises:
            RuntimeError: The model was not fitted.
            TypeError: ``x`` has the wrong dtype.
            ValueError: ``x`` has the wrong shape or device, or a NaN with ``nan="raise"``.
        """
        one_of("link_approx", link_approx, ("probit", "mc", "bridge"))
        one_of("pred_type", pred_type, ("glm",))
        if self.likelihood == "classification" and link_approx == "mc":
            samples, limit = self._samples(x, n_samples, generator)
            mixed = monte_carlo(torch.where(limit[:, None], 0.0, samples))
            return set_limit(mixed, limit).to(x.dtype)
        return self._answer(x, *self._read(x, self.posterior), link_approx, diagonal_output)

    def _answer(
        self,
        x: Tensor,
        gaussian: Gaussian,
        u: Tensor,
        link_approx: str = "probit",
        diagonal_output: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """What :meth:`forward` returns, from what one pass through the network gave."""
        residual = self._fitted()
        with full_precision(x):
            gaussian = gaussian.with_mean(gaussian.mean.to(x.dtype))
            if self.likelihood == "classification" and link_approx == "probit":
                scales = ProbitScales(
                    sigma2=residual.sigma2,
                    onset=residual.onset,
                    slope=residual.slope,
                    typical=residual.typical,
                    share=SHARE,
                    temperature=self.temperature,
                    far=far(x.dtype),
                )
                at_once = fused_probit(gaussian.mean, gaussian.variance, u, scales)
                if at_once is not None:
                    return at_once
            v = residual(known(u, x.dtype))
            limit = at_limit(u, v, finite_outputs(gaussian), x.dtype)
            v = torch.where(limit, 0.0, v)
            if self.likelihood == "regression":
                return _regression(gaussian, v, limit, diagonal_output)
            if residual.onset is None:
                link = bridge if link_approx == "bridge" else probit
                return set_limit(link(gaussian, v, self.temperature), limit)
            beyond = v / residual.unit
            if link_approx == "bridge":
                logits = bridge_logits(gaussian, torch.zeros_like(v), self.temperature)
                flat = torch.softmax(logits * (1 + beyond[:, None]).rsqrt(), -1)
                return set_limit(flat.to(x.dtype), limit)
            return set_limit(twice_probit(gaussian, beyond, self.temperature), limit)

    def predictive_samples(
        self,
        x: Tensor,
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
            symmetric: For classification, spread the residual's noise evenly over the classes, as
                ``link_approx="mc"`` does: each sample has the same law, but they are not
                independent of each other. ``False`` for samples that are.
        """
        return self._samples(x, n_samples, generator, symmetric)[0]

    def variance(self, x: Tensor) -> Tensor:
        """The residual's variance ``v(x)``, ``(B,)`` in float64."""
        u = self._read(x, self.posterior.network)[1]
        v: Tensor = self._fitted()(known(u, x.dtype))
        return v

    def _samples(
        self, x: Tensor, n_samples: int, generator: torch.Generator | None, symmetric: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Samples with the residual's noise, and which rows are at the limit."""
        check_n_samples(n_samples)
        samples, u = self._read(x, lambda clean: self.posterior.sample(clean, n_samples, generator))
        v = self._fitted()(known(u, x.dtype))
        limit = at_limit(u, v, (samples.abs() < torch.inf).all(2).all(0), x.dtype)
        v = torch.where(limit, torch.inf, v)
        if self.likelihood == "classification" and symmetric:
            noise = symmetric_normal(n_samples, (len(x), samples.shape[2]), samples, generator)
        else:
            noise = standard_normal(tuple(samples.shape), samples, generator)
        # Zero times noise is exactly zero, so without variance these are the base's own samples.
        noise = v.sqrt()[:, None] * noise
        # The noise alone at the limit: infinity minus infinity would be NaN.
        samples = torch.where(limit[:, None], 0.0, samples) + noise
        if self.likelihood == "classification":
            samples = samples / self.temperature
        return samples, limit

    # -- how strange, and what follows -----------------------------------------------------------

    def score(self, x: Tensor) -> Tensor:
        """How strange each input is, ``(B,)`` in float64: higher is stranger.

        See :mod:`rgpr.answers.score` for the formula. It is fixed by :meth:`fit`: neither
        calibrating nor tuning changes it. Along every ray away from the data it grows without
        bound; a row at the limit (see :meth:`forward`) has an infinite score.
        """
        return self._score(x, *self._read(x, self.posterior))

    def _score(self, x: Tensor, gaussian: Gaussian, u: Tensor) -> Tensor:
        with full_precision(x):
            strangeness = self._fitted().strangeness(known(u, x.dtype))
            limit = at_limit(u, strangeness, finite_outputs(gaussian), x.dtype)
            return torch.where(limit, torch.inf, score(strangeness, gaussian.mean, self.likelihood))

    def _everything(self, x: Tensor, diagonal_output: bool = False) -> tuple[Tensor, ...]:
        """What a plain call returns, the score, and the p-value if there is one, from one pass."""
        gaussian, u = self._read(x, self.posterior)
        answer = self._answer(x, gaussian, u, diagonal_output=diagonal_output)
        strange = self._score(x, gaussian, u)
        answers = (answer,) if isinstance(answer, Tensor) else answer
        if self._references is None:
            return (*answers, strange)
        return (*answers, strange, conformal.p_values(strange, self._references))

    @torch.no_grad()
    def p_value(self, x: Tensor) -> Tensor:
        """The share of data like the validation data that is at least as strange, ``(B,)``.

        A conformal p-value: for inputs exchangeable with those that :meth:`calibrate` saw, it is at
        most ``alpha`` with a probability of at most ``alpha``, for every ``alpha`` and however few
        they were.

        Raises:
            RuntimeError: The model was not calibrated.
        """
        return conformal.p_values(self.score(x), self._reference_scores())

    @torch.no_grad()
    def flag(self, x: Tensor, alpha: float | None = None, *, fdr: float | None = None) -> Tensor:
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
        if not 0 < level < 1:
            raise ValueError(f"{name} = {level} must lie between 0 and 1: a share of inputs")
        if len(references) < conformal.references_for(level):
            raise ValueError(
                f"{name} = {level:g} is below 1/{len(references) + 1}, the smallest p-value that "
                f"{len(references)} references allow; calibrate with at least "
                f"{conformal.references_for(level)} examples, or use a larger {name}"
            )
        p = self.p_value(x)
        flagged = p <= level if fdr is None else conformal.false_discoveries(p, fdr)
        return flagged | p.isnan()

    @torch.no_grad()
    def predict_set(self, x: Tensor, coverage: float = 0.9) -> Tensor:
        """Sets of classes that hold the right one with this probability, ``(B, C)`` booleans.

        The promise is about inputs exchangeable with the labelled data of :meth:`calibrate`, on
        average over them. The most probable class is always in; far away every class is. See
        :mod:`rgpr.answers.conformal` for the conformal score and why.

        Raises:
            RuntimeError: The model was not calibrated with labels.
            ValueError: A regression, or a coverage that is no share.
        """
        if self.likelihood != "classification":
            raise ValueError("sets are of classes; this model is a regression: use model.interval")
        bound = self._bound(coverage)
        gaussian, u = self._read(x, self.posterior)
        log_p = log_probabilities(*self._as_given(), gaussian, u, x.dtype)
        inside = conformal.class_scores(log_p) <= bound
        # The most probable one, and everything where there is no answer to rank by.
        return inside | (log_p == log_p.amax(1, keepdim=True)) | log_p.isnan()

    @torch.no_grad()
    def interval(self, x: Tensor, coverage: float = 0.9) -> tuple[Tensor, Tensor]:
        """Bounds that hold the target with this probability, each ``(B, C)`` in float64.

        The promise is that of :meth:`predict_set`, for all outputs at once. The width is
        proportional to the predictive standard deviation, so it grows away from the data.

        Raises:
            RuntimeError: The model was not calibrated with targets.
            ValueError: A classification, or a coverage that is no share.
        """
        if self.likelihood != "regression":
            raise ValueError("intervals are of numbers; this model classifies: use predict_set")
        bound = self._bound(coverage)
        gaussian, u = self._read(x, self.posterior)
        deviation = deviations(self._as_given()[0], gaussian, u, x.dtype)
        limit = deviation.isinf()
        width = torch.where(limit, torch.inf, bound * deviation)  # also where the bound is zero
        mean = gaussian.mean.double()
        low, high = (torch.where(limit, 0.0, mean) + side * width for side in (-1, 1))
        return low, high

    @torch.no_grad()
    def explain(self, x: Tensor) -> Explanation:
        """Which representation made each input how strange; ``print`` it."""
        gaussian, u = self._read(x, self.posterior)
        answer = self._answer(x, gaussian, u)
        confidence = answer.amax(1).double() if isinstance(answer, Tensor) else None
        strange = self._score(x, gaussian, u)
        return explain(self.layers, self._fitted(), known(u, x.dtype), strange, confidence)

    def certify(self, eps: float = 0.05) -> Certificate:
        """A distance beyond which every input has a confidence of at most ``1 / C + eps``.

        The promise is about the probit, for every direction. It is the smaller of two radii: one
        rests on a rigorous upper bound of the network's Lipschitz constant, the other on the
        residual of the head's own input and holds at every depth; see
        :mod:`rgpr.guarantee.certificate`.

        Raises:
            TypeError: Neither can be had; the message names what is in the way of both.
            ValueError: Nothing to certify: regression, or a scale of zero.
        """
        return certify(self, eps)

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
        if not 0 < coverage < 1:
            raise ValueError(f"coverage = {coverage} must lie between 0 and 1: a probability")
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

    def _read(self, x: Tensor, run: Callable[[Tensor], T]) -> tuple[T, Tensor]:
        """``run(x)`` and, from the same pass through the network, ``u``: ``(B, L)``.

        ``run`` never sees a value that is not finite: such rows are zeros to it, and have
        ``u = inf``, or NaN if there is a NaN in them.
        """
        residual = self._fitted()
        check_input(x, self.posterior.network, self._input_shape)
        first = residual.unit_variance(0, x)
        if self.nan == "raise" and bool(first.isnan().any()):
            row = int(first.isnan().nonzero()[0])
            raise ValueError(
                f"row {row} of the input holds a NaN; clean it, or use nan='propagate' to get NaN "
                "for that row"
            )
        finite = first.detach().abs() < torch.inf  # half the launches of isfinite
        clean = torch.where(finite.reshape(-1, *[1] * (x.dim() - 1)), x, 0.0)
        result, columns = residual.read(self.posterior, self._layers, clean, run)
        u = torch.stack([first, *columns], dim=1)
        return result, torch.where(finite[:, None], u, first[:, None])

    # -- files -----------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write network weights, posterior and residual into one safetensors file, atomically.

        Raises:
            RuntimeError: The model was not fitted.
            TypeError: The posterior still needs the object it was made from.
        """
        from .saving.model_file import save  # it knows this module

        save(self, path)

    def extra_repr(self) -> str:
        layers = self._layers or self._choice
        return f"likelihood={self.likelihood!r}, layers={layers!r}"


def _regression(
    gaussian: Gaussian, v: Tensor, limit: Tensor, diagonal_output: bool
) -> tuple[Tensor, Tensor]:
    mean = torch.where((limit | v.isnan())[:, None], torch.nan, gaussian.mean)
    v = torch.where(limit, torch.inf, v)
    if diagonal_output:
        return mean, torch.where(limit[:, None], 0.0, gaussian.variance) + v[:, None]
    covariance = torch.where(limit[:, None, None], 0.0, gaussian.covariance)
    return mean, covariance + torch.diag_embed(v[:, None].expand_as(mean))
