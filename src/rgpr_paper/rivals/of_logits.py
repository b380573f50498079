"""pytorch-ood's detectors that read logits."""

from __future__ import annotations

from rgpr.baselines._pytorch_ood import pytorch_ood

from .base import Bench, Fitted, Rival, register_rival


def _max_logit(bench: Bench) -> Fitted:
    return Fitted(pytorch_ood("MaxLogit")(None).predict_logits, "none")


def _kl_matching(bench: Bench) -> Fitted:
    detector = pytorch_ood("KLMatching")(None)
    detector.fit_logits(bench.validation.logits, bench.validation.y)
    return Fitted(detector.predict_logits, "templates of validation images")


register_rival(
    Rival(
        "MaxLogit",
        "Hendrycks et al. 2022",
        "pytorch-ood",
        "logits",
        trains=False,
        fit=_max_logit,
    )
)
register_rival(
    Rival(
        "KL matching",
        "Hendrycks et al. 2022",
        "pytorch-ood",
        "logits",
        trains=False,
        fit=_kl_matching,
        source="what pytorch-ood asks for",
    )
)
