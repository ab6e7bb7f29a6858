"""change_bits: reduce the bits in the course of training."""

from torch import nn

from bitwright.correction.steps import undo_for_other_bits
from bitwright.errors import ConfigError
from bitwright.nn.weight_sites import weight_sites
from bitwright.quantizer import quantizers
from bitwright.recipe import with_bits


def change_bits(model: nn.Module, weight: int | None = None, activation: int | None = None) -> nn.Module:
    """Change the bits of weights and activations that have fewer than 8 bits.

    Ranges of activations do not change; those of weights are found again. Corrections that were made for the former
    bits are undone, unless the model was trained since. Create a new optimizer afterwards if methods
    have other Parameters.

    Args:
        model: a calibrated model.
        weight: bits of all weights that had fewer than 8 so far, or None to leave them.
        activation: bits of all activations that had fewer than 8 so far, or None to leave them.

    Returns:
        The same model.
    """
    _check_bits("weight", weight)
    _check_bits("activation", activation)
    undo_for_other_bits(model)
    sites = {site.quantizer: site for site in weight_sites(model)}
    for quantizer in quantizers(model).values():
        site, spec = sites.get(quantizer), quantizer.spec
        wished = activation if site is None else weight
        if wished is None or spec.bits >= 8 or spec.format.floating or not quantizer.quantizes:
            continue
        quantizer.change_spec(with_bits(spec, wished))
        if site is not None:
            site.find_range()
    return model


def _check_bits(name: str, bits: int | None) -> None:
    if bits is not None and (not isinstance(bits, int) or not 2 <= bits <= 16):
        raise ConfigError(f"the bits of {name}s must be a whole number from 2 to 16, not {bits!r}")
