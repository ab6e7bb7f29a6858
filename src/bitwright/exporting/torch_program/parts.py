"""The parts of a deployed model as torch's own quantizers, which inductor joins with oneDNN's integer kernels."""

from typing import Any

import torch
from torch import Tensor, nn

from bitwright.errors import ExportError
from bitwright.exporting.modules import GlobalAveragePool
from bitwright.exporting.parts import DeployedQuantizer, IntegerTensor, KeepFloat, Part, parts_of, refuse_tables
from bitwright.graph.names import replace_modules
from bitwright.torch_internals import decomposed_quantizers

_TYPES = {(0, 255): torch.uint8, (-128, 127): torch.int8, (0, 65535): torch.uint16, (-32768, 32767): torch.int16}


def lower(model: nn.Module) -> None:
    """Put torch's quantizers in the place of a deployed model's parts."""
    refuse_tables(model, "and a torch program has only evenly spaced integers")
    made: dict[Any, nn.Module] = {part: _lowered(name, part) for name, part in parts_of(model)}
    made |= {module: AveragePlanes() for module in model.modules() if isinstance(module, GlobalAveragePool)}
    replace_modules(model, made)


def _lowered(name: str, part: Part) -> nn.Module:
    if isinstance(part, KeepFloat):
        return nn.Identity()
    place = part.site.name if part.site is not None else name
    if getattr(part, "group", None) is not None:
        raise ExportError(f"the format torch cannot express groups of scales, which {place} has: export with 'onnx'")
    if isinstance(part, DeployedQuantizer) and not part.active:
        return nn.Identity()
    if isinstance(part, DeployedQuantizer) and not part.spec.format.floating:
        return QuantizeDequantize(part)
    if isinstance(part, IntegerTensor) and not part.integers.is_floating_point():
        return StoredValues(part) if part.integers.dtype == torch.int32 else StoredIntegers(part)
    raise ExportError(f"the format torch has only integers, and {place} is something else: export with 'onnx'")


class AveragePlanes(nn.Module):
    """Adaptive average pooling to a single value, by an operator of torch."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        return x.mean(tuple(range(2, x.ndim)), keepdim=True)


class QuantizeDequantize(nn.Module):
    """A tensor is rounded to integers, and back."""

    def __init__(self, part: DeployedQuantizer) -> None:
        super().__init__()
        spec = part.spec
        fits = ((low, high) for low, high in _TYPES if low <= spec.qmin and spec.qmax <= high)
        self.limits = (spec.qmin, spec.qmax, _TYPES[next(fits)])
        self.axis = part.axis
        if part.axis is None:
            self.scale, self.point = float(part.scale), int(part.zero_point)
        else:
            self.register_buffer("scales", part.scale.float())
            self.register_buffer("points", part.zero_point.long())

    def forward(self, x: Tensor) -> Tensor:
        ops = decomposed_quantizers()
        if self.axis is None:
            numbers = (self.scale, self.point, *self.limits)
            return ops.dequantize_per_tensor.default(ops.quantize_per_tensor.default(x, *numbers), *numbers)
        channels = (self.scales, self.points, self.axis, *self.limits)
        return ops.dequantize_per_channel.default(ops.quantize_per_channel.default(x, *channels), *channels)


class StoredIntegers(nn.Module):
    """A constant stored as integers."""

    def __init__(self, part: IntegerTensor) -> None:
        super().__init__()
        self.axis = part.axis
        kind = part.integers.dtype
        self.limits = (torch.iinfo(kind).min, torch.iinfo(kind).max, kind)
        self.register_buffer("integers", part.integers.clone())
        if part.axis is None:
            self.scale, self.point = float(part.scale), int(part.zero_point)
        else:
            self.register_buffer("scales", part.scale.float())
            self.register_buffer("points", part.zero_point.long())

    def forward(self, x: Tensor | None = None) -> Tensor:
        ops = decomposed_quantizers()
        if self.axis is None:
            return ops.dequantize_per_tensor.default(self.integers, self.scale, self.point, *self.limits)
        channels = (self.scales, self.points, self.axis, *self.limits)
        return ops.dequantize_per_channel.default(self.integers, *channels)


class StoredValues(nn.Module):
    """An int32 bias: its values, since inductor's kernels take a bias in float32."""

    def __init__(self, part: IntegerTensor) -> None:
        super().__init__()
        self.register_buffer("values", part())

    def forward(self, x: Tensor | None = None) -> Tensor:
        return self.values
