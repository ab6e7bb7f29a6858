"""FirstBatchQuantizer: takes its range from the first tensor it sees, in training or in evaluation."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitwright.quantizer import Mode, TensorQuantizer
from bitwright.spec import QuantSpec


class FirstBatchQuantizer(TensorQuantizer):
    """A quantizer that needs no calibration, though it can have one.

    What its method learns is there from the beginning, so that an optimizer made before the first batch has it; the
    first batch sets its value.

    Args:
        spec: what the quantized tensor looks like.
        observer: name of the observer that finds the range in the first tensor.
        method: name of the method that rounds.
        shape: of the scale.
        follow: in training, take the range of each tensor anew: for weights where nothing is learned.
        method_options: keyword arguments of the method.
    """

    def __init__(
        self,
        spec: QuantSpec,
        observer: str,
        method: str,
        *,
        shape: tuple[int, ...] = (),
        follow: bool = False,
        method_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(spec, observer, method, method_options=method_options)
        self.shape, self.follow, self.enabled = shape, follow, False

    def switch(self, on: bool) -> None:
        """Quantize from now on, or let tensors pass whatever else is said."""
        self.enabled = on
        if on and not self.calibrated:
            one = torch.ones(self.shape, device=self.scale.device)
            self.method.start(one, torch.zeros_like(one, dtype=torch.int32))
        self.quantize()

    def quantize(self) -> None:
        """Quantize tensors; without a range, the next tensor gives it."""
        self.mode = Mode.QUANTIZE

    def forward(self, x: Tensor) -> Tensor:
        """Quantize ``x``, by its own range if it is the first."""
        if self.quantizes and (not self.calibrated or (self.follow and self.training)):
            if not x.numel():
                return x
            try:
                self.observer(x)
                self.compute_qparams()
            finally:
                self.observer.reset()
        return super().forward(x)
