"""The families of the zoo by name."""

from benchmarks.zoo.families import timm_nets, torchvision_nets, transformers_audio_vision, transformers_text
from benchmarks.zoo.families.family import Batch, Family

__all__ = ["FAMILIES", "Batch", "Family"]

FAMILIES: dict[str, Family] = {
    family.name: family
    for module in (timm_nets, torchvision_nets, transformers_text, transformers_audio_vision)
    for family in module.FAMILIES
}
