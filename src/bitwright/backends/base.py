"""Backend: what a piece of hardware or a runtime does, as data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from bitwright.backends.rules import ActivationRules, FoldingRules, OperatorRules, WeightRules
from bitwright.errors import ConfigError
from bitwright.spec import QuantSpec
from bitwright.validation import Strict, mistakes

Kind = Literal["weights", "activations"]


class Backend(Strict):
    """How a target computes, and what it reads."""

    name: str
    """How users choose it; upper and lower case are the same."""
    title: str
    """One line on what it is."""
    weights: WeightRules = Field(default_factory=WeightRules)
    """Which weights it has."""
    activations: ActivationRules = Field(default_factory=ActivationRules)
    """Which activations it has: every quantized tensor that is not a weight."""
    integer_bias: bool = True
    """Whether a bias is rounded to int32, in steps of input scale times weight scale."""
    first_last_bits: int | None = None
    """Bits of the weights and inputs of the first and last layers, if they differ from the others'."""
    operators: OperatorRules = Field(default_factory=OperatorRules)
    """Which operators it runs in integers."""
    folding: FoldingRules = Field(default_factory=FoldingRules)
    """What becomes part of a layer with a weight."""
    formats: tuple[str, ...] = ("onnx",)
    """Export formats it reads, the preferred one first."""
    runtimes: tuple[str, ...] = ()
    """Programs on this machine that can execute the exported file."""
    constraints: tuple[str, ...] = ()
    """What the target's makers demand of files, by names or globs of ``bitwright.verification.CONSTRAINTS``; verify
    checks it. A backend that names any is for a target that is not here."""
    notes: tuple[str, ...] = ()
    """What a user should know."""

    def uses_all_bits(self, weight: QuantSpec | None) -> bool:
        """Whether weights use bits that the target leaves out by default, because some of its CPUs would overflow."""
        return weight is not None and weight.bits in self.weights.used_bits

    def schedules(self, weight: QuantSpec | None) -> dict[str, bool]:
        """The schedules that are on or off for this target and these weights unless the recipe names them."""
        chosen = {} if self.folding.batchnorm else {"fold_batchnorm": False}
        chosen |= {} if self.folding.constants else {"fold_scale": False, "fold_before": False}
        pools = "adaptive_avg_pool2d" in self.operators.integer and "mean" not in self.operators.integer
        chosen |= {"mean_to_pool": True} if pools else {}
        split = {
            "decompose_attention": self.operators.split_attention
            and ("matmul" not in self.operators.wide or self.uses_all_bits(weight)),
            "split_activations": self.operators.split_activations,
            "norm_to_convolution": self.operators.norms_as_convolutions,
        }
        return chosen | {name: True for name, wanted in split.items() if wanted}

    @classmethod
    def parse(cls, source: "Mapping[str, Any] | str | Path | Backend") -> "Backend":
        """Find or read a backend; see :func:`bitwright.backends.find_backend`."""
        from bitwright.backends.files import find_backend

        return find_backend(source)

    @classmethod
    def of(cls, **settings: Any) -> "Backend":
        """Build a backend from plain data; a ConfigError lists all mistakes at once."""
        return validated(settings)

    def with_(self, **changes: Any) -> "Backend":
        """Return a copy with other settings; a mapping changes only the listed settings of a group.

        ::

            TENSORRT.with_(name="mine", weights={"spec": "int8 symmetric tensor"})
        """
        return validated(merged(self, changes))

    def why_not(self, kind: Kind, spec: QuantSpec | None) -> str | None:
        """Why the target has no such weights or activations, or None if it has; float (no spec) always works."""
        problem = getattr(self, kind).why_not(spec, kind) if spec is not None else None
        return None if problem is None else f"{self.name} {problem}"

    def check(self, kind: Kind, spec: QuantSpec, where: str) -> QuantSpec:
        """Return ``spec`` if the target has such weights or activations, else raise a ConfigError."""
        if problem := self.why_not(kind, spec):
            raise ConfigError(f"{where}: {problem}")
        return spec


def validated(data: Mapping[str, Any], where: str = "") -> Backend:
    """Build a backend from its settings; a ConfigError lists all mistakes at once and names the backend ``where``."""
    try:
        return Backend.model_validate(dict(data))
    except ValidationError as error:
        name = where or f"the backend {data.get('name', '')!r}"
        raise ConfigError(f"{name} has {mistakes(error, _fields_at)}") from error


def merged(value: Strict, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a backend, or of one of its groups, with some changed."""
    given = {name: getattr(value, name) for name in type(value).model_fields}
    for name, change in changes.items():
        group = given.get(name)
        if isinstance(change, str | QuantSpec) and isinstance(group, WeightRules | ActivationRules):
            change = {"spec": change}
        given[name] = merged(group, change) if isinstance(group, Strict) and isinstance(change, Mapping) else change
    return given


def _fields_at(path: tuple[Any, ...]) -> list[str]:
    """The settings of the group at a path, for did-you-mean."""
    if not path:
        return ["base", *Backend.model_fields]
    group = Backend.model_fields[path[0]].annotation if path[0] in Backend.model_fields else None
    return list(group.model_fields) if isinstance(group, type) and issubclass(group, Strict) else []
