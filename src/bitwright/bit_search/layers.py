"""Layers: every quantized weight, with its cost in bytes and bit operations."""

from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.graph import Inputs
from bitwright.modes import eval_mode
from bitwright.nn.placed import PlacedQuantizer
from bitwright.nn.weight_sites import WeightSite, weight_sites
from bitwright.quantizer import TensorQuantizer

FLOAT_BITS = 32


@dataclass(eq=False)
class Layer:
    """A weight site with its costs, multiplications among them, for one sample."""

    site: WeightSite
    input: TensorQuantizer | None
    operations: int = 0

    @property
    def name(self) -> str:
        """The layer's qualified name."""
        return self.site.name

    @property
    def bits(self) -> int:
        """The current bits of its weight."""
        quantizer = self.site.quantizer
        return quantizer.spec.bits if quantizer.enabled else FLOAT_BITS

    def size(self, bits: int) -> int:
        """Bytes of the weight."""
        return ceil(self.site.weight().numel() * bits / 8)

    def bit_operations(self, bits: int) -> int:
        """Multiplications, each times the bits of both factors."""
        return self.operations * bits * (self.input.spec.bits if self.input is not None else FLOAT_BITS)


def layers_of(model: nn.Module, example: Inputs) -> list[Layer]:
    """The layers whose weights are currently quantized, in execution order; those never called come last."""
    found = [Layer(site, _input_of(site.layer)) for site in weight_sites(model) if site.quantizer.quantizes]
    by_module = {layer.site.layer: layer for layer in found}
    order: dict[nn.Module, int] = {}

    def look(module: nn.Module, args: Any, result: Any) -> None:  # noqa: ANN401
        layer, x = by_module[module], args[0]
        order.setdefault(module, len(order))
        y = result[0] if isinstance(result, tuple) else result
        if not isinstance(y, Tensor) or not isinstance(x, Tensor):
            return
        weight, axis = layer.site.weight(), layer.site.channel_axis
        transposed = bool(getattr(module, "transposed", False))
        per_value = weight.numel() // weight.shape[0 if transposed else axis]
        layer.operations += (x if transposed else y).numel() // max(len(y), 1) * per_value

    hooks = [module.register_forward_hook(look) for module in by_module]
    try:
        with torch.no_grad(), eval_mode(model):
            example.run(model)
    finally:
        for hook in hooks:
            hook.remove()
    return sorted(found, key=lambda layer: order.get(layer.site.layer, len(order)))


def _input_of(layer: nn.Module) -> TensorQuantizer | None:
    source: object = getattr(layer, "_input_quantizer", None)
    quantizer = source.quantizer if isinstance(source, PlacedQuantizer) else source
    return quantizer if isinstance(quantizer, TensorQuantizer) and quantizer.quantizes else None
