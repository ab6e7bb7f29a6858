"""TensorRecipe: how one kind of tensor is quantized, with gaps to be filled from something more general."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    JsonValue,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema

from bitwright.errors import nearest
from bitwright.spec import MAX_BITS, MIN_BITS, NumberFormat, QuantSpec
from bitwright.validation import SPEC_SCHEMA, Strict, shown

FLOAT: Literal["float"] = "float"


def _read_spec(given: object) -> QuantSpec | Literal["float"]:
    if not isinstance(given, str):
        return QuantSpec.parse(given)  # pyrefly: ignore  (it refuses what is neither)
    if given.strip() != FLOAT and nearest(given, [FLOAT]):
        raise ValueError(f"unknown spec {given!r}: did you mean {FLOAT!r}?")
    return FLOAT if given.strip() == FLOAT else QuantSpec.parse(given)


Spec = Annotated[
    QuantSpec | Literal["float"],
    PlainValidator(_read_spec),
    PlainSerializer(str),
    WithJsonSchema({**SPEC_SCHEMA, "description": f"{SPEC_SCHEMA['description']} Or 'float': not quantized."}),
]


class Described(Strict):
    """A value whose JSON schema uses the docstring of each field as its description."""

    model_config = ConfigDict(use_attribute_docstrings=True)  # reads the source, so only when a schema is written


class TensorRecipe(Described):
    """How one kind of tensor is quantized; anything missing comes from the backend. A plain string is the spec."""

    spec: Spec | None = None
    """What the quantized tensor looks like, or 'float': it is not quantized."""
    bits: int | None = Field(default=None, ge=MIN_BITS, le=MAX_BITS, strict=True)
    """Only the number of bits; all else of the spec is the backend's. Not together with a spec."""
    observer: str | None = None
    """Name of the observer that finds the range."""
    method: str | None = None
    """Name of the method that rounds."""
    observer_options: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the observer."""
    method_options: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the method."""
    first_last_method: str | None = None
    """Name of the method for first and last layers, where the backend gives these other bits; default: the same."""
    nonnegative: Literal["unsigned"] | None = None
    """'unsigned': a symmetric spec becomes unsigned for tensors that cannot be negative, such as those after a ReLU."""

    @model_validator(mode="before")
    @classmethod
    def _text_is_a_spec(cls, given: object) -> object:
        if not isinstance(given, str | QuantSpec | Mapping | TensorRecipe):
            raise ValueError(f"must be a spec, such as 'int8 symmetric tensor', or a mapping, not {shown(given)}")
        return {"spec": given} if isinstance(given, str | QuantSpec) else given

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> "TensorRecipe":
        if self.spec is not None and self.bits is not None:
            raise ValueError(f"give spec ('{self.spec}') or bits ({self.bits}), not both: the spec includes the bits")
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Allow a string, which stands for the spec alone."""
        whole = handler.resolve_ref_schema(handler(core))
        return {
            "title": "TensorRecipe",
            "anyOf": [{**SPEC_SCHEMA, "description": "The spec alone, or 'float'."}, whole],
        }

    @property
    def floating(self) -> bool:
        return self.spec == FLOAT

    @property
    def quant_spec(self) -> QuantSpec | None:
        """The spec, if there is one and it is not float."""
        return self.spec if isinstance(self.spec, QuantSpec) else None

    @property
    def empty(self) -> bool:
        return self == TensorRecipe()

    def over(self, base: "TensorRecipe") -> "TensorRecipe":
        """This recipe with the gaps filled from ``base``."""
        chosen = {name: getattr(self, name) or value for name, value in base}
        if self.spec is not None:
            chosen["bits"] = None
        elif self.bits is not None:
            chosen["spec"] = with_bits(base.quant_spec, self.bits) if base.quant_spec is not None else None
            chosen["bits"] = self.bits if base.quant_spec is None else None
        if self.observer is not None:
            chosen["observer_options"] = self.observer_options
        if self.method is not None:
            chosen |= {"method_options": self.method_options, "first_last_method": self.first_last_method}
        return TensorRecipe.model_construct(**chosen)  # both are valid, so this is

    def to_data(self) -> str | dict[str, Any]:
        """Plain data, as short as possible."""
        given = {k: v for k, v in self.model_dump().items() if v not in (None, {})}
        return given["spec"] if set(given) == {"spec"} else given


def with_bits(spec: QuantSpec, bits: int) -> QuantSpec:
    """The same spec with another number of bits (fp8 becomes integers)."""
    return spec.with_(format=NumberFormat(f"{'int' if spec.format.signed else 'uint'}{bits}"))
