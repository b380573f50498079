from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rgpr.metrics import accuracy, auprc, auroc, brier, confidence, ece, fpr95, nll


def case(seed: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(200, classes, generator=generator, dtype=torch.float64)
    return logits.softmax(-1), torch.randint(classes, (200,), generator=generator)


@given(st.integers(0, 1000), st.integers(2, 12))
def test_against_scikit_learn_and_torchmetrics(seed: int, classes: int) -> None:
    from sklearn.metrics import accuracy_score, brier_score_loss, log_loss
    from torchmetrics.functional.classification import multiclass_calibration_error

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


def scores(seed: int, n: int, m: int, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores in few steps, so that many tie."""
    generator = torch.Generator().manual_seed(seed)
    inside = torch.randn(n, generator=generator) + 1
    outside = torch.randn(m, generator=generator)
    return (steps * inside).round() / steps, (steps * outside).round() / steps


@given(st.integers(0, 1000), st.integers(1, 70), st.integers(1, 70), st.sampled_from([1, 3, 10**6]))
def test_detection_against_scikit_learn_and_counting(seed: int, n: int, m: int, steps: int) -> None:
    from sklearn.metrics import average_precision_score, roc_auc_score

    inside, outside = scores(seed, n, m, steps)
    labels = torch.cat([torch.ones(n), torch.zeros(m)])
    assert auroc(inside, outside) == pytest.approx(
        roc_auc_score(labels.numpy(), torch.cat([inside, outside]).numpy())
    )
    assert auprc(inside, outside) == pytest.approx(
        average_precision_score(labels.numpy(), torch.cat([inside, outside]).numpy())
    )
    pairs = [float(a > b) + 0.5 * float(a == b) for a in inside for b in outside]
    assert auroc(inside, outside) == pytest.approx(sum(pairs) / len(pairs))
    # Every threshold that 95 % of the data pass, in whole numbers; the fewest outliers that do.
    enough = [t for t in inside if 100 * int((inside >= t).sum()) >= 95 * n]
    assert fpr95(inside, outside) == min(int((outside >= t).sum()) for t in enough) / m


def test_detection_at_its_ends() -> None:
    low, high = torch.arange(5.0), torch.arange(5.0) + 10
    assert (fpr95(high, low), auroc(high, low)) == (0, 1)
    assert (fpr95(low, high), auroc(low, high)) == (1, 0)
    same = torch.ones(4)
    assert (fpr95(same, same), auroc(same, same)) == (1, 0.5)
    assert (auprc(high, low), auprc(same, same[:1])) == (1, 0.8)
    infinite = torch.tensor([-torch.inf, 0.0])
    assert auroc(low + 1, infinite) == 1
    # 1 of 20 may be left below, and 0 of 19.
    twenty = torch.arange(20.0)
    assert fpr95(twenty, torch.tensor([0.5])) == 0
    assert fpr95(twenty[:19], torch.tensor([0.5])) == 1


def test_wrong_scores_are_refused() -> None:
    good = torch.ones(3)
    for measure in (fpr95, auroc, auprc):
        with pytest.raises(ValueError, match=r"in_scores have shape \(3, 1\)"):
            measure(good[:, None], good)
        with pytest.raises(ValueError, match=r"out_scores have shape \(0,\)"):
            measure(good, good[:0])
        with pytest.raises(ValueError, match="out_scores hold a NaN at 1"):
            measure(good, torch.tensor([0.0, torch.nan]))
