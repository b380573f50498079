"""Classifiers of Hugging Face transformers, from small configurations with random weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ..entry import Entry, register
from ..samples import Samples, images, signals, tokens

_ORDER = {"scrambled": "the mean over words does not depend on their order"}


def _add(
    name: str,
    data: Callable[[], Samples],
    embed: str = "",
    small: bool = False,
    excuses: dict[str, str] | None = None,
    **config: Any,
) -> None:
    """Register ``NAMEForSequenceClassification`` or the like, with ``NAMEConfig``.

    Args:
        name: The class.
        data: The data that it is trained on.
        embed: For token ids, the name of the module that makes vectors of them.
        small: See :class:`Entry`.
        excuses: See :class:`Entry`.
        **config: Arguments of the configuration.
    """
    if embed:
        excuses = {**_ORDER, **(excuses or {})}
    class_, _, task = name.rpartition("For")
    build = partial(_from_config, class_, task, config)
    options = {"input": embed} if embed else {}
    register(Entry("transformers", name, build, data, options, excuses=excuses or {}, small=small))


def _from_config(class_: str, task: str, config: dict[str, Any], classes: int) -> nn.Module:
    import transformers

    configuration = getattr(transformers, f"{class_}Config")(num_labels=classes, **config)
    network: nn.Module = getattr(transformers, f"{class_}For{task}")(configuration)
    return network


_HIDDEN: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "intermediate_size": 96,
}
_STAGES: dict[str, Any] = {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 2, 1]}
_WINDOWS: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 24,
    "depths": [1, 1, 2],
    "num_heads": [2, 2, 4],
    "window_size": 4,
}

_add("ResNetForImageClassification", images(32), embedding_size=16, layer_type="basic", **_STAGES)
_add("RegNetForImageClassification", images(32), embedding_size=16, groups_width=8, **_STAGES)
_add("ConvNextForImageClassification", images(32), **_STAGES)
_add("ConvNextV2ForImageClassification", images(32), **_STAGES)
_add("MobileNetV1ForImageClassification", images(32), depth_multiplier=0.25)
_add("MobileNetV2ForImageClassification", images(32), depth_multiplier=0.35)
_add(
    "MobileViTForImageClassification",
    images(64),
    image_size=64,
    hidden_sizes=[24, 32, 40],
    neck_hidden_sizes=[8, 12, 16, 24, 32, 40, 64],
    num_attention_heads=2,
)
_add(
    "EfficientNetForImageClassification",
    images(32),
    image_size=32,
    width_coefficient=0.5,
    depth_coefficient=0.5,
    hidden_dim=640,
)
_add(
    "ViTForImageClassification",
    images(32, keyword="pixel_values"),
    image_size=32,
    patch_size=8,
    **_HIDDEN,
)
_add("DeiTForImageClassification", images(32), image_size=32, patch_size=8, **_HIDDEN)
_add("BeitForImageClassification", images(32), image_size=32, patch_size=8, **_HIDDEN)
_add(
    "Dinov2ForImageClassification",
    images(32),
    image_size=32,
    patch_size=8,
    hidden_size=48,
    num_hidden_layers=4,
    num_attention_heads=3,
)
_add("SwinForImageClassification", images(32), small=True, **_WINDOWS)
_add("Swinv2ForImageClassification", images(32), **_WINDOWS)
_add("PoolFormerForImageClassification", images(32), **_STAGES)
_add(
    "PvtV2ForImageClassification",
    images(32),
    image_size=32,
    hidden_sizes=[16, 24, 32, 48],
    depths=[1, 1, 1, 1],
    num_attention_heads=[1, 1, 2, 2],
)
_add(
    "SegformerForImageClassification",
    images(32),
    hidden_sizes=[16, 24, 32, 48],
    depths=[1, 1, 1, 1],
    num_attention_heads=[1, 1, 2, 2],
)
_add(
    "Wav2Vec2ForSequenceClassification",
    signals(400),
    conv_dim=[16, 16, 16],
    conv_stride=[4, 2, 2],
    conv_kernel=[8, 3, 3],
    num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=2,
    classifier_proj_size=32,
    **_HIDDEN,
)
_add(
    "HubertForSequenceClassification",
    signals(400),
    conv_dim=[16, 16, 16],
    conv_stride=[4, 2, 2],
    conv_kernel=[8, 3, 3],
    num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=2,
    classifier_proj_size=32,
    **_HIDDEN,
)
_add(
    "BertForSequenceClassification",
    tokens(),
    "bert.embeddings.word_embeddings",
    small=True,
    vocab_size=18,
    **_HIDDEN,
)
_add(
    "RobertaForSequenceClassification",
    tokens(),
    "roberta.embeddings.word_embeddings",
    vocab_size=18,
    **_HIDDEN,
)
_add(
    "ElectraForSequenceClassification",
    tokens(),
    "electra.embeddings.word_embeddings",
    vocab_size=18,
    embedding_size=24,
    **_HIDDEN,
)
_add(
    "AlbertForSequenceClassification",
    tokens(),
    "albert.embeddings.word_embeddings",
    vocab_size=18,
    embedding_size=24,
    **_HIDDEN,
)
_add(
    "DistilBertForSequenceClassification",
    tokens(),
    "distilbert.embeddings.word_embeddings",
    vocab_size=18,
    dim=48,
    n_layers=4,
    n_heads=3,
    hidden_dim=96,
)
_add(
    "GPT2ForSequenceClassification",
    tokens(),
    "transformer.wte",
    vocab_size=18,
    n_embd=48,
    n_layer=4,
    n_head=3,
    n_positions=32,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=1,
)
_add(
    "LlamaForSequenceClassification",
    tokens(),
    "model.embed_tokens",
    vocab_size=18,
    pad_token_id=0,
    **_HIDDEN,
)
