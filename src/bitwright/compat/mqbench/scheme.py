"""QuantizeScheme: how MQBench says what a quantized tensor looks like."""

from bitwright.compat.mqbench.qconfig import read_scheme
from bitwright.spec import QuantSpec


class QuantizeScheme:
    """A scheme by its keys, as in ``w_qscheme``; ``kwargs`` are arguments of the observer among them."""

    def __init__(
        self,
        symmetry: bool = True,
        per_channel: bool = False,
        pot_scale: bool = False,
        bit: int = 8,
        symmetric_range: bool = False,
        **kwargs: object,
    ) -> None:
        self.symmetry, self.per_channel, self.pot_scale, self.bit = symmetry, per_channel, pot_scale, bit
        self.symmetric_range, self.kwargs = symmetric_range, kwargs
        self.spec: QuantSpec = read_scheme("w", {k: v for k, v in vars(self).items() if k != "kwargs"})
        self.quant_min, self.quant_max = self.spec.qmin, self.spec.qmax

    def __str__(self) -> str:
        return f"{self.spec}{f', {self.kwargs}' if self.kwargs else ''}"
