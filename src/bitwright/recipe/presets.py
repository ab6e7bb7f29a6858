"""Presets: recipes under familiar names. W4A8 means 4-bit weights and 8-bit activations.

``bits`` leaves everything else to the backend, so a preset works with any backend that supports those bits; presets
that the CPU runtimes do not support name a backend that does. Below 8 bits the full range of a tensor depends too much
on its largest value. Activations get the range of least error, weights the one that also bounds the resulting bias, and
``bw.calibrate`` corrects what is left, by the steps under ``correct``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A recipe with a name and a title."""

    name: str
    title: str
    recipe: Mapping[str, Any] = field(default_factory=dict)


def _integers(weight: int, activation: int, **more: Any) -> dict[str, Any]:
    seen = {"bits": activation} if activation >= 8 else {"bits": activation, "observer": "MSEObserver"}
    whole = {**_weights(weight), "activation": seen, **more}
    return whole | {"correct": ["equalize", *whole["correct"]]} if "correct" in whole else whole


def _weights(bits: int) -> dict[str, Any]:
    if bits >= 8:
        return {"weight": {"bits": bits}, "activation": "float"}
    weight = {"bits": bits, "observer": "BoundedMSEObserver"}
    return {"weight": weight, "activation": "float", "correct": ["gptq", "norms", "bias"]}


_ACADEMIC = "as in papers: first and last layers have 8 bits"
_LIST = (
    Preset("W8A8", "weights and activations of 8 bits", _integers(8, 8)),
    Preset("W4A8", "weights of 4 bits, activations of 8", _integers(4, 8)),
    Preset("W6A6", f"weights and activations of 6 bits, {_ACADEMIC}", _integers(6, 6, backend="academic")),
    Preset("W4A4", f"weights and activations of 4 bits, {_ACADEMIC}", _integers(4, 4, backend="academic")),
    Preset("W3A3", f"weights and activations of 3 bits, {_ACADEMIC}", _integers(3, 3, backend="academic")),
    Preset("W2A4", f"weights of 2 bits, activations of 4, {_ACADEMIC}", _integers(2, 4, backend="academic")),
    Preset("W2A2", f"weights and activations of 2 bits, {_ACADEMIC}", _integers(2, 2, backend="academic")),
    Preset("W8A16", "weights of 8 bits, activations float", _weights(8)),
    Preset("W4A16", "weights of 4 bits, one scale per channel, activations float", _weights(4)),
    Preset(
        "W4A16_G128",
        "weights of linear layers in groups of 128 with 4 bits, all else float",
        {
            "backend": "virtual",
            "weight": "float",
            "activation": "float",
            "rules": [{"match": "op:linear", "weight": "int4 symmetric group:128:1"}],
        },
    ),
    Preset(
        "FP8",
        "weights and activations in fp8 e4m3",
        {"backend": "virtual", "weight": "e4m3 symmetric channel:0", "activation": "e4m3 symmetric tensor"},
    ),
)
PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _LIST}


def find_preset(name: str) -> Preset | None:
    """The preset of that name, ignoring case."""
    return next((p for p in _LIST if p.name.lower() == name.lower().replace("-", "_")), None)


def expand(given: Mapping[str, Any], preset: Preset) -> dict[str, Any]:
    """Merge settings over those of a preset; rules come after the preset's."""
    merged = {**preset.recipe, **given}
    for kind in ("weight", "activation"):
        if kind in given and kind in preset.recipe:
            merged[kind] = _tensor_over(given[kind], preset.recipe[kind])
    if isinstance(given.get("rules"), list | tuple):
        merged["rules"] = [*preset.recipe.get("rules", ()), *given["rules"]]
    return merged


def _tensor_over(given: object, base: object) -> object:
    """Merge a tensor's settings over the preset's; anything but a mapping or string is refused later."""
    if not isinstance(given, Mapping):
        return given
    below = dict(base) if isinstance(base, Mapping) else {"spec": base}
    if given.get("spec") is not None or given.get("bits") is not None:
        below = {k: v for k, v in below.items() if k not in ("spec", "bits")}
    return {**below, **given}
