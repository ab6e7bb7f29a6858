"""Kinds of QAT layers: which method and observer quantize the weight and the input, given a layer's options."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from bitwright.compat.quantrans.quantops.options import COMMON, FLOAT_BITS, OFFSETS, STARTS, Options, Qmodes

_STARTS = {1: "LSQPlusObserver", 2: "LSQObserver", 3: "MSEObserver"}


@dataclass(frozen=True)
class Plan:
    """How one tensor is quantized; with ``follow``, training uses the range of each tensor."""

    spec: str
    observer: str = "MinMaxObserver"
    method: str = "FixedFakeQuantize"
    method_options: dict[str, Any] = field(default_factory=dict)
    follow: bool = False


@dataclass(frozen=True)
class Kind:
    """A way of quantizing a layer, whatever its operator; ``defaults`` are those that differ from Options'."""

    title: str
    weight: Callable[[Options], Plan]
    activation: Callable[[Options], Plan]
    options: frozenset[str] = COMMON
    defaults: dict[str, Any] = field(default_factory=dict)

    def plans(self, options: Options) -> tuple[Plan, Plan]:
        """How the weight and the input are quantized; a tensor that stays float counts as eight bits."""
        bits = [8 if wanted == FLOAT_BITS else wanted for wanted in (options.num_bit_w, options.num_bit_a)]
        known = replace(options, num_bit_w=bits[0], num_bit_a=bits[1])
        weight = self.weight(known)
        by_kernel = replace(weight, spec=f"{weight.spec} channel:0") if options.q_mode is Qmodes.kernel_wise else weight
        return by_kernel, self.activation(known)


def _lsq_plus(bits: int, observer: str, offset: bool, signed: bool, scaled: bool) -> Plan:
    spec = f"{'int' if signed else 'uint'}{bits} {'affine' if offset else 'symmetric'}"
    return Plan(spec, observer, "LSQPlusFakeQuantize", {"use_grad_scaling": scaled})


def _lsq_plus_weight(o: Options) -> Plan:
    return _lsq_plus(o.num_bit_w, _STARTS[o.init_method_w], o.add_offset_w, True, o.scale_grad)


def _lsq_plus_activation(o: Options) -> Plan:
    return _lsq_plus(o.num_bit_a, _STARTS[o.init_method_a], o.add_offset_a, o.signed, o.scale_grad)


def _dorefa_activation(o: Options) -> Plan:
    # Eight bits are for first and last layers, whose inputs are not in [0, 1]: their range is that of the data.
    return Plan("uint8 affine") if o.num_bit_a == 8 else Plan(f"uint{o.num_bit_a} symmetric", method="dorefa")


LSQ = Kind(
    "learned step size",
    lambda o: Plan(f"int{o.num_bit_w}", "LSQObserver", "lsq"),
    lambda o: Plan(f"{'int' if o.signed else 'uint'}{o.num_bit_a} symmetric", "LSQObserver", "lsq"),
    COMMON | {"signed"},
)
LSQ_PLUS = Kind("LSQ+: learned step size and offset", _lsq_plus_weight, _lsq_plus_activation, COMMON | OFFSETS)
LSQD_PLUS = Kind(
    "LSQ+ with a choice of initialisation", *(LSQ_PLUS.weight, LSQ_PLUS.activation), COMMON | OFFSETS | STARTS
)
DSQ = Kind(
    "differentiable soft quantization with learned ends and temperature",
    lambda o: Plan(f"int{o.num_bit_w} affine", method="dsq"),
    lambda o: Plan(f"uint{o.num_bit_a} affine", method="dsq"),
    defaults={"num_bit_w": 8, "num_bit_a": 8},
)
DOREFA = Kind(
    "DoReFa: tanh-normalised weight, input clipped to [0, 1] (8 bits: to the range of the first batch)",
    lambda o: Plan(f"int{o.num_bit_w}", method="dorefa", method_options={"normalize": True}),
    _dorefa_activation,
)
APOT = Kind(
    "additive powers of two, of the normalised weight",
    lambda o: Plan(f"int{o.num_bit_w}", method="apot", method_options={"weight_norm": True}),
    lambda o: Plan(f"uint{o.num_bit_a} symmetric", method="apot"),
    defaults={"num_bit_w": 5, "num_bit_a": 5},
)
EIGHT_BIT = Kind(
    "eight bits by the largest magnitude, for first and last layers",
    lambda o: Plan("int8 narrow", follow=True),
    lambda o: Plan("int8 narrow"),
    COMMON - {"num_bit_w", "num_bit_a"},
    {"num_bit_w": 8, "num_bit_a": 8, "quant_activation": False},
)
