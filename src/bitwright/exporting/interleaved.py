"""Transposed convolutions as convolutions whose results are interleaved, for runtimes with integers for these only.

Along one dimension, a transposed convolution with stride s and padding p makes

    y[o] = Σ_j x[m - j] · w[r + s·j]        where o + p = s·m + r and 0 ≤ r < s

so the results of one phase r are a convolution of x with every s-th weight, in reverse order. The convolution here has
channels for each phase. Its results are interleaved, and cut at both ends.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Any, Self

import torch.nn.functional as F
from torch import Tensor, fx, nn

from bitwright.exporting.modules import DeployedLayer
from bitwright.exporting.parts import IntegerTensor, Site, TableTensor, deployed
from bitwright.nn.conv import QuantConvTranspose1d, QuantConvTranspose2d, QuantConvTranspose3d
from bitwright.quantizer import TensorQuantizer

_TRANSPOSED = (QuantConvTranspose1d, QuantConvTranspose2d, QuantConvTranspose3d)
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class Interleaving:
    """How a transposed convolution is a convolution.

    Attributes:
        strides: how many phases there are along each dimension.
        groups: of the layer.
        padding: of the convolution.
        cut: how many of the interleaved results go at the beginning and the end of each dimension.
    """

    strides: tuple[int, ...]
    groups: int
    padding: tuple[int, ...]
    cut: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, layer: Any) -> Self | None:
        """That of a layer; None for dilated kernels."""
        if set(layer.dilation) != {1}:
            return None
        places = zip(layer.kernel_size, layer.stride, layer.padding, layer.output_padding, strict=True)
        found = [_along(*place) for place in places]
        return cls(tuple(layer.stride), layer.groups, tuple(p for p, _ in found), tuple(cut for _, cut in found))

    @property
    def phases(self) -> int:
        """How many results of the convolution's channels make one channel."""
        return prod(self.strides)

    def split(self, weight: Tensor) -> Tensor:
        """A transposed convolution's weight as the convolution's."""
        return split_into_phases(weight, self.groups, self.strides)

    def spread(self, values: Tensor) -> Tensor:
        """Values of the layer's channels for the convolution's."""
        if not values.ndim:
            return values
        return values.reshape(self.groups, 1, -1).expand(-1, self.phases, -1).reshape(-1)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution."""
        return _CONV[len(self.strides)](x, weight, bias, padding=self.padding, groups=self.groups)

    def interleave(self, x: Tensor, between: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        """Arrange the convolution's results, after ``between`` at each step.

        Channels come last meanwhile, as they do in onnxruntime's kernels: so blocks of memory are moved, not bytes.
        """
        rank = len(self.strides)
        if self.phases > 1:
            x = self._interleave_last(between(x).movedim(-1 - rank, -1), between)
            x = between(x).movedim(-1, -1 - rank)
        if any(chain(*self.cut)):
            x = between(x)[(..., *(slice(first, -last or None) for first, last in self.cut))]
        return x

    def _interleave_last(self, x: Tensor, between: Callable[[Tensor], Tensor]) -> Tensor:
        """Turn (…, places of each dimension, groups · phases · channels) into (…, results, groups · channels)."""
        rank, shape = len(self.strides), x.shape
        batch, groups = len(shape) - rank - 1, [self.groups] if self.groups > 1 else []
        places, channels = shape[batch:-1], shape[-1] // (self.phases * self.groups)
        x = between(x).reshape(*shape[:-1], *groups, *self.strides, channels)
        spread, last = batch + rank + len(groups), x.ndim - 1
        pairs = [(batch + d, spread + d) for d in range(rank)]
        x = between(x).permute(*range(batch), *chain(*pairs), *range(batch + rank, spread), last)
        results = [size * stride for size, stride in zip(places, self.strides, strict=True)]
        return between(x).reshape(*[-1] * batch, *results, channels * self.groups)


def can_interleave(layer: Any, call: fx.Node) -> bool:
    """Whether a call multiplies integers by the integers of a transposed convolution's weight, around zeros."""
    if type(layer) not in _TRANSPOSED or len(call.args) != 1 or call.kwargs.keys() - {"call"}:
        return False
    weight = layer.weight_quantizer
    plain = weight.uniform and weight.spec.symmetric and weight.method.axis in (None, 1) and weight.method.group is None
    return plain and not weight.spec.format.floating and all(quantizer.quantizes for quantizer in layer.calls)


def _along(kernel: int, stride: int, padding: int, output_padding: int) -> tuple[int, tuple[int, int]]:
    """The convolution's padding along a dimension, and how many results are cut at both ends."""
    reach = -(-kernel // stride) - 1
    ends = padding, stride * (reach + 1) + padding - kernel - output_padding
    outside = max(reach - min(ends) // stride, 0)
    return outside, (ends[0] - stride * (reach - outside), ends[1] - stride * (reach - outside))


def split_into_phases(weight: Tensor, groups: int, strides: Sequence[int]) -> Tensor:
    """The weight of a transposed convolution, (inputs, outputs of a group, *kernel), as that of the convolution.

    The result is (groups · phases · outputs, inputs of a group, *taps). Zeros fill kernels to a multiple of the stride.
    """
    rank = len(strides)
    lacking = [(0, -size % stride) for size, stride in zip(weight.shape[2:], strides, strict=True)]
    weight = F.pad(weight, list(chain(*reversed(lacking))))
    taps = [size // stride for size, stride in zip(weight.shape[2:], strides, strict=True)]
    inputs, outputs = weight.shape[0] // groups, weight.shape[1]
    parts = weight.reshape(groups, inputs, outputs, *chain(*zip(taps, strides, strict=True)))
    parts = parts.flip([3 + 2 * d for d in range(rank)])
    order = [0, *(4 + 2 * d for d in range(rank)), 2, 1, *(3 + 2 * d for d in range(rank))]
    return parts.permute(order).reshape(groups * prod(strides) * outputs, inputs, *taps).contiguous()


class InterleavedLayer(DeployedLayer):
    """A transposed convolution as a convolution; ``results`` quantize the result of each call.

    It has an input site if the quantizer is its own and not on the edge before it.
    """

    def __init__(
        self,
        layer: Any,
        way: Interleaving,
        results: Sequence[TensorQuantizer],
        weight_site: Site | None,
        input_site: Site | None,
    ) -> None:
        self.__dict__["way"] = way
        weight_site = weight_site and replace(weight_site, phases=(way.groups, *way.strides))
        super().__init__(layer, weight_site, input_site)
        self.results = nn.ModuleList(deployed(quantizer) for quantizer in results)

    def lay_out(
        self, weight: IntegerTensor | TableTensor, bias: Tensor | None, scales: Sequence[Tensor | None]
    ) -> tuple[IntegerTensor | TableTensor, Tensor | None, Sequence[Tensor | None]]:
        """The constants, for each phase."""
        if isinstance(weight, TableTensor):
            raise TypeError("a table of values is not split into phases")
        way, layer = self.way, self._layer[0]
        weight.integers, weight.axis = way.split(weight.integers), 0 if weight.scale.ndim else None
        weight.scale, weight.zero_point = (way.spread(layer.spread(p)) for p in (weight.scale, weight.zero_point))
        bias = bias if bias is None else way.spread(bias)
        return weight, bias, [scale if scale is None else way.spread(scale) for scale in scales]

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, call: int) -> Tensor:
        """Convolve and interleave; values are on the grid, and runtimes look for a quantizer after each step."""
        return self.way.interleave(self.way.convolve(x, weight, bias), self.results[call])

    def products(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # pyrefly: ignore
        return self.way.convolve(x, weight, bias)
