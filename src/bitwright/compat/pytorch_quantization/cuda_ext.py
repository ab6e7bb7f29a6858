"""The functions of the old CUDA extension, on every device: the same values as ``tensor_quant``, without a gradient."""

import torch
from torch import Tensor

from bitwright.compat.pytorch_quantization import tensor_quant
from bitwright.numerics.fp8 import BY_BITS, to_fp8


@torch.no_grad()
def fake_tensor_quant(
    inputs: Tensor, amax: Tensor, num_bits: int = 8, is_unsigned: bool = False, narrow_range: bool = True
) -> Tensor:
    """Quantize and dequantize by one ``amax``."""
    return tensor_quant.fake_tensor_quant(inputs, amax, num_bits, is_unsigned, narrow_range)


def fake_tensor_quant_(
    inputs: Tensor, amax: Tensor, num_bits: int = 8, is_unsigned: bool = False, narrow_range: bool = True
) -> None:
    """Quantize and dequantize ``inputs`` in place."""
    inputs.data.copy_(fake_tensor_quant(inputs, amax, num_bits, is_unsigned, narrow_range))


def fake_tensor_quant_with_axis(
    inputs: Tensor,
    amax: Tensor,
    axis: int,
    num_bits: int = 8,
    is_unsigned: bool = False,
    narrow_range: bool = True,
) -> Tensor:
    """Quantize and dequantize with one value of ``amax`` for each index along ``axis``."""
    shape = [-1 if d == axis % inputs.ndim else 1 for d in range(inputs.ndim)]
    return fake_tensor_quant(inputs, amax.reshape(shape), num_bits, is_unsigned, narrow_range)


def fake_e4m3fy(inputs: Tensor) -> Tensor:
    """Round to E4M3 and back; what is beyond its largest number becomes that."""
    return to_fp8(inputs.detach().float(), BY_BITS[4, 3]).to(inputs.dtype)
