"""QuantEmbedding: nn.Embedding with a quantized table; what goes in are indices."""

import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.nn.mixins import WEIGHT, QuantMixin, TakesDescriptors
from bitwright.nn.registry import register_qmodule
from bitwright.quantizer import QuantDescriptor


@register_qmodule(sources=[nn.Embedding])
class QuantEmbedding(TakesDescriptors, QuantMixin, nn.Embedding):
    """nn.Embedding with a quantized weight, one scale for each of its rows.

    It takes ``quant_desc_weight`` besides the arguments of the original, and has no ``input_quantizer``.
    """

    by_default = False
    descriptors = (WEIGHT,)

    def init_quantizer(self, quant_desc_weight: QuantDescriptor) -> None:  # pyrefly: ignore
        self._weight_quantizer = self.build_quantizer(quant_desc_weight, WEIGHT)

    def forward(self, input: Tensor) -> Tensor:
        if self.max_norm is not None:  # renormalises the rows in place, as the original does, before they are quantized
            nn.Embedding.forward(self, input)
        weight = self.weight_quantizer(self.weight)
        return F.embedding(input, weight, self.padding_idx, None, self.norm_type, self.scale_grad_by_freq, self.sparse)
