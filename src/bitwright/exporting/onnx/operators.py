"""Operators that torch's exporter refuses or gets wrong, or that runtimes refuse: pools, padding, attention, ….

In ``ceil_mode`` torch lets the last window reach beyond the padding, unless it would begin there. ONNX computes other
sizes, so the file has more padding at the end instead:

    reach = dilation · (kernel - 1) + 1                       windows = ceil((size + 2 · padding - reach) / stride) + 1
    what is beyond the padding = (windows - 1) · stride + reach - (size + 2 · padding)

Padding counts in an average if ``count_include_pad`` says so; values beyond it never do.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnxscript.function_libs.torch_lib.ops.core import (
    aten_conv1d,
    aten_conv2d,
    aten_conv3d,
    aten_convolution,
    aten_split,
    aten_split_with_sizes,
)
from onnxscript.function_libs.torch_lib.ops.nn import aten_gelu, aten_pad, aten_scaled_dot_product_attention

from bitwright.exporting.onnx.adaptive import adaptive_translations
from bitwright.exporting.onnx.grouped import grouped_translations
from bitwright.exporting.onnx.nearest import nearest_translations
from bitwright.exporting.onnx.plain_rnn import rnn_translations
from bitwright.nn.operators.base import each_dimension

Translation = Callable[..., Any]
_FAR = 2**62
_LOWEST = torch.finfo(torch.float32).min


def operator_translations(op: Any) -> dict[Translation, Translation]:
    """A part of the table that ``torch.onnx.export`` takes."""

    def pad(x: Any, pad: Sequence[Any], mode: str = "constant", value: float | None = None) -> Any:
        return _pad_around(op, x, pad) if mode == "circular" else aten_pad(x, pad, mode, value)

    aten = torch.ops.aten
    table: dict[Translation, Translation] = {
        **adaptive_translations(op),
        **grouped_translations(op),
        **nearest_translations(op),
        **rnn_translations(op),
        aten.pad.default: pad,
        aten.gelu.default: _gelu(op),
        aten.scaled_dot_product_attention.default: _attention(op),
        aten.conv1d.default: _conv(op, 1, aten_conv1d),
        aten.conv2d.default: _conv(op, 2, aten_conv2d),
        aten.conv3d.default: _conv(op, 3, _conv3d),
        aten.split.Tensor: _split(op, aten_split),
        aten.split_with_sizes.default: _split(op, aten_split_with_sizes),
    }
    for rank, averages, largest in (
        (1, aten.avg_pool1d, aten.max_pool1d),
        (2, aten.avg_pool2d, aten.max_pool2d),
        (3, aten.avg_pool3d, aten.max_pool3d),
    ):
        table[averages.default] = _average(op, rank)
        table[largest.default] = _largest(op, rank)
    return table


def _gelu(op: Any) -> Translation:
    """Halve x · (1 + erf(x / √2)) at the end: in this order runtimes make one operator of it and the bias before it."""

    def gelu(x: Any, approximate: str = "none") -> Any:
        if approximate != "none":
            return aten_gelu(x, approximate)
        root, one, half = (op.CastLike(op.Constant(value_float=v), x) for v in (math.sqrt(2), 1.0, 0.5))
        return op.Mul(op.Mul(x, op.Add(op.Erf(op.Div(x, root)), one)), half)

    return gelu


def _conv(op: Any, rank: int, otherwise: Translation) -> Translation:
    """Apply the stride of a float kernel of size 1 after its padding; OpenVINO would apply it before."""

    def conv(
        x: Any,
        weight: Any,
        bias: Any = None,
        stride: Sequence[int] = (1,),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        groups: int = 1,
    ) -> Any:
        steps, pads = each_dimension(stride, rank), each_dimension(padding, rank)
        settings = {"padding": pads, "dilation": each_dimension(dilation, rank), "groups": groups}
        points = all(size == 1 for size in weight.shape[2:])
        stored = weight.producer() is not None and weight.producer().op_type == "DequantizeLinear"
        if stored or not points or not any(step > 1 and pad for step, pad in zip(steps, pads, strict=True)):
            return otherwise(x, weight, bias, stride=steps, **settings)
        whole = otherwise(x, weight, bias, stride=[1] * rank, **settings)
        bounds = ([0] * rank, [_FAR] * rank, list(range(-rank, 0)), steps)
        return op.Slice(whole, *(op.Constant(value_ints=each) for each in bounds))

    return conv


def _conv3d(x: Any, weight: Any, bias: Any = None, *settings: Any, **named: Any) -> Any:
    """Leave out a missing bias, for which torch's exporter writes a matrix of zeros."""
    if bias is not None:
        return aten_conv3d(x, weight, bias, *settings, **named)
    given = {**dict(zip(("stride", "padding", "dilation", "groups"), settings, strict=False)), **named}
    return aten_convolution(x, weight, None, **{key: given[key] for key in given if key != "transposed"})


def _attention(op: Any) -> Translation:
    """Reshape attention on fewer or more dimensions to the four that torch's exporter expects."""

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *rest: Any, **named: Any) -> Any:
        missing = 4 - len(query.shape)
        if missing > 0:  # a mask still fits, because it is aligned at the end
            axes = op.Constant(value_ints=list(range(missing)))
            raised = [_raised(op, x, axes, missing) for x in (query, key, value)]
            return op.Squeeze(aten_scaled_dot_product_attention(*raised, attn_mask, *rest, **named), axes)
        if missing < 0:
            leading = _leading_sizes(op, query, key, value)
            merged = [_merged(op, x, leading) for x in (query, key, value)]
            mask = attn_mask if attn_mask is None or len(attn_mask.shape) < 4 else _merged(op, attn_mask, leading)
            result = aten_scaled_dot_product_attention(*merged, mask, *rest, **named)
            return op.Reshape(result, op.Concat(leading, _sizes(op, result, -3, _FAR), axis=0))
        return aten_scaled_dot_product_attention(query, key, value, attn_mask, *rest, **named)

    return attention


def _leading_sizes(op: Any, *tensors: Any) -> Any:
    """The sizes before (heads, length, features), where tensors may have 1 and are repeated."""
    each = [_sizes(op, x, 0, -3) for x in tensors]
    same = all(list(x.shape[:-3]) == list(tensors[0].shape[:-3]) for x in tensors)
    return each[0] if same else op.Max(*each)


def _sizes(op: Any, x: Any, first: int, end: int) -> Any:
    return op.Slice(op.Shape(x), op.Constant(value_ints=[first]), op.Constant(value_ints=[end]))


def _merged(op: Any, x: Any, leading: Any) -> Any:
    """Repeat a tensor over the leading sizes, and make them one: (samples, heads, length, features)."""
    last = _sizes(op, x, -3, _FAR)
    whole = op.Expand(x, op.Concat(leading, last, axis=0))
    made = op.Reshape(whole, op.Concat(op.Constant(value_ints=[-1]), last, axis=0))
    made.shape, made.type = ir.Shape([None, *x.shape[-3:]]), x.type
    return made


def _raised(op: Any, x: Any, axes: Any, missing: int) -> Any:
    made = op.Unsqueeze(x, axes)
    made.shape, made.type = ir.Shape([1] * missing + list(x.shape)), x.type
    return made


def _split(op: Any, otherwise: Translation) -> Translation:
    """Write the pieces of a tensor as slices: OpenVINO does not support the sequences that torch's exporter writes."""

    def split(x: Any, sizes: Any, dim: int = 0) -> Any:
        whole = x.shape[dim]
        if isinstance(sizes, int):
            if not isinstance(whole, int):
                raise ValueError("a split into equal pieces needs a fixed size, which decides how many there are")
            sizes = [min(sizes, whole - at) for at in range(0, whole, sizes)]
        if not isinstance(sizes, Sequence) or not all(isinstance(size, int) for size in sizes):
            return otherwise(x, sizes, dim)
        ends = list(itertools.accumulate(sizes, initial=0))
        bounds = [[op.Constant(value_ints=[at]) for at in pair] for pair in itertools.pairwise(ends)]
        return tuple(op.Slice(x, first, end, op.Constant(value_ints=[dim])) for first, end in bounds)

    return split


def _average(op: Any, rank: int) -> Translation:
    def average_pool(
        x: Any,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        windows = _Windows(x, rank, kernel_size, stride, padding, (1,), ceil_mode)
        beyond = any(windows.beyond)
        whole = count_include_pad or divisor_override is not None
        settings = {**windows.attributes(), "count_include_pad": int(whole)}
        out = windows.on_batch(op, x, lambda batch: op.AveragePool(batch, **settings))
        if divisor_override is not None:
            factor: Any = math.prod(windows.kernel) / divisor_override
        elif whole and beyond:
            factor = windows.all_to_counted()
        else:
            return out
        return op.Mul(out, op.Constant(value=ir.tensor(torch.as_tensor(factor, dtype=torch.float32))))

    return average_pool


def _largest(op: Any, rank: int) -> Translation:
    def max_pool(
        x: Any,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        ceil_mode: bool = False,
    ) -> Any:
        windows = _Windows(x, rank, kernel_size, stride, padding, dilation, ceil_mode)
        settings = {**windows.attributes(), "dilations": windows.dilation}
        if any(end >= kernel for end, kernel in zip(settings["pads"][rank:], windows.kernel, strict=True)):
            x = windows.pad_beyond(op, x)  # onnxruntime refuses padding as wide as the kernel, dilated or not
            settings["pads"] = [*windows.padding, *windows.padding]
        return windows.on_batch(op, x, lambda batch: op.MaxPool(batch, **settings)[0])

    return max_pool


class _Windows:
    """The windows of a pool along each dimension, and how far the last one reaches beyond the padding."""

    def __init__(self, x: Any, rank: int, *settings: Any) -> None:
        *places, self.ceil_mode = settings
        self.kernel, stride, self.padding, self.dilation = (each_dimension(p, rank) for p in places)
        self.stride = stride or self.kernel
        self.batched = len(x.shape) == rank + 2
        self.sizes = list(x.shape)[-rank:]
        self.beyond = [self._beyond(d) for d in range(rank)]

    def _beyond(self, d: int) -> int:
        if not self.ceil_mode:
            return 0
        size, stride, padding = self.sizes[d], self.stride[d], self.padding[d]
        if not isinstance(size, int):
            if stride == 1:
                return 0
            raise ValueError("a pool with ceil_mode needs a fixed size: its last window depends on it")
        span = size + 2 * padding - self.dilation[d] * (self.kernel[d] - 1) - 1
        last = -(-span // stride) * stride
        return max(last - span, 0) if last < size + padding else 0

    def attributes(self) -> dict[str, Any]:
        ends = [p + b for p, b in zip(self.padding, self.beyond, strict=True)]
        return {"kernel_shape": self.kernel, "strides": self.stride, "pads": [*self.padding, *ends]}

    def pad_beyond(self, op: Any, x: Any) -> Any:
        """Pad as far as the last windows reach beyond the padding, with values that are never the largest."""
        fixed = [0] * (len(x.shape) - len(self.beyond))
        pads = op.Constant(value_ints=[*fixed, *(0 for _ in self.beyond), *fixed, *self.beyond])
        lowest = op.Constant(value_float=_LOWEST)
        return op.Pad(op.Max(x, lowest), pads, lowest)  # behind Max, OpenVINO does not mistake it for an integer

    def all_to_counted(self) -> torch.Tensor:
        """The ratio of all values in each window to those not beyond the padding."""
        factor = torch.ones(())
        for size, kernel, stride, padding, beyond in zip(
            self.sizes, self.kernel, self.stride, self.padding, self.beyond, strict=True
        ):
            first = torch.arange(-padding, size + padding + beyond - kernel + 1, stride)
            factor = factor.unsqueeze(-1) * (kernel / ((first + kernel).clamp(max=size + padding) - first))
        return factor

    def on_batch(self, op: Any, x: Any, pool: Translation) -> Any:
        """Pool with a batch dimension, which ONNX needs."""
        if self.batched:
            return pool(x)
        axes = op.Constant(value_ints=[0])
        return op.Squeeze(pool(op.Unsqueeze(x, axes)), axes)


def _pad_around(op: Any, x: Any, pad: Sequence[int]) -> Any:
    """Wrap a tensor: its end before its start, and its start after its end; negative padding crops first."""

    def cut(source: Any, axis: int, first: int, end: int) -> Any:
        return op.Slice(source, *(op.Constant(value_ints=[at]) for at in (first, end, axis)))

    rank = len(x.shape)
    for d, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        axis = rank - 1 - d
        if min(before, after) < 0:
            x = cut(x, axis, max(-before, 0), min(after, 0) or _FAR)
        pieces = [cut(x, axis, -before, _FAR)] if before > 0 else []
        pieces += [x, cut(x, axis, 0, after)] if after > 0 else [x]
        x = op.Concat(*pieces, axis=axis) if len(pieces) > 1 else x
    return x
