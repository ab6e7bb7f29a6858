"""Tengine: what its quantization tool reads for uint8."""

from collections.abc import Iterator

from bitwright.verification.constraints.base import Finding, register_constraint
from bitwright.verification.constraints.shared import of_types, tensor_scales
from bitwright.verification.constraints.view import View

_SOURCE = "OAID/Tengine, tools/quantize"
_SPEC = "uint8 affine tensor"


@register_constraint("tengine-types", source=_SOURCE)
def types(view: View) -> Iterator[Finding]:
    """Weights and computed tensors are uint8."""
    yield from of_types(view, "activation", ("uint8",), _SPEC)
    yield from of_types(view, "weight", ("uint8",), _SPEC)


register_constraint("tengine-scales", source=_SOURCE)(tensor_scales)


@register_constraint("tengine-names", source=_SOURCE)
def names(view: View) -> Iterator[Finding]:
    """Names of tensors have no space: in the scale file, a name ends at the first one."""
    for t in view.of_kind("activation"):
        if " " in t.source:
            yield Finding(t.source, "has a space in its name", "name the module or input without spaces")


@register_constraint("tengine-outputs", source=_SOURCE)
def outputs(view: View) -> Iterator[Finding]:
    """What the network returns is quantized, too."""
    quantized = {name for t in view.tensors for name in t.results}
    for name in view.outputs:
        maker = view.makers.get(name)
        if name not in quantized and maker is not None and any(i in quantized for i in maker.input):
            fix = "ask for its result as 'uint8 affine tensor' with a rule"
            yield Finding(name, "is a result in float, computed from quantized tensors", fix)
