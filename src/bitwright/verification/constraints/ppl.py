"""OpenPPL: what ppl.nn's parser of quantization parameters reads, and what ppq writes for it."""

from collections.abc import Iterator

from bitwright.verification.constraints.base import Finding, register_constraint
from bitwright.verification.constraints.shared import channel_scales, of_bits
from bitwright.verification.constraints.view import View

_SOURCE = "OpenPPL ppl.nn, quant_param_parser.cc; ppq, ppl exporter"


register_constraint("ppl-scales", source=_SOURCE)(channel_scales)


@register_constraint("ppl-weights", source=_SOURCE)
def weights(view: View) -> Iterator[Finding]:
    """Weights have 8 bits."""
    yield from of_bits(view, "weight", (8,), "uint8 affine channel:0")


@register_constraint("pplcuda-activations", source=_SOURCE)
def narrow(view: View) -> Iterator[Finding]:
    """On NVIDIA GPUs computed tensors have 8 bits."""
    yield from of_bits(view, "activation", (8,), "uint8 affine tensor")


@register_constraint("pplw8a16-activations", source=_SOURCE)
def wide(view: View) -> Iterator[Finding]:
    """With wide activations computed tensors have 16 bits."""
    yield from of_bits(view, "activation", (16,), "uint16 affine tensor")
