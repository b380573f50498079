"""scikit-learn's own checks of our estimators, and what its users do with them."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_iris, make_friedman1, make_moons
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import rgpr
from rgpr.integrations.sklearn import RGPRClassifier, RGPRRegressor
from rgpr.integrations.sklearn.training import relu_network

pd = pytest.importorskip("pandas", reason="needs pandas, which the extra ray brings")

KINDS = (RGPRClassifier, RGPRRegressor)
SMALL: dict[str, Any] = {"hidden_layer_sizes": (16,), "epochs": 5, "random_state": 0}


@parametrize_with_checks([RGPRClassifier(), RGPRRegressor()])
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of the checks warn, of data that they made
        check(estimator)


@pytest.fixture(scope="module")
def iris() -> tuple[Any, np.ndarray]:
    """Four columns and three classes with names."""
    X, y = load_iris(return_X_y=True, as_frame=True)
    return X, np.array(["setosa", "versicolor", "virginica"])[y]


@pytest.fixture(scope="module")
def classifier(iris: tuple[Any, np.ndarray]) -> RGPRClassifier:
    """Not to be changed by a test."""
    return RGPRClassifier(random_state=0).fit(*iris)


@pytest.fixture(scope="module")
def regressor() -> RGPRRegressor:
    """Not to be changed by a test."""
    return RGPRRegressor(random_state=0).fit(*make_friedman1(400, random_state=0))


def data(kind: type[Any], n: int = 120) -> tuple[np.ndarray, np.ndarray]:
    return (
        make_moons(n, noise=0.2, random_state=0)
        if kind is RGPRClassifier
        else make_friedman1(n, random_state=0)
    )


# -- answers -----------------------------------------------------------------------------------


def test_classes_keep_their_names(iris: Any, classifier: RGPRClassifier) -> None:
    X, y = iris
    assert classifier.classes_.tolist() == ["setosa", "versicolor", "virginica"]
    assert classifier.score(X, y) > 0.9
    probabilities = classifier.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(1), 1)
    assert (classifier.classes_[probabilities.argmax(1)] == classifier.predict(X)).all()


def test_it_is_the_model(iris: Any, classifier: RGPRClassifier) -> None:
    x = torch.tensor(iris[0].to_numpy())
    with torch.no_grad():
        np.testing.assert_allclose(classifier.predict_proba(iris[0]), classifier.model_(x))
        np.testing.assert_allclose(classifier.score_samples(iris[0]), -classifier.model_.score(x))
    inside = classifier.model_.predict_set(x, 0.8)
    assert (classifier.predict_set(iris[0], 0.8) == inside.numpy()).all()


def test_far_away(iris: Any, classifier: RGPRClassifier, regressor: RGPRRegressor) -> None:
    X = iris[0]
    np.testing.assert_allclose(classifier.predict_proba(1e9 * X), 1 / 3, atol=1e-3)
    assert classifier.score_samples(10 * X).max() < classifier.score_samples(X).min()
    assert classifier.predict_set(1e9 * X).all()
    X, _ = make_friedman1(50, random_state=1)
    (low, high), (far_low, far_high) = map(regressor.predict_interval, (X, 1e3 * X))
    assert (far_high - far_low).min() > (high - low).max()


@pytest.mark.parametrize("coverage", [0.5, 0.9])
def test_promises_are_kept_on_average(coverage: float) -> None:
    """Over ten fits: the standard error of each is at most 0.08, of their mean 0.025."""
    sets, intervals = [], []
    for seed in range(10):
        X, y = make_moons(1200, noise=0.4, random_state=seed)
        found = RGPRClassifier(**{**SMALL, "random_state": seed}).fit(X[:200], y[:200])
        sets.append(found.predict_set(X[200:], coverage)[np.arange(1000), y[200:]].mean())
        X, y = make_friedman1(1200, noise=1.0, random_state=seed)
        found = RGPRRegressor(**{**SMALL, "random_state": seed}).fit(X[:200], y[:200])
        low, high = found.predict_interval(X[200:], coverage)
        intervals.append(((low <= y[200:]) & (y[200:] <= high)).mean())
    assert np.mean(sets) > coverage - 0.05
    assert abs(np.mean(intervals) - coverage) < 0.06


def test_several_numbers_at_once() -> None:
    X, y = make_friedman1(200, random_state=0)
    both = np.stack([y, 100 - 10 * y], axis=1)
    found = RGPRRegressor(random_state=0).fit(X, both)
    assert found.score(X, both) > 0.8
    low, high = found.predict_interval(X)
    assert low.shape == high.shape == found.predict(X).shape == (200, 2)
    assert list(found.predict_frame(X).filter(like="low")) == ["low_0", "low_1"]


def test_too_few_held_out_rows_hold_everything() -> None:
    X, y = data(RGPRRegressor, 20)
    found = RGPRRegressor(**SMALL).fit(X, y)
    with pytest.warns(UserWarning, match="takes 9 held-out rows and there were 4"):
        low, high = found.predict_interval(X)
    assert np.isinf(low).all()
    assert np.isinf(high).all()
    found.predict_interval(X, coverage=0.75)


# -- training ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides_and_torchs_is_left_alone(kind: type[Any]) -> None:
    X, y = data(kind)
    before = torch.get_rng_state()
    first, again = (kind(**SMALL).fit(X, y).score_samples(X) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    np.testing.assert_array_equal(first, again)
    other = kind(**{**SMALL, "random_state": 1}).fit(X, y).score_samples(X)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("kind", KINDS)
def test_units_of_columns_do_not_matter(kind: type[Any]) -> None:
    X, y = data(kind)
    scale, shift = np.geomspace(1e-6, 1e6, X.shape[1]), np.linspace(-3, 1e3, X.shape[1])
    moved = X * scale + shift
    found, other = kind(**SMALL).fit(X, y), kind(**SMALL).fit(moved, y)
    np.testing.assert_allclose(found.score_samples(X), other.score_samples(moved), atol=1e-5)
    if kind is RGPRRegressor:
        np.testing.assert_allclose(found.predict(X), other.predict(moved), rtol=1e-6)
    else:
        np.testing.assert_allclose(found.predict_proba(X), other.predict_proba(moved), atol=1e-6)


def test_units_of_targets_do_not_matter() -> None:
    X, y = data(RGPRRegressor)
    found, other = RGPRRegressor(**SMALL).fit(X, y), RGPRRegressor(**SMALL).fit(X, 1e4 + 50 * y)
    np.testing.assert_allclose(1e4 + 50 * found.predict(X), other.predict(X), rtol=1e-9)


def test_a_constant_column_and_a_constant_target() -> None:
    X, y = data(RGPRRegressor)
    X[:, 1] = 7.0
    assert np.isfinite(RGPRRegressor(**SMALL).fit(X, y).predict(X)).all()
    same = RGPRRegressor(**SMALL).fit(X, np.full(len(X), 3.0))
    np.testing.assert_allclose(same.predict(X), 3.0)


def test_it_trains_where_gradients_are_switched_off() -> None:
    X, y = data(RGPRClassifier)
    with torch.inference_mode():
        found = RGPRClassifier(**SMALL).fit(X, y)
    np.testing.assert_array_equal(
        found.predict_proba(X), RGPRClassifier(**SMALL).fit(X, y).predict_proba(X)
    )


def test_a_class_with_one_row_is_never_held_out(iris: Any) -> None:
    X, y = iris
    y = np.where(np.arange(len(y)) == 7, "alone", y)
    for seed in range(8):
        found = RGPRClassifier(**{**SMALL, "random_state": seed, "validation_fraction": 0.9})
        assert found.fit(X, y).predict_proba(X).shape == (150, 4)


# -- a network that is trained already -----------------------------------------------------------


def test_a_given_network_is_only_read(iris: Any, classifier: RGPRClassifier) -> None:
    X, y = iris
    network = copy.deepcopy(classifier.network_).float()
    before = copy.deepcopy(network.state_dict())
    with pytest.warns(UserWarning, match=r"trained before.*X_val="):
        found = RGPRClassifier(network, random_state=0).fit(X, y)
    assert found.network_ is network
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    with torch.no_grad():
        plain = network(torch.tensor(X.to_numpy()).float()).argmax(1)
    assert (found.predict(X) == found.classes_[plain]).all()


def test_rows_that_the_user_held_out(iris: Any, classifier: RGPRClassifier) -> None:
    X, y = iris
    held = {"X_val": X[::3], "y_val": y[::3]}
    found = RGPRClassifier(classifier.network_, validation_fraction=0).fit(X, y, **held)
    model = rgpr.RGPR(classifier.network_).fit(X.to_numpy(), found.classes_.searchsorted(y))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # these are training data
        model.calibrate(X[::3].to_numpy(), found.classes_.searchsorted(y[::3]))
    np.testing.assert_array_equal(
        found.predict_frame(X)["p_value"], model.predict(X.to_numpy()).p_value
    )
    regressor = RGPRRegressor(**SMALL).fit(X, X["sepal length (cm)"], X_val=X[:9], y_val=[1] * 9)
    assert regressor.calibration_ is not None
    assert regressor.calibration_.examples == 9


def test_a_network_of_other_classes_is_refused(iris: Any, classifier: RGPRClassifier) -> None:
    X, y = iris
    with pytest.raises(ValueError, match="3 classes apart and y has 2"):
        RGPRClassifier(classifier.network_).fit(X[:100], y[:100])


def test_one_logit_is_two_classes() -> None:
    X, y = data(RGPRClassifier)
    network = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    assert RGPRClassifier(network).fit(X, y).predict_proba(X).shape == (len(X), 2)


# -- frames, pipelines, searches -----------------------------------------------------------------


def test_frames(iris: Any, classifier: RGPRClassifier) -> None:
    X, _ = iris
    assert classifier.feature_names_in_.tolist() == list(X)
    with pytest.raises(ValueError, match="same order"):
        classifier.predict(X[list(X)[::-1]])
    rows = X.iloc[[120, 3]]
    frame = classifier.predict_frame(rows, coverage=0.8)
    assert frame.index.tolist() == [120, 3]
    assert frame["prediction"].tolist() == classifier.predict(rows).tolist()
    for i, label in enumerate(classifier.classes_):
        assert (frame[f"probabilities_{label}"] == classifier.predict_proba(rows)[:, i]).all()
        assert (frame[f"set_{label}"] == classifier.predict_set(rows, 0.8)[:, i]).all()
    assert (frame["score_samples"] == classifier.score_samples(rows)).all()
    assert ((frame["p_value"] > 0) & (frame["p_value"] <= 1)).all()
    assert not frame["flag"].any()
    far = classifier.predict_frame(100 * rows, alpha=0.1)
    assert far["flag"].tolist() == [True, True]
    assert (far["flag"] == (far["p_value"] <= 0.1)).all()
    with pytest.raises(ValueError, match="alpha=5; expected a share"):
        classifier.predict_frame(rows, alpha=5)
    with pytest.warns(UserWarning, match="alpha=0.001 takes 999 held-out rows .* no row can be"):
        assert not classifier.predict_frame(100 * rows, alpha=0.001)["flag"].any()


def test_frames_of_a_regression(regressor: RGPRRegressor) -> None:
    X, _ = make_friedman1(5, random_state=1)
    frame = regressor.predict_frame(X)
    assert list(frame) == ["prediction", "score_samples", "p_value", "flag", "low", "high"]
    assert (frame["prediction"] == regressor.predict(X)).all()
    assert (frame["low"] == regressor.predict_interval(X)[0]).all()
    without = RGPRRegressor(**SMALL, validation_fraction=0).fit(*data(RGPRRegressor))
    assert list(without.predict_frame(X)) == ["prediction", "score_samples"]


def test_pipelines_and_searches(iris: Any) -> None:
    X, y = iris
    line = make_pipeline(StandardScaler().set_output(transform="pandas"), RGPRClassifier(**SMALL))
    grid = {"rgprclassifier__hidden_layer_sizes": [(4,), (8, 8)], "rgprclassifier__epochs": [2, 9]}
    search = GridSearchCV(line, grid, cv=2, scoring="neg_log_loss").fit(X, y)
    assert search.best_params_["rgprclassifier__epochs"] == 9
    best = search.best_estimator_
    assert best[-1].feature_names_in_.tolist() == list(X)
    assert best.score_samples(X).shape == (150,)
    assert (cross_val_score(RGPRClassifier(**SMALL), X, y, cv=2) > 0.2).all()


# -- copies, pickles, files ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_pickle_predicts_the_same(kind: type[Any]) -> None:
    X, y = data(kind)
    found = kind(**SMALL).fit(X, y)
    size = len(pickle.dumps(found))
    expected = found.predict_frame(X)
    for other in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
        pd.testing.assert_frame_equal(other.predict_frame(X), expected)
        for module in other.model_.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks
        assert other.model_.posterior.network is other.network_
    assert len(pickle.dumps(found)) == size  # predicting leaves nothing behind


def test_a_compiled_model_is_pickled_without_its_graph() -> None:
    X, y = data(RGPRClassifier)
    found = RGPRClassifier(**SMALL).fit(X, y)
    size = len(pickle.dumps(found))
    found.model_.compile()
    assert len(pickle.dumps(found)) == size
    again = pickle.loads(pickle.dumps(found))
    assert again.model_._compiled is None
    # The graph rounds in another order.
    np.testing.assert_allclose(again.predict_proba(X), found.predict_proba(X), rtol=1e-12)


def test_a_clone_is_not_fitted(classifier: RGPRClassifier) -> None:
    given = RGPRClassifier(classifier.network_, epochs=3)
    other = clone(given)
    assert not hasattr(other, "model_")
    assert other.epochs == 3
    assert other.network is not given.network
    mine, theirs = given.network.state_dict(), other.network.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_other_processes(iris: Any, classifier: RGPRClassifier) -> None:
    from joblib import Parallel, delayed

    X, _ = iris
    (found,) = Parallel(n_jobs=2)([delayed(classifier.predict_proba)(X)])
    np.testing.assert_array_equal(found, classifier.predict_proba(X))


def test_a_pickle_of_another_version_warns() -> None:
    state = {**RGPRClassifier().__getstate__(), "_rgpr_version": "0.0.1"}
    with pytest.warns(UserWarning, match=r"pickled by rgpr 0\.0\.1"):
        RGPRClassifier().__setstate__(state)


def test_our_own_file(tmp_path: Path, iris: Any, classifier: RGPRClassifier) -> None:
    classifier.model_.save(tmp_path / "model.safetensors")
    model = rgpr.load(tmp_path / "model.safetensors", relu_network([4, 64, 64, 3]))
    np.testing.assert_array_equal(
        model.predict(iris[0]).probabilities, classifier.predict_proba(iris[0])
    )


def test_html(classifier: RGPRClassifier) -> None:
    given = RGPRClassifier(classifier.network_)
    for shown in (RGPRClassifier(), classifier, given, make_pipeline(StandardScaler(), given)):
        assert "RGPRClassifier" in shown._repr_html_()


# -- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epochs": 0}, "epochs=0; expected a whole number of 1 or more"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0; expected a positive number"),
        ({"weight_decay": float("nan")}, "weight_decay=nan"),
        ({"hidden_layer_sizes": (4, 0)}, r"hidden_layer_sizes=\(4, 0\); expected widths"),
        ({"validation_fraction": 1.0}, "validation_fraction=1.0; expected a share"),
        ({"network": "resnet"}, "network is a str"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        RGPRClassifier(**options).fit(*data(RGPRClassifier))


def test_data_that_cannot_be(iris: Any) -> None:
    X, y = iris
    with pytest.raises(ValueError, match="y_val is missing"):
        RGPRClassifier(**SMALL).fit(X, y, X_val=X)
    with pytest.raises(ValueError, match=r"y_val has the classes \['rose'\]"):
        RGPRClassifier(**SMALL).fit(X, y, X_val=X[:2], y_val=["setosa", "rose"])
    with pytest.raises(ValueError, match="of one class, 'setosa'"):
        RGPRClassifier(**SMALL).fit(X[:50], y[:50])
    without = RGPRClassifier(**SMALL, validation_fraction=0).fit(X, y)
    with pytest.raises(ValueError, match="no rows were held out"):
        without.predict_set(X)
    with pytest.raises(ValueError, match=r"coverage = 1\.5"):
        RGPRClassifier(**SMALL).fit(X, y).predict_set(X, 1.5)
