"""pytorch-ood's neuron activation coverage, which needs gradients and so runs on images."""

from __future__ import annotations

from torch import Tensor

from rgpr._network.representation import parse_layer

from .base import Bench, Fitted, Rival, pytorch_ood, register_rival


def _coverage(bench: Bench) -> Fitted:
    model = bench.competing.method("LLL-RGPR-onset").model
    assert model is not None
    network = bench.competing.network
    names = [parse_layer(name)[0] for name in model.layers[1:]]
    layers = [network.get_submodule(name) for name in names]
    detector = pytorch_ood("NACUE")(network, layers, m_bins=50, alpha=100.0, o_star=50)
    detector.fit(bench.competing.train)

    def score(x: Tensor) -> Tensor:
        scores: Tensor = detector.predict(x)
        return scores

    setting = f"50 bins, alpha 100, O* 50: pytorch-ood's defaults; layers {', '.join(names)}"
    return Fitted(score, setting)


register_rival(
    Rival("NAC", "Liu et al. 2024", "pytorch-ood", "images", trains=False, fit=_coverage)
)
