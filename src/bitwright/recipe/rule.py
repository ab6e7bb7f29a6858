"""Rule: what to do with the operators that a selector names."""

from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from bitwright.recipe.expressions import expression
from bitwright.recipe.tensor import Described, TensorRecipe

Kind = Literal["weight", "input", "output"]


class RuleTarget(NamedTuple):
    """An operator as rules see it.

    Attributes:
        name: the module's qualified name, or the name of the call in the graph.
        scope: the qualified name of the module whose forward has the call.
        operator: what it computes, such as ``conv2d``.
        types: names of the classes of the module and of those it is part of, with their base classes.
        node: the name of the call in the graph, ``layer1_0_conv1``; a module called twice has two.
        origin: the operator of the model that it is a part of or stands for, whose rules are its rules too.
    """

    name: str
    scope: str = ""
    operator: str = ""
    types: tuple[str, ...] = ()
    node: str = ""
    origin: "RuleTarget | None" = None

    def paths(self) -> tuple[str, ...]:
        """The names that a glob or regular expression is compared with: a call's name also with its scope as prefix."""
        whole = not self.scope or self.name == self.scope or self.name.startswith(f"{self.scope}.")
        return (self.name,) if whole else (self.name, f"{self.scope}.{self.name}")


class Rule(Described):
    """What to do with the operators that ``match`` selects. The last rule that matches an operator wins, as a whole.

    ``match`` is one of

    - a module's qualified name, ``layer1.0.conv1``, which includes everything inside it;
    - a glob over names, ``layer?.*.conv1``;
    - ``re:`` and a regular expression that fits a whole name;
    - ``op:`` and an operator, ``op:conv2d`` (or a glob over operators);
    - ``type:`` and a module class, ``type:Conv2d``: modules of that class or a subclass, and everything inside them;
    - ``node:`` and the name of a call in the graph, ``node:add_1``.
    """

    match: str
    """Which operators: a name, a glob, 're:…', 'op:…', 'type:…' or 'node:…'."""
    skip: bool = False
    """Leave the operators float."""
    force: bool = False
    """Quantize the operators although the backend would leave them float."""
    optional: bool = False
    """It may match nothing."""
    weight: TensorRecipe = Field(default_factory=TensorRecipe)
    """How the weight is quantized."""
    activation: TensorRecipe = Field(default_factory=TensorRecipe)
    """How the inputs and the result are quantized."""
    input: TensorRecipe = Field(default_factory=TensorRecipe)
    """How the inputs are quantized, where that differs from the activation."""
    output: TensorRecipe = Field(default_factory=TensorRecipe)
    """How the result is quantized, where that differs from the activation."""

    @field_validator("match")
    @classmethod
    def _can_match(cls, match: str) -> str:
        if not match.removeprefix("op:").removeprefix("type:").removeprefix("node:").removeprefix("re:"):
            raise ValueError(f"must name a layer, a glob, 're:…', 'op:…', 'type:…' or 'node:…', not {match!r}")
        if match.startswith("re:"):
            expression(match[3:])
        return match

    @model_validator(mode="after")
    def _skips_or_asks(self) -> "Rule":
        asks = [*self.asks, *(["force"] if self.force else [])]
        if self.skip and asks:
            raise ValueError(f"the rule {self.match!r} skips its operators and asks for {', '.join(asks)}")
        return self

    @property
    def asks(self) -> list[str]:
        """The tensors that the rule has settings for."""
        return [k for k in ("weight", "activation", "input", "output") if not getattr(self, k).empty]

    def asked(self, kind: Kind) -> TensorRecipe:
        """The rule's settings for the weight, the inputs or the result."""
        if kind == "weight":
            return self.weight
        return (self.input if kind == "input" else self.output).over(self.activation)

    def matches(self, target: RuleTarget) -> bool:
        return self._names(target) or (target.origin is not None and self._names(target.origin))

    def _names(self, target: RuleTarget) -> bool:
        kind, _, wanted = self.match.partition(":")
        if kind == "re":
            return any(expression(wanted).fits(path) for path in target.paths())
        if kind in ("op", "type", "node"):
            names = {"op": (target.operator,), "type": target.types, "node": (target.node,)}[kind]
            return any(fnmatchcase(name, wanted) for name in names)
        inside = any(f"{path}.".startswith(f"{self.match}.") for path in (target.name, target.scope))
        return inside or any(fnmatchcase(path, self.match) for path in target.paths())

    def to_data(self) -> dict[str, Any]:
        flags = {k: True for k in ("skip", "force", "optional") if getattr(self, k)}
        return {"match": self.match, **flags, **{k: getattr(self, k).to_data() for k in self.asks}}
