"""RGPR: a trained network or Bayesian network, extended by the ReLU-GP residual."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .certificate import Certificate, certify
from .coordinates import RESIDUALS, ResidualRecipe
from .data import (
    check_input,
    check_n_samples,
    inputs_and_targets,
    network_dtype_device,
    on_device,
    one_of,
)
from .explanation import Explanation
from .fitting import fit
from .fused import fused_probit
from .gaussian import Gaussian, standard_normal, symmetric_normal
from .hooks import full_precision
from .posteriors import Posterior, as_posterior
from .predictive import bridge, calibrated, monte_carlo, probit
from .representations import LayerChoice, check_layers
from .residual import Residual
from .standardize import StableBuffers
from .tuning.result import TuningResult
from .tuning.run import tune

__all__ = ["RGPR"]

T = TypeVar("T")


class RGPR(StableBuffers):
    r"""Adds :math:`N(0, v(x) I)` to the outputs of ``base``: near zero at the data, cubic far away.

    Near the data the predictions stay those of ``base``; as an input is scaled away from it the
    confidence goes to ``1 / C``. The network is never changed: it is evaluated in evaluation mode
    and its own modes come back after every call.

    Args:
        base: An ``nn.Module`` (a point estimate) that returns logits or regression outputs, a
            fitted laplace-torch object, or any :class:`rgpr.Posterior`.
        layers: Which representations the residual reads beside the input: ``"auto"`` for the
            hidden stages, names of modules, globs, or a function of (name, module) to bool.
        likelihood: ``"classification"`` or ``"regression"``; by default what ``base`` was
            fitted for, else classification.
        residual: ``"paper"``, ``"adaptive"`` or a :class:`rgpr.coordinates.ResidualRecipe`: in
            which coordinates the distance from the data is measured.
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
    """

    posterior: Posterior
    residual: Residual | None
    _temperature: Tensor
    _calibration: Tensor | None
    _threshold: Tensor | None

    def __init__(
        self,
        base: Any,
        layers: LayerChoice = "auto",
        likelihood: str | None = None,
        *,
        residual: str | ResidualRecipe = "adaptive",
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
        self.register_buffer("_calibration", None)
        self.register_buffer("_threshold", None)

    # -- fitting ---------------------------------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def fit(self, train_loader: Iterable[Any], *, r: float = 1.0, progress: bool = True) -> RGPR:
        """Learn the moments of every representation in one pass over the training inputs.

        Also sets ``sigma2`` to harmless values: equal shares of a variance of 0.1 at the 95 %
        quantile of up to 256 training inputs, drawn evenly from the pass; for regression, of 0.1
        times the variance of the outputs on them. Either all of it succeeds or the model stays
        as it was.

        Args:
            train_loader: Yields ``(x, y)``, ``x`` or dicts; batches are moved to the network's
                device. Labels are looked at by prototypes alone, which take the network's own
                predictions where there are no class indices.
            r: Factor on the standard deviations, see :class:`rgpr.coordinates.Standardizer`.
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
        self._layers, self._input_shape, self.residual = fitted
        self.temperature = 1.0
        return self

    @property
    def layers(self) -> list[str]:
        """Names of the representations, ``"input"`` first."""
        self._fitted()
        return list(self._layers)

    @property
    def sigma2(self) -> Tensor:
        """Scale of each representation's kernel, ``(L,)``. Zero switches one off; settable.

        Setting it drops a calibration and a threshold, which belong to other scales.
        """
        return self._fitted().sigma2

    @sigma2.setter
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
        self._forget()

    @property
    def temperature(self) -> Tensor:
        """What goes into the final softmax is divided by it; 1 at first, settable.

        It changes how sharp probabilities are, but neither which class wins nor the limit far
        away, where what it divides goes to zero. Setting it drops a calibration and a threshold.
        """
        return self._temperature

    @temperature.setter
    def temperature(self, value: float | Tensor) -> None:
        number = float(value)
        if not 0 < number < torch.inf:
            raise ValueError(f"temperature = {number} must be positive and finite")
        self._temperature = torch.full_like(self._temperature, number)
        self._forget()

    @property
    def calibration(self) -> Tensor | None:
        """What :meth:`tune` multiplies the evidence for the winning class by, if it does; settable.

        See :func:`rgpr.predictive.calibrated`. Setting it drops a threshold.
        """
        return self._calibration

    @calibration.setter
    def calibration(self, value: float | Tensor | None) -> None:
        number = 1.0 if value is None else float(value)
        if not 0 < number < torch.inf:
            raise ValueError(f"calibration = {number} must be positive and finite, or None")
        self._forget()
        self._calibration = None if value is None else torch.full_like(self._temperature, number)

    def _forget(self) -> None:
        """What was fitted to predictions that have changed."""
        self._calibration = self._threshold = None

    def _load_from_state_dict(self, state_dict, prefix, *rest):  # type: ignore[no-untyped-def]
        for name in ("_calibration", "_threshold"):  # there, or not, as in the state
            there = prefix + name in state_dict
            setattr(self, name, torch.empty_like(self._temperature) if there else None)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    @torch.inference_mode(False)
    @torch.no_grad()
    def tune(
        self,
        val_loader: Iterable[Any],
        objective: str | None = None,
        ood: Iterable[Any] | None = None,
        ood_weight: float | None = None,
        *,
        link_approx: str = "probit",
        n_samples: int = 20,
        temperature: bool = False,
        calibrate: bool | None = None,
        max_nll_increase: float | None = None,
        max_ece_increase: float | None = None,
        noise: float | None = None,
        max_examples: int | None = 20_000,
        seed: int = 0,
        progress: bool = True,
    ) -> TuningResult:
        r"""Choose ``sigma2`` in seconds: one pass over the data, then never the network again.

        ``"likelihood"`` maximises the mean log-likelihood of validation data (the paper's
        :math:`L_\text{LL}`). ``"ood"`` adds ``ood_weight`` times the mean, over outliers, of the
        negative cross-entropy to the uniform distribution (:math:`L_\text{OOD}`; means instead of
        sums, so that the weight means the same whatever the sizes of the sets).
        ``"marginal-likelihood"`` is that of the Gaussian process, for up to a few thousand
        examples. All start from several scales and never end worse than they began, unless a
        calibration budget asks for it.

        Args:
            val_loader: Yields ``(x, y)``. Held out from training for the first two objectives.
            objective: One of the three; by default the likelihood, and ``"ood"`` for a
                classifier with ``residual="adaptive"``.
            ood: Outliers for ``"ood"``: a loader or generator of inputs. By default noise made
                from the validation inputs, see :func:`rgpr.noise.like_data`. A generator without
                a length is read for as many outliers as there are validation examples.
            ood_weight: The paper's lambda; 0.5 by default as there, 32 for a classifier with
                ``residual="adaptive"``, whose calibration makes up for it. With a budget, the
                largest that is tried, 100 unless given.
            link_approx: ``"probit"`` or ``"mc"``: what the likelihood is computed with.
            n_samples: Samples for each example with ``"mc"``, the same for every ``sigma2``.
            temperature: Tune the model's temperature too: it gives the data back the confidence
                that added variance takes from it.
            calibrate: For ``"ood"``, end with a calibration of the confidence on the validation
                data that keeps the ranking of the inputs: see
                :func:`rgpr.predictive.calibrated`. By default for ``residual="adaptive"``.
            max_nll_increase: A budget: the largest weight is chosen whose validation NLL is at
                most this much above the base's own.
            max_ece_increase: Likewise for the expected calibration error; 0.005 by default for
                ``residual="adaptive"``, whose largest weight is then 32; ``math.inf`` for none.
            noise: Regression: variance of the observations; found together with ``sigma2`` if
                not given.
            max_examples: At most so many examples of each set are kept, drawn evenly; beyond
                1 GiB they are thinned whatever this says.
            seed: Of everything random.
            progress: Show a progress bar where there is a terminal.

        Returns:
            What was done; ``print`` it. The model has the new ``sigma2`` (and temperature).

        Raises:
            RuntimeError: The model was not fitted.
            TypeError: ``"marginal-likelihood"`` over a base without covariances between inputs.
            ValueError: Options that do not fit together, targets that do not fit the outputs, or
                too many examples for ``"marginal-likelihood"``.
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
            calibrate=calibrate,
            max_nll_increase=max_nll_increase,
            max_ece_increase=max_ece_increase,
            noise=noise,
            max_examples=max_examples,
            seed=seed,
            progress=progress,
        )

    # -- prediction ------------------------------------------------------------------------------

    def compile(self, **options: Any) -> None:
        """Compile predictions in place as one graph: the network, its posterior and the residual.

        Applies to plain calls, ``model(x)``; those with options, gradients of ``x``, autocast or
        an empty batch run as before, and so do all while parts of the network have hooks that came
        later. The first call takes as long as a compilation does, and so does the first one after
        the model was fitted, tuned or moved. Let it end before other threads predict. Attributes
        of the network that are no tensors, such as ``eps``, are constants of the graph.
        ``torch.compile(model)`` works too, but cuts the graph at every layer that is read.

        Args:
            options: For ``torch.compile``, such as ``mode="max-autotune"``.

        Raises:
            RuntimeError: The model was not fitted.
            TypeError: The base predicts by random samples, or through another library's object.
        """
        from .compiled import CompiledCall  # it knows this module

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
            samples, limit, alone = self._samples(x, n_samples, generator)
            mixed = monte_carlo(torch.where(limit[:, None], 0.0, samples))
            if self.calibration is not None:
                mixed = calibrated(mixed, monte_carlo(alone), self.calibration, n_samples)
            return _set_limit(mixed, limit).to(x.dtype)
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
        with full_precision(x):
            gaussian.mean = gaussian.mean.to(x.dtype)
            if self.likelihood == "classification" and link_approx == "probit":
                numbers = (self.sigma2, self.temperature, self.calibration)
                at_once = fused_probit(gaussian.mean, gaussian.variance, u, *numbers, _far(x.dtype))
                if at_once is not None:
                    return at_once
            v = self._residual_variance(x, u)
            good = gaussian.mean.isfinite().all(1) & gaussian.variance.isfinite().all(1)
            limit = _at_limit(x, u, v, good)
            v = torch.where(limit, 0.0, v)
            if self.likelihood == "regression":
                return _regression(gaussian, v, limit, diagonal_output)
            link = probit if link_approx == "probit" else bridge
            if self.calibration is None:
                return _set_limit(link(gaussian, v, self.temperature), limit)
            gaussian.mean = gaussian.mean.double()
            base = link(gaussian, torch.zeros_like(v), self.temperature)
            # Nothing can be tuned for the bridge: its confidence is the probit's.
            probabilities = probit(gaussian, v, self.temperature)
            return _set_limit(calibrated(probabilities, base, self.calibration), limit).to(x.dtype)

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
        return self._residual_variance(x, self._read(x, self.posterior.network)[1])

    # -- decisions -------------------------------------------------------------------------------

    def explain(self, x: Tensor) -> Explanation:
        """Which representation contributed how much to ``v(x)``; ``print`` it."""
        with torch.no_grad():
            gaussian, u = self._read(x, self.posterior)
            answer = self._answer(x, gaussian, u)
            confidence = answer.amax(1).double() if isinstance(answer, Tensor) else None
            return Explanation(self.layers, self._added(x, u), confidence)

    @torch.inference_mode(False)
    @torch.no_grad()
    def set_threshold(
        self, val_loader: Iterable[Any], *, tpr: float = 0.95, progress: bool = True
    ) -> float:
        """Choose the confidence below which :meth:`flag` flags an input.

        Args:
            val_loader: Yields inputs like those that are to pass; labels are not looked at.
            tpr: The share of them that passes.
            progress: Show a progress bar where there is a terminal.

        Returns:
            The threshold; for regression, the largest variance that passes, negated.
        """
        if not 0 < tpr < 1:
            raise ValueError(f"tpr = {tpr} must lie between 0 and 1: the share that is to pass")
        device = network_dtype_device(self.posterior.network)[1]
        scores = []
        for batch, _ in inputs_and_targets(val_loader, progress=progress, description="threshold"):
            scores.append(self._score(on_device(batch, device)))
        ordered = torch.cat(scores).sort().values
        if len(ordered) == 0:
            raise ValueError("the loader gave only empty batches; there is nothing to choose from")
        # The largest threshold that lets the share pass: all that are equal to it do.
        self._threshold = ordered[int((1 - tpr) * len(ordered) + 1e-9)].clone()
        return float(self._threshold)

    @torch.no_grad()
    def flag(self, x: Tensor) -> Tensor:
        """Which inputs are unlike the training data, ``(B,)``: confidence below the threshold.

        Raises:
            RuntimeError: There is no threshold yet.
        """
        if self._threshold is None:
            raise RuntimeError(
                "there is no threshold yet: call model.set_threshold(val_loader, tpr=0.95) first"
            )
        score = self._score(x)
        return (score < self._threshold) | score.isnan()

    def _score(self, x: Tensor) -> Tensor:
        """Larger for inputs that are more like the training data."""
        if self.likelihood == "classification":
            confidence: Tensor = self(x).amax(1)
            return confidence.double()
        variance: Tensor = self(x, diagonal_output=True)[1]
        return -variance.amax(1)

    def certify(self, eps: float = 0.05) -> Certificate:
        """A distance beyond which every input has a confidence of at most ``1 / C + eps``.

        The promise is about the probit, for every direction, and rests on a rigorous upper bound
        of the network's Lipschitz constant; see :mod:`rgpr.certificate` for the proof.

        Raises:
            TypeError: Names the first part of the network that has no known bound.
            ValueError: Nothing to certify: regression, or a scale of zero.
        """
        return certify(self, eps)

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

    def _residual_variance(self, x: Tensor, u: Tensor) -> Tensor:
        """``v`` from ``u``, with infinity where a far-away input made a layer overflow."""
        return self._added(x, u).sum(1)

    def _added(self, x: Tensor, u: Tensor) -> Tensor:
        """What each representation adds, ``(B, L)``."""
        first = u[:, :1]
        known = torch.where((first > _far(x.dtype)) & u.isnan(), torch.inf, u)
        return torch.where(first.isnan(), torch.nan, self._fitted().contributions(known))

    def _samples(
        self, x: Tensor, n_samples: int, generator: torch.Generator | None, symmetric: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Samples with the residual's noise, rows at the limit, and the base's own samples."""
        check_n_samples(n_samples)
        samples, u = self._read(x, lambda clean: self.posterior.sample(clean, n_samples, generator))
        v = self._residual_variance(x, u)
        limit = _at_limit(x, u, v, samples.isfinite().all(2).all(0))
        v = torch.where(limit, torch.inf, v)
        if self.likelihood == "classification" and symmetric:
            noise = symmetric_normal(n_samples, (len(x), samples.shape[2]), samples, generator)
        else:
            noise = standard_normal(tuple(samples.shape), samples, generator)
        noise = v.sqrt()[:, None] * noise
        # The noise alone at the limit: infinity minus infinity would be NaN.
        samples = torch.where(limit[:, None], 0.0, samples)
        if self.likelihood == "classification":
            noise, samples = noise / self.temperature, samples / self.temperature
        # Zero times noise is exactly zero, so sigma2 = 0 gives the base's own samples.
        return samples + noise, limit, samples

    # -- files -----------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write network weights, posterior and residual into one safetensors file, atomically.

        Raises:
            RuntimeError: The model was not fitted.
            TypeError: The posterior still needs the object it was made from.
        """
        from .files import save  # it knows this module

        save(self, path)

    def extra_repr(self) -> str:
        layers = self._layers or self._choice
        return f"likelihood={self.likelihood!r}, layers={layers!r}"


def _far(dtype: torch.dtype) -> float:
    """The ``u`` of the input beyond which a network that overflows was plainly driven too far.

    A mean of |z|^3 / 3 of 1e12 is some ten thousand standard deviations in every coordinate;
    half precision overflows far earlier.
    """
    return 1e12 if torch.finfo(dtype).max > 1e30 else 1e6


def _at_limit(x: Tensor, u: Tensor, v: Tensor, good: Tensor) -> Tensor:
    """Rows to answer with the limit: infinite inputs, infinite variance, overflow far away.

    A network that gives NaN near its data is broken, and its NaN is shown, not covered.
    """
    first = u[:, 0]
    broken = ~good | ~u.isfinite().all(1)
    return first.isinf() | (good & v.isinf()) | (broken & (first > _far(x.dtype)))


def _set_limit(probabilities: Tensor, limit: Tensor) -> Tensor:
    return torch.where(limit[:, None], 1 / probabilities.shape[1], probabilities)


def _regression(
    gaussian: Gaussian, v: Tensor, limit: Tensor, diagonal_output: bool
) -> tuple[Tensor, Tensor]:
    mean = torch.where((limit | v.isnan())[:, None], torch.nan, gaussian.mean)
    v = torch.where(limit, torch.inf, v)
    if diagonal_output:
        return mean, torch.where(limit[:, None], 0.0, gaussian.variance) + v[:, None]
    covariance = torch.where(limit[:, None, None], 0.0, gaussian.covariance)
    return mean, covariance + torch.diag_embed(v[:, None].expand_as(mean))
