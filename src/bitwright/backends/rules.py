"""The groups of settings of a Backend: rules on tensors, on operators, and on folding."""

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator
from torch import fx

from bitwright.methods import METHODS
from bitwright.nn.operators import OPERATORS
from bitwright.observers import OBSERVERS
from bitwright.registry import Registry
from bitwright.spec import NumberFormat, PerChannel, PerTensor, QuantSpec
from bitwright.validation import SpecText, Strict

Condition = Callable[[fx.Node], str | None]
IN_PYTHON = ("conditions", "unneeded")
"""The rules on operators that hold a Condition by the operator, which plain data cannot."""

Granularity = Literal["tensor", "channel", "group"]
Scheme = Literal["symmetric", "affine"]


def _known(registry: Registry[Any]) -> AfterValidator:
    """Refuse a name that a registry does not know."""

    def check(name: str) -> str:
        registry.get(name)
        return name

    return AfterValidator(check)


def _operators(given: object) -> object:
    """Replace globs by the operators that match, in a collection or in the keys of a mapping."""
    if isinstance(given, Mapping):
        return {name: value for pattern, value in given.items() for name in _matching(pattern)}
    if isinstance(given, Iterable) and not isinstance(given, str):
        return [name for pattern in given for name in _matching(pattern)]
    return given


def _matching(pattern: object) -> list[Any]:
    found = OPERATORS.names(pattern) if isinstance(pattern, str) and set(pattern) & set("*?[") else []
    return found or [pattern]


Operator = Annotated[str, _known(OPERATORS)]
Operators = Annotated[frozenset[Operator], BeforeValidator(_operators)]
ByOperator = BeforeValidator(_operators)
Place = Annotated[
    Literal["inputs", "outputs", "both"],
    BeforeValidator(lambda given: ("both" if given else "inputs") if isinstance(given, bool) else given),
]


class TensorRules(Strict):
    """Which tensors of one kind a target supports, and the default unless the recipe says otherwise.

    A plain string instead of these rules is the spec.
    """

    spec: SpecText | None = None
    """What they look like. A channel axis means the output channels, wherever an operator has them. None: the recipe
    must say."""
    observer: Annotated[str, _known(OBSERVERS)] = "MinMaxObserver"
    """Name of the observer that finds the range."""
    method: Annotated[str, _known(METHODS)] = "FixedFakeQuantize"
    """Name of the method that rounds."""
    formats: frozenset[str] = frozenset()
    """Number formats that the target has; empty means any."""
    granularities: frozenset[Granularity] = frozenset({"tensor"})
    """What can have a scale of its own: the tensor, a channel, a group."""
    schemes: frozenset[Scheme] = frozenset({"symmetric", "affine"})
    """Whether zero points are 0 (symmetric), free (affine), or either."""
    power_of_two: bool = False
    """Whether every scale must be a power of two."""
    narrow: bool = False
    """Whether the lowest integer must be left out."""

    @model_validator(mode="before")
    @classmethod
    def _text_is_a_spec(cls, given: object) -> object:
        return {"spec": given} if isinstance(given, str | QuantSpec) else given

    @field_validator("formats")
    @classmethod
    def _formats_exist(cls, names: frozenset[str]) -> frozenset[str]:
        return frozenset(NumberFormat(name).name for name in names)

    def why_not(self, spec: QuantSpec, kind: str) -> str | None:
        """Why a target does not support a spec for this ``kind`` of tensors; None if it does."""
        if self.formats and spec.format.name not in self.formats:
            return f"has no {kind} in {spec.format}; it has {listed(self.formats)}"
        granularity = granularity_of(spec)
        if granularity not in self.granularities:
            if kind == "activations" and self.granularities == {"tensor"}:
                return f"needs one scale per activation tensor, not '{spec}'"
            allowed = listed(self.granularities, " and per ")
            return f"has no scales per {granularity} for {kind} ('{spec}'); it has them per {allowed}"
        if ("symmetric" if spec.symmetric else "affine") not in self.schemes:
            return f"needs {listed(self.schemes, ' or ')} {kind}, not '{spec}'"
        return self._lacks(spec, kind)

    def _lacks(self, spec: QuantSpec, kind: str) -> str | None:
        if self.power_of_two and not spec.power_of_two:
            return f"needs scales that are powers of two ('{spec}' lacks the word 'pot')"
        if self.narrow and not spec.narrow:
            return f"has no {kind} of {spec.qmin} ('{spec}' lacks the word 'narrow')"
        return None


class WeightRules(TensorRules):
    """Which weights a target supports."""

    granularities: frozenset[Granularity] = frozenset({"tensor", "channel"})
    """What can have a scale of its own: the tensor, a channel, a group."""
    schemes: frozenset[Scheme] = frozenset({"symmetric"})
    """Whether zero points are 0 (symmetric), free (affine), or either."""
    used_bits: Mapping[int, int] = Field(default_factory=dict)
    """Bits that a weight uses in place of those asked for, such as 7 for 8."""


class ActivationRules(TensorRules):
    """Which activations a target supports."""

    write_unsigned: bool = False
    """Whether int8 activations are written as uint8, shifted by 128: the same values as other integers."""


class OperatorRules(Strict):
    """Which operators a target runs in integers, and how. A glob such as ``conv?d`` includes all that match."""

    integer: Annotated[Mapping[Operator, Place], ByOperator] = Field(default_factory=dict)
    """Operators that run in integers, and where they have quantizers: ``inputs`` (their result may stay float where
    nothing needs it quantized), ``outputs``, or ``both``. True is ``both``, False is ``inputs``."""
    fused: Operators = frozenset()
    """Activations that the target computes as part of the operator before them."""
    unfused: Operators = frozenset()
    """Operators that no activation is fused with."""
    merged: Annotated[Mapping[Operator, Operators], ByOperator] = Field(default_factory=dict)
    """For an operator, those before it that have no quantizer between them and it."""
    absorbed: Annotated[Mapping[Operator, Operators], ByOperator] = Field(default_factory=dict)
    """For an operator, those that compute it along with themselves: the result of one of them has no quantizer before
    it, if nothing else reads it. The other operands have theirs."""
    inputs: Annotated[Mapping[Operator, SpecText], ByOperator] = Field(default_factory=dict)
    """For an operator, what its inputs look like if not like the target's other activations. Symmetric ones that cannot
    be negative are unsigned. Rules of the recipe that name the operator come first."""
    wide: Operators = frozenset()
    """Operators on computed tensors that run in integers only if the recipe's weights use all their bits: on other CPUs
    their products would overflow."""
    numbers: Operators = frozenset()
    """Operators that run in integers even if one operand is a plain number."""
    share_inputs: Operators = frozenset()
    """Operators whose inputs must all have one scale, which their result shares if they ask for it."""
    ranges: Annotated[Mapping[Operator, tuple[float, float]], ByOperator] = Field(default_factory=dict)
    """The lowest and highest value of results whose range the target fixes, whatever their values are."""
    reasons: Annotated[Mapping[Operator, str], ByOperator] = Field(default_factory=dict)
    """Why an operator stays float, for the ledger."""
    conditions: Annotated[Mapping[Operator, Condition], ByOperator] = Field(default_factory=dict)
    """For an operator, a function of the graph node that says why this call cannot run in integers, or None if it
    can. A call that only moves values then moves them in float."""
    unneeded: Annotated[Mapping[Operator, Condition], ByOperator] = Field(default_factory=dict)
    """For an operator, a function of the graph node that says why this call gains nothing in integers, or None if it
    does gain. A call that gains nothing stays float."""
    float_apart: bool = False
    """Whether files keep OpenVINO from computing other values, by guards around what stays float, as it moves scales
    into that, and after what it would scale twice, round or clip, and by how biases and weights are written."""
    moves_scales: bool = False
    """Whether the target passes on the scale of a quantized tensor through what moves it and into norms, so that files
    have no quantizers there."""
    transposed_as_convolutions: bool = False
    """Whether files write transposed convolutions as convolutions with the same values, interleaved afterwards."""
    dynamic_lstm: bool = False
    """Whether ``nn.LSTM`` computes on integer weights, with ranges that are found while it runs."""
    split_attention: bool = False
    """Whether ``scaled_dot_product_attention`` becomes matrix products and a softmax."""
    split_activations: bool = False
    """Whether SiLU, hard-sigmoid and hard-swish become sums, products and sigmoids."""
    norms_as_convolutions: bool = False
    """Whether a BatchNorm that stands alone becomes a depthwise convolution."""
    scaled_results: bool = False
    """Whether a product or quotient with a positive number, after an operator with a quantized result, becomes part of
    the scale of that result."""
    dequantizes_apart: bool = False
    """Whether the target dequantizes a tensor for each reader, and then joins no readers that need the same tensor."""


class FoldingRules(Strict):
    """What becomes part of a layer with a weight."""

    batchnorm: bool = True
    """Whether BatchNorm is multiplied into the layer before it."""
    constants: bool = False
    """Whether sums and products with constants, before or after a layer, become part of it."""


def granularity_of(spec: QuantSpec) -> Granularity:
    """The granularity of a spec in one word."""
    if isinstance(spec.granularity, PerTensor):
        return "tensor"
    return "channel" if isinstance(spec.granularity, PerChannel) else "group"


def listed(names: Iterable[str], between: str = ", ") -> str:
    """Names in order, in one line."""
    return between.join(sorted(names))
