"""PlacedQuantizer: held by a QModule in a graph instead of its own input quantizer."""

from copy import deepcopy
from typing import Any

from torch import Tensor

from bitwright.quantizer import TensorQuantizer


class PlacedQuantizer:
    """Represents, in a QModule, the quantizer that already runs on the edge before it.

    Calling it changes nothing; all attributes come from the quantizer on the edge. It is not a submodule, so the
    quantizer appears only once in the model's state.
    """

    def __init__(self, quantizer: TensorQuantizer) -> None:
        self.quantizer = quantizer

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x``: its producer has quantized it."""
        return x

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name == "quantizer":  # not set yet, while being copied
            raise AttributeError(name)
        return getattr(self.quantizer, name)

    def __repr__(self) -> str:
        return f"placed {self.quantizer!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "PlacedQuantizer":
        return PlacedQuantizer(deepcopy(self.quantizer, memo))


InputQuantizer = TensorQuantizer | PlacedQuantizer
