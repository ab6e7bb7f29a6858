"""Method: how a value is rounded and what its gradient is."""

from abc import abstractmethod

from torch import Tensor, nn

from bitwright.registry import Registry
from bitwright.spec import PerGroup, PerTensor, QuantSpec

METHODS: Registry[type["Method"]] = Registry("method")


def register_method(name: str, *, aliases: tuple[str, ...] = (), override: bool = False):  # noqa: ANN201
    """File a method class under a name.

    Subclass :class:`Method`, write ``forward``, and decorate; that is the whole plug-in::

        @register_method("StochasticFakeQuantize")
        class Stochastic(Method):
            def forward(self, x, scale, zero_point): ...
    """
    return METHODS.register(name, aliases=aliases, override=override)


class Method(nn.Module):
    """Turns float values into quantized ones (still float) for one spec."""

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__()
        self.spec = spec

    @property
    def axis(self) -> int | None:
        """The axis along which scales change, if any."""
        return None if isinstance(self.spec.granularity, PerTensor) else self.spec.granularity.axis

    @property
    def group(self) -> int | None:
        """Values per scale along the axis, if the spec groups them."""
        return self.spec.granularity.size if isinstance(self.spec.granularity, PerGroup) else None

    @abstractmethod
    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Quantize and dequantize ``x``."""
