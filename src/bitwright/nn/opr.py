"""QuantOpr: the base of an operator written by a user and registered for its sources."""

from typing import Any

from torch import Tensor, nn

from bitwright.errors import ConfigError
from bitwright.nn.mixins import QuantInputMixin
from bitwright.quantizer import QuantDescriptor, TensorQuantizer


class QuantOpr(QuantInputMixin, nn.Module):
    """Replaces a module, a function or a tensor method, and quantizes its inputs.

    A subclass is built from what it replaces: the module, or the fx node of the call, whose arguments are in
    ``org_module.args`` and ``org_module.kwargs``. It calls ``super().__init__()`` without arguments. After that it
    receives an ``input_quantizer``, and a ``weight_quantizer`` if it has a ``weight``, as the recipe and the backend
    specify::

        @register_qmodule(sources=[nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d], override=True)
        class QAdaptiveAvgPool2d(QuantOpr):
            def __init__(self, org_module, config=None):
                super().__init__()
                self.output_size = org_module.output_size if isinstance(org_module, nn.Module) else org_module.args[1]

            def forward(self, x_in, *args):
                return F.adaptive_avg_pool2d(self.input_quantizer(x_in), self.output_size)

    In a graph every float input is quantized where it is produced, and ``input_quantizer`` only refers to that
    quantizer, so an operator with several inputs calls it on each of them.

    Attributes:
        integer: whether the result must be quantized too, as a backend requires for its own integer operators.
        channel_axis: the axis of the weight that has the output channels.
    """

    builds_itself = True  # from the module or call it replaces; Bitwright's other QModules adopt a module's parameters
    integer = False
    channel_axis = 0
    _repr_info = ""

    @property
    def input_quantizer(self) -> Any:  # noqa: ANN401
        if "_input_quantizer" not in self._modules and "_input_quantizer" not in self.__dict__:
            raise ConfigError(
                f"{type(self).__name__} has no quantizers yet: prepare or swap_modules adds them once it is built"
            )
        return self._input_quantizer

    @property
    def weight_quantizer(self) -> TensorQuantizer | None:
        return self._modules.get("_weight_quantizer")  # pyrefly: ignore

    def has_weight(self) -> bool:
        return isinstance(getattr(self, "weight", None), Tensor)

    def init_quantizers(
        self,
        quant_desc_input: QuantDescriptor | None = None,
        quant_desc_weight: QuantDescriptor | None = None,
    ) -> None:
        """Create the quantizers from descriptors if there is no recipe."""
        self.init_quantizer(quant_desc_input or self.default_quant_desc_input)
        if self.has_weight():
            default = QuantDescriptor(axis=self.channel_axis)
            self._weight_quantizer = self.build_quantizer(quant_desc_weight or default, "quant_desc_weight")

    def extra_repr(self) -> str:
        return self._repr_info
