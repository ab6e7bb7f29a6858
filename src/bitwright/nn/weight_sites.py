"""Weight sites: every quantized weight of a model as it enters its quantizer, with its layer and quantizer."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.nn.layer import QuantLayer
from bitwright.nn.mixins import QuantMixin
from bitwright.quantizer import TensorQuantizer

_OWN = "_weight_quantizer"


@dataclass(frozen=True, eq=False, slots=True)
class WeightSite:
    """A weight that is quantized.

    Attributes:
        key: the name of the quantizer in the layer, ``_weight_quantizer`` where there is one.
    """

    name: str
    layer: nn.Module
    key: str
    quantizer: TensorQuantizer

    def weight(self) -> Tensor:
        """The tensor that is quantized: the weight with all folds multiplied in, or the weights of an LSTM as one."""
        return _stored_weights(self.layer)[self.key]

    @property
    def channel_axis(self) -> int:
        """The axis of the weight that has the output channels."""
        return getattr(self.layer, "channel_axis", int(bool(getattr(self.layer, "transposed", False))))

    @property
    def plain(self) -> bool:
        """Whether the layer has one weight, called ``weight``."""
        return self.key in (_OWN, "weight_quantizer") and isinstance(getattr(self.layer, "weight", None), Tensor)

    def find_range(self) -> None:
        """Make the quantizer's observer find the range of the current weight."""
        quantizer = self.quantizer
        if not quantizer.calibratable:
            return
        quantizer.observer.reset()
        quantizer.observer(self.weight().detach())
        quantizer.compute_qparams()
        quantizer.observer.reset()

    def replace(self, weight: Tensor) -> None:
        """Make :meth:`weight` return ``weight`` from now on; the layer's own weight has the folds divided out."""
        layer: Any = self.layer
        with torch.no_grad():
            layer.weight.copy_(layer.unfold(weight) if isinstance(layer, QuantLayer) else weight)


def weight_sites(model: nn.Module) -> Iterator[WeightSite]:
    """Yield every weight that is quantized; functions (``F.linear``) get theirs only when they run."""
    for name, layer in model.named_modules():
        for key in layer.weight_keys() if isinstance(layer, QuantMixin) else _stored_weights(layer):
            quantizer = layer.get_submodule(key)
            if isinstance(quantizer, TensorQuantizer):
                yield WeightSite(name, layer, key, quantizer)


def _stored_weights(layer: Any) -> dict[str, Tensor]:  # noqa: ANN401
    """The tensors that a layer quantizes, by the names of their quantizers."""
    if isinstance(layer, QuantMixin):
        return layer.stored_weights()
    weight = None if isinstance(layer, torch.jit.ScriptModule) else layer._parameters.get("weight")
    keys = [key for key in (_OWN, "weight_quantizer") if key in layer._modules]
    return {keys[0]: weight} if keys and isinstance(weight, Tensor) else {}
