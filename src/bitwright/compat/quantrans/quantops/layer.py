"""QATLayer: mixed before a quantized operator, turns it into a QuanTransformer layer."""

from typing import Any, ClassVar, Self

from torch import Tensor, nn

from bitwright.compat.quantrans.quantops.builder import QUANLAYERS
from bitwright.compat.quantrans.quantops.kinds import Kind
from bitwright.compat.quantrans.quantops.options import Options, split_options
from bitwright.compat.quantrans.quantops.quantizer import first_batch_quantizer, switch
from bitwright.errors import ConfigError
from bitwright.nn.layer import QuantLayer
from bitwright.nn.mixins import adopt_checked
from bitwright.quantizer import TensorQuantizer


class QATLayer(QuantLayer):
    """A layer that quantizes its weight and input by a :class:`Kind`, with ranges from the first batch.

    It takes its operator's arguments and, by name, those of :class:`Options` that its kind has.
    """

    kind: ClassVar[Kind]
    options: Options
    Qweight: Tensor
    Qactivation: Tensor

    def __init__(self, *args: object, **kwargs: object) -> None:
        options, rest = self._split(kwargs)
        super(QuantLayer, self).__init__(*args, **rest)
        self._equip(options)

    @classmethod
    def _split(cls, given: dict[str, Any]) -> tuple[Options, dict[str, Any]]:
        return split_options(cls, cls.kind.options, cls.kind.defaults, given)  # pyrefly: ignore

    @classmethod
    def from_float(cls, module: nn.Module, **options: object) -> Self:  # pyrefly: ignore
        """Build this layer from a float one: same parameters, buffers, hooks and settings, plus quantizers."""
        own, rest = cls._split(options)
        if rest:
            raise ConfigError(f"{cls.__name__}.from_float takes {next(iter(rest))} from the float layer: leave it out")
        made = adopt_checked(cls, module)
        made._equip(own)
        return made

    def _equip(self, options: Options) -> None:
        self.options = options
        weight, activation = self.kind.plans(options)
        self._weight_quantizer = first_batch_quantizer(weight)
        self._input_quantizer = first_batch_quantizer(activation)
        self.bSetQ = options.bSetQ

    @property
    def bSetQ(self) -> bool:
        """Whether the layer quantizes; if not, it is the float one."""
        return self._set

    @bSetQ.setter
    def bSetQ(self, on: bool) -> None:
        self._set = on
        weight, activation = self.options.quantized
        switch(self._weight_quantizer, on and weight, tuple(self.weight.shape))
        if isinstance(self._input_quantizer, TensorQuantizer):
            switch(self._input_quantizer, on and activation)

    @property
    def num_bit_w(self) -> int:
        return self.options.num_bit_w

    @property
    def num_bit_a(self) -> int:
        return self.options.num_bit_a

    @property
    def quant_activation(self) -> bool:
        return self.options.quant_activation

    nbits_w, nbits_a = num_bit_w, num_bit_a

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: object, **kwargs: object) -> Tensor:
        """Compute on quantized tensors, and keep them if the layer is in debug mode."""
        if self.options.debug:
            self.Qweight, self.Qactivation = weight.detach().clone(), x.detach().clone()
        return super().compute(x, weight, bias, *args, **kwargs)


def qat_layer(name: str, kind: Kind, operator: type[QuantLayer]) -> Any:
    """Create and register the layer of a kind for an operator."""
    doc = f"{operator.__name__.removeprefix('Quant')}: {kind.title}; arguments in :class:`Options`."
    made = type(name, (QATLayer, operator), {"kind": kind, "__module__": f"{__package__}.layers", "__doc__": doc})
    return QUANLAYERS.register_module()(made)
