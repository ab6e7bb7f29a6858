"""The opset of a file: the lowest that can express the model, or a newer one that the user wants."""

from collections.abc import Iterator

import onnx_ir as ir
import onnxscript
import torch
from torch import nn

from bitwright.errors import ConfigError, ExportError
from bitwright.exporting.onnx.translate import packed_type, storage_type
from bitwright.exporting.parts import DeployedQuantizer, IntegerTensor, Part, parts_of

PLAIN, RICH = 18, 21  # opset 21 adds integers of 4 and 16 bits, fp8 without a zero point, and groups
BFLOAT = 22  # adds bfloat16 to convolutions and pools
NEWEST = max(int(name[5:]) for name in dir(onnxscript) if name.startswith("opset") and name[5:].isdigit())
_BYTES = (ir.DataType.UINT8, ir.DataType.INT8)


def opset_for(twin: nn.Module, wished: int | None = None, *, pack: bool = False) -> int:
    """The opset for a deployed model; with ``pack``, weights of few bits are stored in 4 bits."""
    if wished is None:
        return lowest_opset(twin, pack=pack)
    check_opset(wished)
    for needed, why in _needs(twin, pack):
        if needed > wished:
            raise ExportError(f"opset {wished} cannot express {why}, which needs {needed}; leave out opset_version")
    return wished


def check_opset(wished: int) -> None:
    """Refuse an opset that no model is written in."""
    if not PLAIN <= wished <= NEWEST:
        raise ConfigError(f"opset_version must be from {PLAIN} to {NEWEST}, not {wished}")


def lowest_opset(twin: nn.Module, *, pack: bool = False) -> int:
    """The lowest opset that can express a deployed model.

    In opset 21, onnxruntime 1.31 breaks int8 files: it repeats quantizers around pools and reshapes with their
    ``output_dtype``, and then turns int8 into uint8 everywhere but there.
    """
    return max((needed for needed, _ in _needs(twin, pack)), default=PLAIN)


def _needs(twin: nn.Module, pack: bool) -> Iterator[tuple[int, str]]:
    """Whatever needs more than the plain opset, and which opset."""
    for name, tensor in (*twin.named_parameters(), *twin.named_buffers()):
        if tensor.dtype == torch.bfloat16:
            yield BFLOAT, f"{name} in bfloat16"
    for name, part in sorted(parts_of(twin), key=lambda item: item[1].site is None):  # first those with a user's name
        if isinstance(part, IntegerTensor) and part.dtype == torch.bfloat16:
            yield BFLOAT, f"{name} in bfloat16"
        packed = packed_type(part) if pack else None
        if (kind := _rich_kind(part) or (packed and packed.name.lower())) is not None:
            yield RICH, f"{kind} for {part.site.name if part.site is not None else name}"


def _rich_kind(part: Part) -> str | None:
    """The feature of a part that the plain opset lacks; None if it lacks nothing."""
    if isinstance(part, IntegerTensor):
        plain = part.integers.dtype in (torch.int8, torch.uint8, torch.int32)
        return "groups" if part.group is not None else None if plain else _name(part.integers.dtype)
    if not isinstance(part, DeployedQuantizer) or not part.active:
        return None
    spec = part.spec
    if part.group is not None:
        return "groups"
    if spec.format.floating:
        return str(spec.format.name)
    kind = storage_type(spec.qmin, spec.qmax)[0]
    return None if kind in _BYTES else kind.name.lower()


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")
