from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rgpr.cli import main
from rgpr_paper.experiments import uci
from rgpr_paper.regression import fitted_laplace, trained_regressor
from rgpr_paper.units import gaps, read_units


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uci")
    assert main(["paper", "run", "uci", "--small", "--out", str(folder)]) == 0
    return folder


def test_error_bars_of_every_base(out: Path) -> None:
    units = read_units(out / "uci")
    assert [unit.name for unit in units] == ["made-trial0", "made-trial1"]
    for unit in units:
        found = unit.result["methods"]
        assert len(found) == 2 * len((*uci.BASES, *uci.BEYOND))
        for base in (*uci.BASES, *uci.BEYOND):
            plain, extended = found[base], found[uci._extended(base)]
            assert extended["rmse"] == pytest.approx(plain["rmse"], rel=1e-5)
            assert plain["inliers"] <= extended["inliers"] < plain["inliers"] + 0.04
            # The input's kernel alone: sqrt(0.001 / 3 * mean |2000 z|^3), about 2000.
            assert extended["outliers"] > 1500
    page = (out / "uci" / "uci.md").read_text()
    assert "| KFL-RGPR, fitted noise |" in page
    assert "at least twice as long" in page


def test_the_far_input_kernel_alone_is_what_the_paper_printed(out: Path) -> None:
    """SVGP has no hidden layers: its outliers are the kernel's, 1932 in the paper for 8 inputs."""
    for unit in read_units(out / "uci"):
        z = torch.randn(1000, 4, generator=torch.Generator().manual_seed(unit.result["trial"]))
        expected = (1e-3 / 3 * (2000 * z).abs().pow(3).mean(1)).sqrt().mean()
        # Up to the moments of the training data, which are those of one sample.
        found = unit.result["methods"]["SVGP-RGPR"]["outliers"]
        assert found == pytest.approx(float(expected), rel=0.02)


def test_real_sets_have_ten_trials_and_gaps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["paper", "run", "uci", "--data", str(tmp_path), "--out", str(tmp_path / "o")]) == 1
    missing = gaps(tmp_path / "o" / "uci")
    assert len(missing) == 4
    assert missing[0].startswith(
        "housing-trial0 and 9 more: UCI housing is missing. Get it by `curl"
    )
    assert "uci, wine-red-trial0: UCI wine-red is missing: looked for" in capsys.readouterr().err


def test_the_evidence_is_the_largest_around(out: Path) -> None:
    x, y = uci._made()
    la = fitted_laplace(trained_regressor(x, y, seed=0, epochs=20), x, y, "last_layer")
    precision, noise = la.prior_precision.clone(), torch.as_tensor(la.sigma_noise).clone()
    best = float(la.log_marginal_likelihood(precision, noise))
    for factors in ((0.7, 1.0), (1.4, 1.0), (1.0, 0.8), (1.0, 1.25)):
        around = float(la.log_marginal_likelihood(factors[0] * precision, factors[1] * noise))
        assert around < best + 1e-3
