"""Families of transformers that hear and see: speech, classification, segmentation, detection, two modes at once."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.zoo.families.family import Batch, Family, configured, image, padding, sound, tokens

_SIZES = {"hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 384}
_WAVES = {**_SIZES, "vocab_size": 32, "conv_dim": (64,) * 4, "conv_stride": (5, 4, 4, 2), "conv_kernel": (10, 8, 4, 2)}
_WAVES |= {"num_feat_extract_layers": 4, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
_WHISPER = {
    "vocab_size": 1000,
    "d_model": 192,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 384,
    "decoder_ffn_dim": 384,
    "max_source_positions": 100,
    "max_target_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "use_cache": False,
}
_STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 96]}
_VIT = {**_SIZES, "image_size": 96, "patch_size": 16}
_DETR = {"d_model": 96, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 192, "decoder_ffn_dim": 192}
_DETR |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 20}


def _detr() -> nn.Module:
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    settings = {**_DETR, "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone_config": backbone}
    return transformers.DetrForObjectDetection(transformers.DetrConfig(**settings))


def _clip() -> nn.Module:
    import transformers

    text = {**_SIZES, "vocab_size": 1000, "max_position_embeddings": 32, "eos_token_id": 999, "pad_token_id": 0}
    vision = {**_SIZES, "image_size": 96, "patch_size": 16}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=64)
    return transformers.CLIPModel(config)


def _pixels(batch: int, size: int = 96) -> dict[str, Tensor]:
    return {"pixel_values": image(batch, size)}


def _waves(batch: int) -> dict[str, Tensor]:
    return {"input_values": sound(batch, 8000)}


def _spectrum(batch: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(batch, 80, 200), "decoder_input_ids": tokens(batch, 12, 1000)}


def _image_and_text(batch: int) -> dict[str, Tensor]:
    return {"input_ids": tokens(batch, 16, 1000), **_pixels(batch), "attention_mask": padding(batch, 16)}


def _series(batch: int) -> dict[str, Tensor]:
    return {"past_values": torch.randn(batch, 96, 3).cumsum(1)}


# Name, kind, how to build it, and its inputs.
_NETS: list[tuple[str, str, Callable[[], nn.Module], Callable[[int], Batch]]] = [
    ("wav2vec2", "audio", partial(configured, "Wav2Vec2ForCTC", _WAVES), _waves),
    ("hubert", "audio", partial(configured, "HubertModel", _WAVES), _waves),
    ("whisper", "audio", partial(configured, "WhisperForConditionalGeneration", _WHISPER), _spectrum),
    (
        "audio_spectrogram",
        "audio",
        partial(configured, "ASTForAudioClassification", {**_SIZES, "max_length": 96, "num_mel_bins": 64}),
        lambda batch: {"input_values": torch.randn(batch, 96, 64)},
    ),
    ("vit", "vision transformer", partial(configured, "ViTForImageClassification", _VIT), _pixels),
    ("dinov2", "vision transformer", partial(configured, "Dinov2Model", _VIT), _pixels),
    ("convnext_v2", "depthwise cnn", partial(configured, "ConvNextV2Model", {**_STAGES}), _pixels),
    (
        "segformer",
        "segmentation",
        partial(
            configured,
            "SegformerForSemanticSegmentation",
            {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 64, 96], "decoder_hidden_size": 64},
        ),
        partial(_pixels, size=128),
    ),
    (
        "dpt",
        "segmentation",
        partial(
            configured,
            "DPTForSemanticSegmentation",
            {
                **_VIT,
                "num_hidden_layers": 4,
                "backbone_out_indices": [0, 1, 2, 3],
                "neck_hidden_sizes": [24, 32, 48, 64],
                "fusion_hidden_size": 32,
                "is_hybrid": False,
            },
        ),
        _pixels,
    ),
    (
        "yolos",
        "detection",
        partial(configured, "YolosForObjectDetection", {**_SIZES, "image_size": [96, 96], "num_detection_tokens": 20}),
        _pixels,
    ),
    ("detr", "detection", _detr, partial(_pixels, size=128)),
    ("clip", "two modes", _clip, _image_and_text),
    (
        "patchtst",
        "time series",
        partial(
            configured,
            "PatchTSTForPrediction",
            {
                "num_input_channels": 3,
                "context_length": 96,
                "patch_length": 8,
                "patch_stride": 8,
                "d_model": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "prediction_length": 24,
            },
        ),
        _series,
    ),
]
FAMILIES = [Family(name, "transformers", kind, build, inputs) for name, kind, build, inputs in _NETS]
