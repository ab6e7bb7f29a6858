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
_ALL = [family for module in _SOURCES for family in module.FAMILIES]
FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
if twice := sorted({family.name for family in _ALL if FAMILIES[family.name] is not family}):
    raise ValueError(f"families need names of their own, and these have more than one: {', '.join(twice)}")
