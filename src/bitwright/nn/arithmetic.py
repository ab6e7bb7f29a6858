"""Arithmetic between tensors as modules, each tensor quantized: QuantAdd, QuantMul, QuantMatMul, QuantCat."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.nn.mixins import QuantInputMixin, pop_quant_desc_in_kwargs
from bitwright.nn.registry import register_qmodule
from bitwright.quantizer import QuantDescriptor, TensorQuantizer


class _Single(QuantInputMixin, nn.Module):
    gives_way = True

    def __init__(self, **kwargs: object) -> None:
        nn.Module.__init__(self)
        self.init_quantizer(pop_quant_desc_in_kwargs(type(self), input_only=True, **kwargs))


class _Pair(_Single):
    """An operator on two tensors, each with a quantizer; plain numbers are left alone."""

    _other_quantizer: TensorQuantizer

    @property
    def other_quantizer(self) -> TensorQuantizer:
        return self._other_quantizer

    def init_quantizer(self, quant_desc_input: QuantDescriptor) -> None:
        super().init_quantizer(quant_desc_input)
        self._other_quantizer = self.build_quantizer(quant_desc_input, "quant_desc_input")

    def pair(self, input: object, other: object) -> tuple[Any, Any]:
        """Quantize whichever of the two are tensors."""
        first = self.input_quantizer(input) if isinstance(input, Tensor) else input
        return first, self.other_quantizer(other) if isinstance(other, Tensor) else other


@register_qmodule(sources=[operator.add, torch.add, "add"])
class QuantAdd(_Pair):
    """``input + alpha * other``, both quantized."""

    def forward(self, input: Tensor, other: Tensor | float, *, alpha: float = 1) -> Tensor:
        return torch.add(*self.pair(input, other), alpha=alpha)


@register_qmodule(sources=[operator.mul, torch.mul, "mul"])
class QuantMul(_Pair):
    """``input * other``, both quantized."""

    def forward(self, input: Tensor, other: Tensor | float) -> Tensor:
        return torch.mul(*self.pair(input, other))


@register_qmodule(sources=[operator.matmul, torch.matmul, torch.bmm, torch.mm, "matmul"])
class QuantMatMul(_Pair):
    """``input @ other``, both quantized."""

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        return torch.matmul(*self.pair(input, other))


@register_qmodule(sources=[torch.cat])
class QuantCat(_Single):
    """``torch.cat``: one quantizer for all tensors, so that the result has one scale."""

    def forward(self, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
        return torch.cat([self.input_quantizer(t) for t in tensors], dim)
