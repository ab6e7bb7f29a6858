"""QuantEmbedding: nn.Embedding with a quantized table; its inputs are indices."""

import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.nn.mixins import WEIGHT, QuantMixin, TakesDescriptors
from bitwright.nn.registry import register_qmodule
from bitwright.quantizer import QuantDescriptor


@register_qmodule(sources=[nn.Embedding])
class QuantEmbedding(TakesDescriptors, QuantMixin, nn.Embedding):
    """nn.Embedding with a quantized weight, one scale for each of its rows.

    It takes ``quant_desc_weight`` in addition to the original's arguments, and has no ``input_quantizer``.
    """

    by_default = False
    descriptors = (WEIGHT,)

    def init_quantizer(self, quant_desc_weight: QuantDescriptor) -> None:  # pyrefly: ignore
        self._weight_quantizer = self.build_quantizer(quant_desc_weight, WEIGHT)

    def forward(self, input: Tensor) -> Tensor:
        if self.max_norm is not None:  # renormalises the rows in place before they are quantized, like the original
            nn.Embedding.forward(self, input)
        weight = self.weight_quantizer(self.weight)
        return F.embedding(input, weight, self.padding_idx, None, self.norm_type, self.scale_grad_by_freq, self.sparse)
