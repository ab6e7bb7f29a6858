"""Parts: modules of a deployed model that a format writes in its own way.

While a part has a number, it appears in the graph as one operator with that number as its argument, which a format
looks
up: names do not survive an exporter's rewriting, but an operator's argument does. Its constants are not parameters or
buffers, because an exporter's work grows with the square of their count.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from bitwright.errors import ConfigError, ExportError
from bitwright.exporting.tables import table
from bitwright.numerics import dequantize, quantize_dequantize, wide
from bitwright.numerics.fp8 import fp8_quantize_dequantize
from bitwright.numerics.kernel_operator import LIBRARY
from bitwright.numerics.views import broadcast
from bitwright.quantizer import TensorQuantizer

# The tag keeps the exporter from computing a part of a constant: what it computes is known to the format only.
_UNKNOWN = (torch.Tag.nondeterministic_seeded,)
LIBRARY.define("part(Tensor x, int number) -> Tensor", tags=_UNKNOWN)
LIBRARY.define("stored(int number, int[] shape, ScalarType dtype) -> Tensor", tags=_UNKNOWN)


@torch.library.register_fake("bitwright::part", lib=LIBRARY)
def _(x: Tensor, number: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("bitwright::stored", lib=LIBRARY)
def _(number: int, shape: list[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


@dataclass(frozen=True)
class Site:
    """One place where a tensor is quantized.

    Attributes:
        quantizer: the qualified name of the quantizer in the model.
        name: the user's name for the tensor: the node, layer or input whose value it is.
        kind: whether it is computed, or a stored weight.
        spec: how it is quantized, as text.
        signed: whether its integers are.
        placed: whether it is in a graph, so that each run of the model must pass it.
        phases: the groups and strides of a transposed convolution whose weight is stored as that of a convolution.
    """

    quantizer: str
    name: str
    kind: Literal["activation", "weight"]
    spec: str
    signed: bool
    placed: bool = False
    phases: tuple[int, ...] = ()


class Part(nn.Module):
    """A module that a format writes in its own way.

    Attributes:
        number: its position among the parts of the model during export.
        site: what it quantizes; None if it quantizes nothing, or repeats another quantizer on values on the grid.
    """

    number: int | None = None
    site: Site | None = None

    def constants(self) -> dict[str, Tensor]:
        """The tensors that decide what it computes."""
        return {}

    def forward(self, x: Tensor) -> Tensor:
        """Apply the part to ``x``."""
        return self.compute(x) if self.number is None else torch.ops.bitwright.part(x, self.number)

    def compute(self, x: Tensor) -> Tensor:
        """Compute in torch."""
        return x


class KeepFloat(Part):
    """Changes nothing, but runtimes do not look past it.

    onnxruntime quantizes the weight of a float layer between quantized tensors unasked; OpenVINO moves scales through
    concatenations along other axes than channels, and computes wrong values.
    """


class DeployedQuantizer(Part):
    """One place where a tensor is quantized, with the scale and zero point in force."""

    def __init__(self, quantizer: TensorQuantizer, site: Site | None = None) -> None:
        super().__init__()
        self.spec, self.axis, self.group = quantizer.spec, quantizer.method.axis, quantizer.method.group
        self.active, self.site = quantizer.quantizes, site
        if self.active:
            self.scale, self.zero_point = (p.detach().clone() for p in quantizer.qparams())
        self.limits = quantizer.method.limits() if self.active else None

    @property
    def plain(self) -> bool:
        """Whether it quantizes, and clips to nothing but the grid."""
        return self.active and self.limits is None

    def constants(self) -> dict[str, Tensor]:
        """Scale and zero point, and the ends that values are clipped to before."""
        ends = {} if self.limits is None else dict(zip(("low", "high"), self.limits, strict=True))
        return {"scale": self.scale, "zero_point": self.zero_point, **ends} if self.active else {}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.active else x

    def compute(self, x: Tensor) -> Tensor:
        x = x if self.limits is None else x.clamp(*self.limits)
        if self.spec.format.floating:
            return fp8_quantize_dequantize(x, self.scale, self.spec.format.name, self.axis, self.group)
        limits = (self.spec.qmin, self.spec.qmax)
        return quantize_dequantize(x, self.scale, self.zero_point, *limits, self.axis, self.group)

    def extra_repr(self) -> str:
        return f"{self.spec}, axis {self.axis}, group {self.group}, {'on' if self.active else 'off'}"


class TableQuantizer(Part):
    """One place where a tensor is quantized to levels that are not evenly spaced.

    Attributes:
        axis: the axis that has a table for each channel, or None.
        bounds: the lowest value of each level but the first, (levels - 1,) or (channels, levels - 1).
        levels: the values of the levels, (levels,) or (channels, levels).
    """

    def __init__(self, quantizer: TensorQuantizer, site: Site | None = None) -> None:
        super().__init__()
        method = quantizer.method
        if method.group is not None:
            raise ExportError(
                f"the {_named(quantizer)} has a table of values for each group, which no file can express"
            )
        self.spec, self.axis, self.group, self.site = quantizer.spec, method.axis, None, site
        self.bounds, self.levels = table(quantizer)

    def constants(self) -> dict[str, Tensor]:
        return {"bounds": self.bounds, "levels": self.levels}

    def compute(self, x: Tensor) -> Tensor:
        if self.axis is None:
            return self.levels[torch.bucketize(wide(x).contiguous(), self.bounds, right=True)].to(x.dtype)
        rows = wide(x).movedim(self.axis, 0)
        places = torch.searchsorted(self.bounds, rows.flatten(1).contiguous(), right=True)
        return self.levels.gather(1, places).reshape(rows.shape).movedim(0, self.axis).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.spec}, axis {self.axis}"


class IntegerTensor(Part):
    """A constant stored as integers, in 4 bits if requested unless its reader needs bytes (not ``packs``)."""

    packs = True

    def __init__(
        self,
        integers: Tensor,
        scale: Tensor,
        zero_point: Tensor,
        axis: int | None,
        group: int | None = None,
        site: Site | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.integers, self.scale, self.zero_point = integers, scale, zero_point
        self.axis, self.group, self.site = axis, group, site

    def constants(self) -> dict[str, Tensor]:
        return {"integers": self.integers, "scale": self.scale, "zero_point": self.zero_point}

    def forward(self, x: Tensor | None = None) -> Tensor:
        """The constant's values; in place of a quantizer, it is called with its float twin."""
        if self.number is not None:
            return torch.ops.bitwright.stored(self.number, list(self.integers.shape), self.dtype)
        return dequantize(self.integers, self.scale, self.zero_point, self.axis, self.group).to(self.dtype)

    def extra_repr(self) -> str:
        return f"axis {self.axis}, group {self.group}"


class TableTensor(Part):
    """A constant stored as places in a table of values.

    Attributes:
        places: the index of each value's level in the table.
        levels: the table.
        scale: what levels are multiples of.
    """

    def __init__(self, weight: Tensor, quantizer: TensorQuantizer, site: Site | None) -> None:
        super().__init__()
        method = quantizer.method
        self.axis, self.group, self.site, self.dtype = method.axis, method.group, site, weight.dtype
        self.places, self.levels = quantizer.integers(weight), method.levels()
        self.scale = method.unit(*quantizer._known()).detach().clone()

    def constants(self) -> dict[str, Tensor]:
        return {"integers": self.places, "levels": self.levels, "scale": self.scale}

    def forward(self, x: Tensor | None = None) -> Tensor:
        if self.number is not None:
            return torch.ops.bitwright.stored(self.number, list(self.places.shape), self.dtype)
        return (self.levels[self.places.long()] * broadcast(self.scale, self.places, self.axis, self.group)).to(
            self.dtype
        )

    def extra_repr(self) -> str:
        return f"{len(self.levels)} levels, axis {self.axis}, group {self.group}"


class Multiply(nn.Module):
    """Multiplies by a constant."""

    def __init__(self, factor: Tensor) -> None:
        super().__init__()
        self.register_buffer("factor", factor.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor.to(x)


def deployed(quantizer: TensorQuantizer, site: Site | None = None) -> nn.Module:
    """The part that quantizes a computed tensor as a quantizer does."""
    kind = TableQuantizer if quantizer.quantizes and _has_table(quantizer) else DeployedQuantizer
    factor = quantizer.pre_quant_scale
    return kind(quantizer, site) if factor is None else nn.Sequential(Multiply(factor), kind(quantizer, site))


def as_integers(weight: Tensor, quantizer: TensorQuantizer, site: Site | None = None) -> "IntegerTensor | TableTensor":
    """Store a constant as the integers of its quantizer."""
    weight, factor = weight.detach(), quantizer.pre_quant_scale
    weight = weight if factor is None else weight * factor.to(weight)
    if _has_table(quantizer):
        return TableTensor(weight, quantizer, site)
    method = quantizer.method
    scale, zero_point = (p.detach().clone() for p in quantizer.qparams())
    return IntegerTensor(quantizer.integers(weight), scale, zero_point, method.axis, method.group, site, weight.dtype)


def _has_table(quantizer: TensorQuantizer) -> bool:
    """Whether a quantizer needs a table of values; raises if no file can express it."""
    if quantizer.axes:
        raise ExportError(f"the {_named(quantizer)} keeps ranges along several axes, which no file can express")
    if quantizer.method.uniform or quantizer.spec.format.floating:
        return False
    try:
        quantizer.method.levels()
    except ConfigError as error:
        raise ExportError(f"the {_named(quantizer)} has no uniform grid, and no table: {error}") from error
    return True


def _named(quantizer: TensorQuantizer) -> str:
    return f"quantizer of {quantizer.label or 'a tensor'} ({quantizer.method_name})"


def refuse_tables(model: nn.Module, why: str) -> None:
    """Refuse to write a deployed model in a format that has no tables of values."""
    for name, part in parts_of(model):
        if isinstance(part, TableQuantizer | TableTensor):
            place = part.site.name if part.site is not None else name
            raise ExportError(f"{place} has a table of values, {why}: export with 'onnx' or 'openvino'")


def parts_of(model: nn.Module) -> Iterator[tuple[str, Part]]:
    """The parts of a deployed model, with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Part))
