"""Image classifiers of timm, by name and size of the images."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from ..entry import Entry, register
from ..samples import images


def _add(
    name: str, size: int, small: bool = False, excuses: dict[str, str] | None = None, **options: Any
) -> None:
    """Register a model by its name in ``timm.list_models()``.

    Args:
        name: The name.
        size: Height and width of the images.
        small: See :class:`Entry`.
        excuses: See :class:`Entry`.
        **options: Options of ``timm.create_model``.
    """
    build = partial(_by_name, name, options)
    register(Entry("timm", name, build, images(size), excuses=excuses or {}, small=small))


def _by_name(name: str, options: dict[str, Any], classes: int) -> nn.Module:
    import timm

    network: nn.Module = timm.create_model(name, num_classes=classes, **options)
    return network


_RUNTIME = {"onnx": "the network alone differs by as much, and float32 from float64 by 2e-4"}
_TWO_HEADS = {"certificate": "two heads are put together, and no Lipschitz constant is known"}
_CONVOLUTION = {"certificate": "a convolution makes the outputs, and no linear layer"}
_OWN_LINEAR = {"certificate": "the head is timm's own kind of nn.Linear, which may do anything"}
_TWO_TENSORS = {"widths": "a block returns two tensors: no layer declares the width of the first"}
_FOUR_TENSORS = {"widths": "a stage returns four resolutions: the one declared is not the one read"}

_add("resnet10t", 32)
_add("seresnet18", 32)
_add("res2net50_26w_4s", 32)
_add("regnetx_002", 32)
_add("repvgg_a0", 32)
_add("mobileone_s0", 32)
_add("nf_regnet_b0", 32)
_add("dla46_c", 32, excuses={**_CONVOLUTION, **_RUNTIME})
_add("hrnet_w18_small", 32, excuses=_FOUR_TENSORS)
_add("ese_vovnet19b_dw", 32)
_add("dpn48b", 32, excuses={**_CONVOLUTION, **_TWO_TENSORS})
_add("ghostnet_050", 32, excuses=_OWN_LINEAR)
_add("hardcorenas_a", 32, excuses=_OWN_LINEAR)
_add("lcnet_035", 32, excuses=_OWN_LINEAR)
_add("rexnet_100", 32)
_add("tf_efficientnet_b0", 32)
_add("mobilenetv4_conv_small_050", 32, excuses=_OWN_LINEAR)
_add("starnet_s050", 32, excuses=_OWN_LINEAR)
_add("repvit_m0_9", 32, excuses=_TWO_HEADS)
_add("convnext_atto", 32, small=True)
_add("convnextv2_atto", 32)
_add("mambaout_femto", 32)
_add("poolformer_s12", 32)
_add("edgenext_xx_small", 64)
_add("fastvit_t8", 64)
_add("efficientformerv2_s0", 64, excuses=_TWO_HEADS, img_size=64)
_add("efficientvit_b0", 64)
_add("mobilevit_xxs", 64)
_add("levit_128s", 64, excuses=_TWO_HEADS, img_size=64)
_add("vit_tiny_patch16_224", 64, img_size=64)
_add("deit_tiny_distilled_patch16_224", 64, excuses=_TWO_HEADS, img_size=64)
_add("cait_xxs24_224", 64, img_size=64, depth=6)
_add("xcit_nano_12_p16_224", 64)
_add("beit_base_patch16_224", 32, img_size=32, embed_dim=48, num_heads=3, depth=4)
_add("eva02_tiny_patch14_224", 56, img_size=56)
_add("tnt_s_patch16_224", 64, img_size=64, depth=4)
_add("pit_ti_224", 64, img_size=64)
_add("crossvit_tiny_240", 120, excuses=_TWO_HEADS, img_size=120, depth=[[1, 1, 0]] * 3)
_add("mixer_s32_224", 64, img_size=64)
_add("gmlp_ti16_224", 64, img_size=64)
_add("resmlp_12_224", 64, img_size=64)
_add("sequencer2d_s", 64, img_size=64, layers=[1, 1, 2, 1])
_add("pvt_v2_b0", 32)
_add("coat_lite_tiny", 32, img_size=32)
_add("swin_tiny_patch4_window7_224", 56, img_size=56, depths=(1, 1, 2, 1), embed_dim=24)
_add("tiny_vit_5m_224", 32)
_add("davit_tiny", 64, depths=(1, 1, 2, 1), embed_dims=(24, 48, 96, 192))
_add("focalnet_tiny_srf", 32)
_add("volo_d1_224", 64, excuses=_TWO_HEADS, img_size=64)
_add("coatnet_pico_rw_224", 32, img_size=32)
_add("hiera_tiny_224", 64, img_size=64, stages=(1, 1, 2, 1))
