"""QuantizedInput: any module of torch, with its first input quantized."""

from typing import Any

from bitwright.nn.descriptors import TakesDescriptors
from bitwright.nn.mixins import QuantInputMixin


class QuantizedInput(TakesDescriptors, QuantInputMixin):
    """Mixed before a module of torch, takes its constructor's arguments and ``quant_desc_input``.

    Attributes:
        gives_way: whether a user's class may be registered for the same source without ``override``.
        by_default: whether ``swap_modules`` without a backend, and ``quant_modules.initialize``, use the class unasked.
    """

    gives_way = True
    by_default = False

    def forward(self, input: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Compute the original on the quantized input."""
        original: Any = super()
        return original.forward(self.input_quantizer(input), *args, **kwargs)
