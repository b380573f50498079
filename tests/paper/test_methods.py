from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from laplace import Laplace
from torch.nn.functional import nll_loss

from references import search_prior_precision
from rgpr.metrics import accuracy, confidence
from rgpr_paper.context import Context
from rgpr_paper.methods import BASES, Contestants, contestants
from rgpr_paper.networks import ensemble


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    return Context(tmp_path_factory.mktemp("methods"), small=True, seeds=(0,))


@pytest.fixture(scope="module")
def competing(context: Context) -> Contestants:
    return contestants(context, "digits", 0)


@pytest.mark.parametrize("base", list(BASES))
def test_every_base_with_and_without_the_residual(competing: Contestants, base: str) -> None:
    x = torch.cat([x for x, _ in competing.test])
    y = competing.test.y
    assert y is not None
    plain, extended = competing.method(base), competing.method(f"{base}-RGPR-OOD")
    with torch.no_grad():
        p, q = plain.predict(x), extended.predict(x)
        far, far_extended = (m.predict(1e6 * x) for m in (plain, extended))
    assert accuracy(p, y) > 0.85
    assert accuracy(q, y) == pytest.approx(accuracy(p, y), abs=0.01)
    assert torch.equal(p, plain.predict(x))  # samples are the same at every call
    assert confidence(far_extended).mean() <= confidence(far).mean() + 1e-3
    assert confidence(far_extended).mean() < 0.25
    assert extended.tuning is not None
    assert competing.posterior(base) is competing.posterior(base)


def test_the_prior_precision_is_at_least_as_good_as_laplace_torchs(
    competing: Contestants,
) -> None:
    la: Any = Laplace(
        copy.deepcopy(competing.network),
        "classification",
        subset_of_weights="last_layer",
        hessian_structure="kron",
    )
    la.fit(competing.train)
    search_prior_precision(la, competing.validation, grid_size=3)
    competing.posterior("LLL")
    choice = competing.choices["LLL"]
    x = torch.cat([x for x, _ in competing.validation])
    assert competing.validation.y is not None
    p = la(x, pred_type="glm", link_approx="probit")
    theirs = float(nll_loss(p.log(), competing.validation.y))
    # Of this network, which is not sure of itself, laplace-torch takes the end of its grid.
    assert float(la.prior_precision) == pytest.approx(1e4)
    assert choice["extended"]
    assert choice["nll"] < theirs
    assert choice["equals_map"]


def test_the_choice_of_the_prior_precision_is_kept(competing: Contestants) -> None:
    posterior, choice = competing.posterior("LLL"), competing.choices["LLL"]
    with torch.no_grad():
        largest = max(float(posterior(x).variance.max()) for x, _ in competing.validation)
    assert choice["variance"] == pytest.approx(largest, rel=1e-5)
    assert choice["lowest"] <= choice["precision"] <= choice["highest"]
    assert choice["equals_map"] == (largest <= 1e-4)
    assert json.loads(json.dumps(choice)) == choice


def test_the_kinds_of_residual(competing: Contestants) -> None:
    fixed = competing.method("LLL-RGPR").model
    assert fixed is not None
    assert set(fixed.sigma2.tolist()) == {1e-10}
    assert competing.method("LLL").model is not None
    natural, noise = (competing.method(f"LLL-RGPR-OOD{kind}") for kind in ("-natural", ""))
    assert natural.tuning is not None
    assert noise.tuning is not None
    assert natural.tuning.sigma2 == noise.tuning.sigma2  # digits have no natural images
    with pytest.raises(ValueError, match="no base 'LLLL'"):
        competing.method("LLLL-RGPR")
    with pytest.raises(ValueError, match="no method 'LLL-RGPR-XY'"):
        competing.method("LLL-RGPR-XY")


def test_the_same_within_a_run(context: Context, competing: Contestants) -> None:
    assert contestants(context, "digits", 0) is competing
    assert competing.classes == 10
    assert "training" in competing.seconds
    rows = {tuple(row.tolist()) for row in competing.validation.x.flatten(1)}
    assert len(rows & {tuple(row.tolist()) for row in competing.test.x.flatten(1)}) <= 2


def test_ensembles_overlap(context: Context) -> None:
    """Those of seeds 0 and 1 share four members, read from the same checkpoints."""
    first, second = ensemble(context, "digits", 0), ensemble(context, "digits", 1)
    assert len(list((context.out / "checkpoints").glob("digits-fast-small-seed*"))) == 6
    for a, b in zip(first[1:], second[:-1], strict=True):
        states = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
        assert all(torch.equal(s, t) for s, t in states)
