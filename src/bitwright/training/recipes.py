"""Recipes for training with quantizers, by the name of a method."""

from collections.abc import Mapping
from typing import Any

from bitwright.backends import BACKENDS
from bitwright.errors import ConfigError, suggest
from bitwright.recipe import PRESETS, Recipe

# The methods of weights and of activations, and whether activations must have no zero point.
_WORDS: dict[str, tuple[str, str, bool]] = {
    "lsq": ("LearnableFakeQuantize", "LearnableFakeQuantize", False),
    "lsq+": ("LSQPlusFakeQuantize", "LSQPlusFakeQuantize", False),
    "pact": ("DoReFaFakeQuantize", "PACTFakeQuantize", False),
    "dorefa": ("DoReFaFakeQuantize", "FixedFakeQuantize", False),
    "dsq": ("DSQFakeQuantize", "DSQFakeQuantize", False),
    "tqt": ("TqtFakeQuantize", "TqtFakeQuantize", True),
    "apot": ("APoTFakeQuantize", "APoTFakeQuantize", True),
}


_SIZELESS = "DoReFaFakeQuantize"  # its weights fill [-1, 1], whatever size a folded BatchNorm gives them
_COARSE = (_SIZELESS, "APoTFakeQuantize")  # the last layer has no BatchNorm to restore sizes; APoT is for few bits
_FINE = {"first_last_method": "LearnableFakeQuantize"}


def qat_recipe(method: str, preset: str = "W4A4", **more: object) -> Recipe:
    """A preset's recipe with the methods of a paper.

    Args:
        method: ``"lsq"``, ``"lsq+"``, ``"pact"``, ``"dorefa"``, ``"dsq"``, ``"tqt"`` or ``"apot"``. The last two have
            no zero point, so activations that can be negative get signed specs. DoReFa's activations keep their
            calibrated range, because its own, [0, 1], would cut off most of a trained net's. Its weights are for
            backends that keep BatchNorms apart, such as that of ``"W4A4"``; they lie on integers here, as files need
            it. PACT has them as in its paper, and LSQ's where BatchNorms are folded.
        preset: such as ``"W4A4"``; first and last layers have 8 bits in those with few bits. APoT, DoReFa and PACT's
            weights leave these to LSQ.
        more: further settings of the recipe, such as ``backend`` or ``rules``.
    """
    word = method.lower()
    if word not in _WORDS:
        raise ConfigError(f"unknown method of training {method!r}{suggest(method, _WORDS)}")
    known = next((p for name, p in PRESETS.items() if name.lower() == preset.lower()), None)
    if known is None:
        raise ConfigError(f"unknown preset {preset!r}{suggest(preset, PRESETS)}")
    weight, activation, symmetric = _WORDS[word]
    base: Mapping[str, Any] = known.recipe
    settings: dict[str, Any] = {"preset": preset, "weight": {"method": weight}, "activation": {"method": activation}}
    settings["correct"] = []  # training moves weights and norms anyway
    bits = base.get("activation", {}).get("bits") if isinstance(base.get("activation"), Mapping) else None
    if symmetric and bits is not None:
        settings["activation"] |= {"spec": f"int{bits} symmetric", "nonnegative": "unsigned"}
    if weight == _SIZELESS:
        settings["weight"] = _sizeless(word, Recipe.parse({**settings, **more}).backend)
    for kind in ("weight", "activation"):
        settings[kind] |= _FINE if settings[kind]["method"] in _COARSE else {}
    return Recipe.parse({**settings, **more})


def _sizeless(word: str, backend: str) -> dict[str, Any]:
    """How DoReFa quantizes weights, or what replaces it if BatchNorms are folded into them."""
    if not (backend in BACKENDS and BACKENDS.get(backend).folding.batchnorm):
        return {"method": _SIZELESS, "method_options": {"normalize": True}}
    if word == "pact":
        return {"method": "LearnableFakeQuantize"}
    raise ConfigError(
        f"DoReFa's weights lose the size that {backend} gives them by folding BatchNorms; take a preset that keeps "
        "these apart, such as W4A4, or the word 'pact' or 'lsq'"
    )
