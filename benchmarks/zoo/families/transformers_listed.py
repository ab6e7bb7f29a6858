"""Families of transformers that YAML files list: each a model, the settings of its configuration, and its inputs."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from benchmarks.zoo.families.family import Family, configured, image, padding, sound, tokens

_HOME = Path(__file__).parent / "transformers"
_LENGTH, _VOCABULARY, _IMAGE_TOKEN = 32, 1000, 990
Inputs = dict[str, Tensor]


def _ids(batch: int, length: int = _LENGTH, vocabulary: int = _VOCABULARY) -> Inputs:
    return {"input_ids": tokens(batch, length, vocabulary)}


def _text(batch: int, length: int = _LENGTH, vocabulary: int = _VOCABULARY) -> Inputs:
    return {**_ids(batch, length, vocabulary), "attention_mask": padding(batch, length)}


def _target(batch: int, vocabulary: int) -> Inputs:
    return {"decoder_input_ids": tokens(batch, 8, vocabulary)}


def _pixels(batch: int, size: int = 64) -> Inputs:
    return {"pixel_values": image(batch, size)}


def _both(batch: int) -> Inputs:
    return {**_text(batch, 16, _IMAGE_TOKEN), **_pixels(batch)}


def _boxes(batch: int, length: int) -> Inputs:
    corner, size = torch.randint(0, 500, (batch, length, 2)), torch.randint(1, 400, (batch, length, 2))
    return {"bbox": torch.cat([corner, corner + size], -1)}


def _video(batch: int, frames: int = 4) -> Inputs:
    return {"pixel_values": image(batch * frames, 32).unflatten(0, (batch, frames))}


def _past(batch: int) -> Inputs:
    values = torch.randn(batch, 43).cumsum(1)  # 32 steps with lags up to 3, and 8 to predict
    past = {"past_values": values[:, :35], "past_time_features": torch.rand(batch, 35, 1)}
    seen = {"past_observed_mask": torch.ones(batch, 35), "future_time_features": torch.rand(batch, 8, 1)}
    return {**past, **seen, "future_values": values[:, 35:]}


def _with_image_tokens(batch: int) -> Inputs:
    ids = tokens(batch, 24, 900)
    ids[:, 2:18] = _IMAGE_TOKEN  # one for each patch
    return {"input_ids": ids, **_pixels(batch)}


def _waves(batch: int) -> Inputs:
    return {"input_values": sound(batch, 4000)}


def _features(batch: int) -> Inputs:
    return {"input_features": torch.randn(batch, 64, 80)}


_INPUTS: dict[str, Callable[[int], Inputs]] = {
    "ids": _ids,
    "text": _text,
    "pair": lambda n: {**_text(n), "decoder_input_ids": tokens(n, 16, _VOCABULARY)},
    "page": lambda n: {**_text(n), **_boxes(n, _LENGTH)},
    "polygon": lambda n: {**_text(n), "bbox": torch.rand(n, _LENGTH, 8)},
    "past": _past,
    "channels": lambda n: {"past_values": torch.randn(n, 96, 3).cumsum(1)},
    "pixels": _pixels,
    "small_pixels": partial(_pixels, size=32),
    "video": _video,
    "waves": _waves,
    "mono": lambda n: {"input_values": sound(n, 3200).unsqueeze(1)},
    "features": _features,
    "pixels_and_ids": _both,
    "pixels_and_target": lambda n: {**_pixels(n), **_target(n, 900)},
    "with_image_tokens": _with_image_tokens,
    "for_tapas": lambda n: {**_text(n), "token_type_ids": torch.randint(0, 2, (n, _LENGTH, 7))},
    "for_vitpose": lambda n: {"pixel_values": image(n, 64)[..., :48].contiguous()},
    "for_imagegpt": lambda n: {"input_ids": torch.randint(0, 63, (n, 64))},
    "for_speech_to_text": lambda n: {**_features(n), **_target(n, 200)},
    "for_moonshine": lambda n: {**_waves(n), **_target(n, 200)},
    "for_univnet": lambda n: {"input_features": torch.randn(n, 16, 20), "noise_sequence": torch.randn(n, 16, 16)},
    "for_hifigan": lambda n: {"spectrogram": torch.randn(n, 16, 80)},
    "for_vits": lambda n: _ids(n, 16, 40),
    "for_clap_audio": lambda n: {"input_features": torch.randn(n, 1, 256, 64)},
    "for_siglip": lambda n: {**_ids(n, 16, _IMAGE_TOKEN), **_pixels(n)},
    "for_visual_bert": lambda n: {**_text(n, 16), "visual_embeds": torch.randn(n, 8, 32)},
    "for_lxmert": lambda n: {**_ids(n, 16), "visual_feats": torch.randn(n, 8, 32), "visual_pos": torch.rand(n, 8, 4)},
    "for_mgp_str": lambda n: {"pixel_values": image(n, 64)[:, :, :32].contiguous()},
    "for_layoutlmv3": lambda n: {**_both(n), **_boxes(n, 16)},
}


def _listed(path: Path) -> list[Family]:
    listed: dict[str, Any] = yaml.safe_load(path.read_text())
    return [
        Family(name, "transformers", f["kind"], partial(_build, f["model"], f["settings"]), _INPUTS[f["inputs"]])
        for name, f in listed.items()
    ]


def _build(cls: str, settings: dict[str, Any]) -> nn.Module:
    return configured(cls, {name: _value(value) for name, value in settings.items()})


def _value(value: Any) -> Any:  # noqa: ANN401
    """A setting; a mapping with the key ``config`` is a configuration of that class."""
    if not isinstance(value, dict) or "config" not in value:
        return value
    import transformers

    return getattr(transformers, value["config"])(**{k: v for k, v in value.items() if k != "config"})


FAMILIES = [family for path in sorted(_HOME.glob("*.yaml")) for family in _listed(path)]
