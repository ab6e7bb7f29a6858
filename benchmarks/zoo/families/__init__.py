"""The families of the zoo by name."""

from benchmarks.zoo.families import (
    timm_nets,
    torchvision_nets,
    transformers_audio_vision,
    transformers_listed,
    transformers_text,
)
from benchmarks.zoo.families.family import Batch, Family

__all__ = ["FAMILIES", "Batch", "Family"]

_SOURCES = (timm_nets, torchvision_nets, transformers_text, transformers_audio_vision, transformers_listed)
FAMILIES: dict[str, Family] = {family.name: family for module in _SOURCES for family in module.FAMILIES}
