from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss
from torchmetrics.functional.classification import multiclass_calibration_error

from rgpr.metrics import accuracy, brier, confidence, ece, nll


def case(seed: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(200, classes, generator=generator, dtype=torch.float64)
    return logits.softmax(-1), torch.randint(classes, (200,), generator=generator)


@given(st.integers(0, 1000), st.integers(2, 12))
def test_against_scikit_learn_and_torchmetrics(seed: int, classes: int) -> None:
    p, y = case(seed, classes)
    labels = list(range(classes))
    assert accuracy(p, y) == pytest.approx(accuracy_score(y, p.argmax(1)))
    assert nll(p, y) == pytest.approx(log_loss(y, p.numpy(), labels=labels))
    assert brier(p, y) == pytest.approx(
        brier_score_loss(y, p.numpy(), labels=labels, scale_by_half=False)
    )
    expected = multiclass_calibration_error(p.float(), y, classes, n_bins=15, norm="l1")
    assert ece(p, y) == pytest.approx(float(expected), abs=1e-5)
    assert torch.equal(confidence(p), p.max(1).values)


def test_certain_and_right_is_perfect() -> None:
    p, y = torch.eye(3), torch.arange(3)
    assert (accuracy(p, y), ece(p, y), nll(p, y), brier(p, y)) == (1, 0, 0, 0)


def test_wrong_input_is_refused() -> None:
    p, y = case(0, 3)
    with pytest.raises(ValueError, match="look like logits"):
        ece(p.log(), y)
    with pytest.raises(ValueError, match=r"targets have shape \(199,\)"):
        accuracy(p, y[1:])
    with pytest.raises(ValueError, match=r"shape \(200,\)"):
        confidence(p[:, 0])
    p[7] = torch.nan
    with pytest.raises(ValueError, match="row 7 holds a NaN"):
        accuracy(p, y)


def test_half_precision_is_welcome() -> None:
    p, y = case(0, 10)
    for dtype in (torch.bfloat16, torch.float16):
        assert ece(p.to(dtype), y) == pytest.approx(ece(p, y), abs=0.02)
