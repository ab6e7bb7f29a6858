"""Trials: one reason each why a runtime deviates. A new one is one function with ``@register_trial``.

A trial changes the operators around a deviating tensor, and says whether there was anything to change. One that
*prevents* runs in the runtime and in the reference: if they now agree, what it prevents is the reason. One that
*emulates* runs in the reference: if that now computes what the runtime does, what it emulates is the reason. One that
*sets* leaves the operators alone and runs them in the runtime with float parts in float32: if it now agrees with the
reference, that is the reason.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from bitwright.registry import Registry
from bitwright.verification.diagnosis.subject import Subject

TRIALS: Registry["Trial"] = Registry("trial")
Change = Callable[[Subject], bool]
How = Literal["prevents", "emulates", "sets"]
_LEAST = float(np.finfo(np.float32).min)
_SAFE = 64  # 255 · (64 + 64) fits 16 bits


@dataclass(frozen=True)
class Trial:
    """One reason, and the change that shows it.

    Attributes:
        name: the reason.
        words: the message if it is the reason.
        how: whether the change prevents it or emulates it, or it is prevented by settings.
        change: changes a subject; False if there is nothing to change.
        rank: lower ranks, the more specific reasons, are tried first.
    """

    name: str
    words: str
    how: How
    change: Change
    rank: int = 0


def register_trial(
    name: str, words: str, how: How, *, rank: int = 0, override: bool = False
) -> Callable[[Change], Change]:
    """File a change as a trial of a reason."""

    def decorate(change: Change) -> Change:
        TRIALS.register(name, override=override)(Trial(name, words, how, change, rank))
        return change

    return decorate


@register_trial("saturation", "sums of products saturate: with 7-bit weights it does not deviate", "prevents")
def seven_bits(subject: Subject) -> bool:
    """Halve 8-bit weights, whose pairs of products overflow 16 bits on CPUs that add them that way."""
    stored = _stored(subject, 1)
    if stored is None or stored.data_type != TensorProto.INT8:
        return False
    values = numpy_helper.to_array(stored)
    if np.abs(values.astype(np.int16)).max(initial=0) <= _SAFE:
        return False
    stored.CopyFrom(numpy_helper.from_array((values / 2).astype(np.int8), stored.name))
    return True


@register_trial("bias precision", "it rounds the bias: without a bias it does not deviate", "prevents")
def without_bias(subject: Subject) -> bool:
    """Set the bias to 0."""
    stored = _stored(subject, 2)
    if stored is None:
        return False
    stored.CopyFrom(numpy_helper.from_array(np.zeros_like(numpy_helper.to_array(stored)), stored.name))
    return True


@register_trial("bf16", "it computes in bfloat16: rounded that way, the values are the same", "emulates")
def in_bfloat16(subject: Subject) -> bool:
    """Round the layer's inputs and result to bfloat16."""
    layer = subject.layer
    if layer is None:
        return False
    name = layer.name
    for tensor in dict.fromkeys([*layer.input, layer.output[0]]):
        own = tensor == layer.output[0]
        narrow, wide = f"{tensor}/bf16", f"{tensor}/wide"
        cast = helper.make_node("Cast", [tensor], [narrow], f"{narrow}/{name}", to=TensorProto.BFLOAT16)
        back = helper.make_node("Cast", [narrow], [wide], f"{wide}/{name}", to=TensorProto.FLOAT)
        subject.insert(tensor, wide, cast, back, reader="" if own else name)
    return True


@register_trial("bf16 float parts", "it computes float parts in bfloat16: set to float32, it does not deviate", "sets")
def as_it_is(subject: Subject) -> bool:
    """Change nothing: the runtime is run with float parts in float32."""
    return True


@register_trial("double rounding", "it rounds twice: with one more rounding, the values are the same", "emulates")
def rounded_before(subject: Subject) -> bool:
    """Round what the layer makes, and what goes into it unrounded, in the steps of a tensor that it reads."""
    layer, nodes = subject.layer, subject.nodes
    read = [nodes[i] for i in layer.input if i in nodes] if layer is not None else []
    steps = next((list(n.input[1:]) for n in read if n.op_type == "DequantizeLinear"), None)
    if layer is None or steps is None:
        return False
    unrounded = [n.output[0] for n in read if n.op_type != "DequantizeLinear"]
    for tensor in unrounded or [layer.output[0]]:
        integers, values = f"{tensor}/rounded", f"{tensor}/read"
        quantize = helper.make_node("QuantizeLinear", [tensor, *steps], [integers], integers)
        dequantize = helper.make_node("DequantizeLinear", [integers, *steps], [values], values)
        subject.insert(tensor, values, quantize, dequantize)
    return True


@register_trial(
    "re-quantization", "it scales and rounds the result in integers: without its quantizer it does not deviate",
    "prevents", rank=1,
)  # fmt: skip
def apart_from_quantizer(subject: Subject) -> bool:
    """Keep the layer from being fused with the quantizer of its result."""
    layer = subject.layer
    if layer is not None:
        _guard(subject, layer.output[0])
    return layer is not None


@register_trial("integer arithmetic", "its integer kernel differs: in float it does not deviate", "prevents", rank=2)
def in_float(subject: Subject) -> bool:
    """Keep the layer from being fused with the quantizers of its inputs."""
    layer = subject.layer
    if layer is None:
        return False
    computed = [i for i in dict.fromkeys(layer.input) if i in subject.nodes]
    for tensor in computed:
        _guard(subject, tensor, layer.name)
    return bool(computed)


def _guard(subject: Subject, tensor: str, reader: str = "") -> None:
    """Put an operator behind a tensor that changes nothing and that nothing is fused with."""
    least, made = f"{tensor}/least", f"{tensor}/guarded"
    subject.model.graph.initializer.append(numpy_helper.from_array(np.array(_LEAST, np.float32), least))
    subject.insert(tensor, made, helper.make_node("Max", [tensor, least], [made], made), reader=reader)


def _stored(subject: Subject, position: int) -> TensorProto | None:
    """The constant behind an input of the layer, whether dequantized, transposed, or direct."""
    layer, nodes, constants = subject.layer, subject.nodes, subject.constants
    name = layer.input[position] if layer is not None and len(layer.input) > position else ""
    while name in nodes and nodes[name].op_type in ("DequantizeLinear", "Transpose"):
        name = nodes[name].input[0]
    return constants.get(name)
