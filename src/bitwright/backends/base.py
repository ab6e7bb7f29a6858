"""Backend: what a piece of hardware or a runtime really does, as data."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, field_validator
from pydantic.dataclasses import dataclass
from torch import fx

from bitwright.backends.limits import Grain, Scheme, why_not
from bitwright.errors import ConfigError
from bitwright.methods import METHODS
from bitwright.nn.operators import OPERATORS
from bitwright.observers import OBSERVERS
from bitwright.spec import QuantSpec
from bitwright.validation import SpecText

Condition = Callable[[fx.Node], str | None]


def _place(given: object) -> object:
    return {True: "both", False: "inputs"}[given] if isinstance(given, bool) else given


def _operator(name: str) -> str:
    OPERATORS.get(name)
    return name


Place = Annotated[Literal["inputs", "outputs", "both"], BeforeValidator(_place)]
Name = Annotated[str, AfterValidator(_operator)]


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", arbitrary_types_allowed=True))
class Backend:
    """How a target computes.

    Args:
        name: how users choose it; large and small letters are alike.
        title: one line on what it is.
        weight: spec of weights; a channel axis means the output channels, wherever the operator has them. None: the
            user must say.
        activation: spec of everything else, or None.
        integer: operators that run in integers, and where they have quantizers: ``inputs`` (their result may stay
            float where nothing needs it quantized), ``outputs``, or ``both``. True is ``both``, False is ``inputs``.
        fused: activations that the target computes as part of the operator before them.
        unfused: operators that no activation is fused with.
        merged: for an operator, those before it between which and it there is no quantizer.
        numbers: operators that run in integers also if one operand is a plain number.
        reasons: why an operator stays float, for the ledger.
        conditions: for an operator, a function of the graph node that says why this very call cannot run in integers,
            or None if it can.
        share_inputs: operators all of whose inputs must have one scale, and their result too if it is of their asking.
        ends: bits of the weights and inputs of the first and last layers, if they differ.
        folds_norms: whether BatchNorm is multiplied into the layer before it.
        splits_attention: whether ``scaled_dot_product_attention`` becomes products and a softmax, each for itself.
        folds_scales: whether sums and products with constants, before or after a layer, become part of it.
        integer_bias: whether a bias is rounded to int32, in steps of input scale times weight scale.
        weight_formats: number formats a weight can have; none means any.
        activation_formats: number formats an activation can have; none means any.
        weight_grains: granularities of a weight's scale: ``tensor``, ``channel``, ``group``.
        activation_grains: granularities of an activation's scale.
        weight_schemes: ``symmetric`` (zero point 0), ``affine`` or both.
        activation_schemes: the same of activations.
        power_of_two: every scale must be a power of two.
        weight_bits: bits that a weight uses in place of those asked for, such as 7 for 8.
        unsigned_activations: write int8 activations as uint8, shifted by 128: the same values in other integers.
        runtimes: programs on this machine that can execute the exported file.
        observer: default observer of activations.
        weight_observer: default observer of weights.
        method: default method of activations.
        weight_method: default method of weights, if it differs.
        notes: what a user should know.
    """

    name: str
    title: str
    weight: SpecText | None
    activation: SpecText | None
    integer: Mapping[Name, Place]
    fused: frozenset[Name] = frozenset()
    unfused: frozenset[Name] = frozenset()
    merged: Mapping[Name, frozenset[Name]] = Field(default_factory=dict)
    numbers: frozenset[Name] = frozenset()
    reasons: Mapping[Name, str] = Field(default_factory=dict)
    conditions: Mapping[Name, Condition] = Field(default_factory=dict)
    share_inputs: frozenset[Name] = frozenset()
    ends: int | None = None
    folds_norms: bool = True
    folds_scales: bool = False
    splits_attention: bool = False
    integer_bias: bool = True
    weight_formats: frozenset[str] = frozenset()
    activation_formats: frozenset[str] = frozenset()
    weight_grains: frozenset[Grain] = frozenset({"tensor", "channel"})
    activation_grains: frozenset[Grain] = frozenset({"tensor"})
    weight_schemes: frozenset[Scheme] = frozenset({"symmetric"})
    activation_schemes: frozenset[Scheme] = frozenset({"symmetric", "affine"})
    power_of_two: bool = False
    weight_bits: Mapping[int, int] = Field(default_factory=dict)
    unsigned_activations: bool = False
    runtimes: tuple[str, ...] = ()
    observer: str = "MinMaxObserver"
    weight_observer: str = "MinMaxObserver"
    method: str = "FixedFakeQuantize"
    weight_method: str = ""
    notes: tuple[str, ...] = ()

    @field_validator("observer", "weight_observer")
    @classmethod
    def _observer_exists(cls, name: str) -> str:
        OBSERVERS.get(name)
        return name

    @field_validator("method", "weight_method")
    @classmethod
    def _method_exists(cls, name: str) -> str:
        if name:
            METHODS.get(name)
        return name

    @property
    def schedules(self) -> dict[str, bool]:
        """The schedules that are on or off for this target unless the recipe names them."""
        chosen = {} if self.folds_norms else {"fold_batchnorm": False}
        chosen |= {} if self.folds_scales else {"fold_scale": False, "fold_before": False}
        return chosen | ({"decompose_attention": True} if self.splits_attention else {})

    @classmethod
    def parse(cls, source: "Mapping[str, Any] | str | Path | Backend") -> "Backend":
        """Read a backend: plain data (see ``parse_backend``), the path of a YAML or JSON file, or a name."""
        from bitwright.backends.files import find_backend, parse_backend

        return parse_backend(source) if isinstance(source, Mapping) else find_backend(source)

    def why_no_weight(self, spec: QuantSpec) -> str | None:
        """Why the target has no weights like that, or None if it has."""
        found = why_not(spec, "weights", self.weight_formats, self.weight_grains, self.weight_schemes)
        return self._named(found or self._not_a_power(spec))

    def why_no_activation(self, spec: QuantSpec) -> str | None:
        """Why the target has no activations like that, or None if it has."""
        found = why_not(spec, "activations", self.activation_formats, self.activation_grains, self.activation_schemes)
        return self._named(found or self._not_a_power(spec))

    def check_weight(self, spec: QuantSpec, where: str) -> QuantSpec:
        """Return ``spec`` if the target has weights like that, else refuse."""
        if problem := self.why_no_weight(spec):
            raise ConfigError(f"{where}: {problem}")
        return spec

    def check_activation(self, spec: QuantSpec, where: str) -> QuantSpec:
        """Return ``spec`` if the target has activations like that, else refuse."""
        if problem := self.why_no_activation(spec):
            raise ConfigError(f"{where}: {problem}")
        return spec

    def _not_a_power(self, spec: QuantSpec) -> str | None:
        wrong = self.power_of_two and not spec.power_of_two
        return f"needs scales that are powers of two ('{spec}' lacks the word 'pot')" if wrong else None

    def _named(self, problem: str | None) -> str | None:
        return None if problem is None else f"{self.name} {problem}"
