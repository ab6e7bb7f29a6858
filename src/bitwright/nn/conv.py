"""Quantized convolutions and transposed convolutions, 1d to 3d, with every argument of the originals."""

from collections.abc import Sequence
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.nn.layer import QuantLayer
from bitwright.nn.registry import register_qmodule

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class _Geometry(QuantLayer):
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Any  # a tuple, or "same" or "valid" where not transposed
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding_mode: Literal["zeros", "reflect", "replicate", "circular"]


class _QuantConv(_Geometry):
    def arrange(self, x: Tensor) -> Tensor:
        """Pad with values of the input if the padding mode says so."""
        edges = [] if self.padding_mode == "zeros" else padding_edges(self)
        return F.pad(x, edges, mode=self.padding_mode) if any(edges) else x

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        conv = _CONV[weight.ndim - 2]
        padding = self.padding if self.padding_mode == "zeros" else 0
        return conv(x, weight, bias, self.stride, padding, self.dilation, self.groups)


def padding_edges(conv: Any) -> list[int]:  # noqa: ANN401
    """The padding of a convolution as ``F.pad`` takes it."""
    # F.pad counts from the last dimension: (left, right, top, bottom, …).
    edges: list[int] = []
    for d in reversed(range(len(conv.kernel_size))):
        if conv.padding == "valid":
            edges += [0, 0]
        elif conv.padding == "same":
            total = conv.dilation[d] * (conv.kernel_size[d] - 1)
            edges += [total // 2, total - total // 2]
        else:
            edges += [conv.padding[d]] * 2
    return edges


class _QuantConvTranspose(_Geometry):
    channel_axis = 1

    def compute(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, output_size: Sequence[int] | None = None
    ) -> Tensor:
        conv = _TRANSPOSED[weight.ndim - 2]
        padding = _output_padding(self, x, output_size)
        return conv(x, weight, bias, self.stride, self.padding, padding, self.groups, self.dilation)

    def spread(self, scale: Tensor) -> Tensor:
        """All groups share the scales along the weight's second axis."""
        return scale.repeat(self.groups) if scale.ndim else scale


def _output_padding(conv: _Geometry, x: Tensor, output_size: Sequence[int] | None) -> tuple[int, ...]:
    if output_size is None:
        return conv.output_padding
    sizes = list(output_size)[-len(conv.kernel_size) :]
    padding = []
    for d, wanted in enumerate(sizes):
        reach = conv.dilation[d] * (conv.kernel_size[d] - 1) + 1
        smallest = (x.shape[d - len(sizes)] - 1) * conv.stride[d] - 2 * conv.padding[d] + reach
        if not smallest <= wanted < smallest + conv.stride[d]:
            raise ValueError(
                f"output_size {tuple(sizes)} is impossible: along dimension {d} it must be from {smallest} to "
                f"{smallest + conv.stride[d] - 1}"
            )
        padding.append(wanted - smallest)
    return tuple(padding)


@register_qmodule(sources=[nn.Conv1d])
class QuantConv1d(_QuantConv, nn.Conv1d):
    """nn.Conv1d with quantized input and weight."""


@register_qmodule(sources=[nn.Conv2d])
class QuantConv2d(_QuantConv, nn.Conv2d):
    """nn.Conv2d with quantized input and weight."""


@register_qmodule(sources=[nn.Conv3d])
class QuantConv3d(_QuantConv, nn.Conv3d):
    """nn.Conv3d with quantized input and weight."""


@register_qmodule(sources=[nn.ConvTranspose1d])
class QuantConvTranspose1d(_QuantConvTranspose, nn.ConvTranspose1d):
    """nn.ConvTranspose1d with quantized input and weight."""


@register_qmodule(sources=[nn.ConvTranspose2d])
class QuantConvTranspose2d(_QuantConvTranspose, nn.ConvTranspose2d):
    """nn.ConvTranspose2d with quantized input and weight."""


@register_qmodule(sources=[nn.ConvTranspose3d])
class QuantConvTranspose3d(_QuantConvTranspose, nn.ConvTranspose3d):
    """nn.ConvTranspose3d with quantized input and weight."""
