"""QuantEmbedding: nn.Embedding with a quantized table; what goes in are indices."""

from typing import Any, ClassVar, Self

import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.nn.descriptors import WEIGHT, refuse_unknown
from bitwright.nn.mixins import QuantMixin, adopt_checked, build_quantizer
from bitwright.nn.registry import register_qmodule
from bitwright.quantizer import QuantDescriptor


@register_qmodule(sources=[nn.Embedding])
class QuantEmbedding(QuantMixin, nn.Embedding):
    """nn.Embedding with a quantized weight, one scale for each of its rows.

    It takes ``quant_desc_weight`` besides the arguments of the original, and has no ``input_quantizer``.
    """

    by_default = False
    default_quant_desc_weight: ClassVar[QuantDescriptor] = QuantDescriptor(axis=0)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_unknown(type(self), kwargs, nn.Embedding, [WEIGHT])
        descriptor = kwargs.pop(WEIGHT, None)
        nn.Embedding.__init__(self, *args, **kwargs)
        self._weight_quantizer = build_quantizer(descriptor or type(self).default_quant_desc_weight, WEIGHT)

    @classmethod
    def from_float(cls, module: nn.Module, *, quant_desc_weight: QuantDescriptor | None = None) -> Self:  # pyrefly: ignore
        """Make a QuantEmbedding of an nn.Embedding."""
        made = adopt_checked(cls, module)
        made._weight_quantizer = build_quantizer(quant_desc_weight or cls.default_quant_desc_weight, WEIGHT)
        return made

    def forward(self, input: Tensor) -> Tensor:
        """Look rows of the quantized table up."""
        if self.max_norm is not None:  # renormalises the rows in place, as the original does, before they are quantized
            nn.Embedding.forward(self, input)
        weight = self.weight_quantizer(self.weight)
        return F.embedding(input, weight, self.padding_idx, None, self.norm_type, self.scale_grad_by_freq, self.sparse)
