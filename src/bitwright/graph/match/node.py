"""MatcherNode: one node of a pattern, with its allowed targets and its inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import fx

from bitwright.errors import ConfigError, suggest
from bitwright.nn.operators import OPERATORS, Operator

Checker = Callable[[fx.Node, Any], Any]
FX_KINDS = ("placeholder", "get_attr", "output")


class InputMatchType(Enum):
    """How the inputs of a pattern's node are compared with those of a node of the graph.

    The inputs of a graph's node are all nodes among its arguments, in the order of the call and with repetitions:
    ``x + x`` has two. Keyword arguments are placed as in the signature.
    """

    ALL = "all"  # exactly the pattern's, in its order
    FIRST = "first"  # the pattern's first, in its order, then possibly more
    COMMUTATIVE = "commutative"  # exactly the pattern's, in any order
    SUBSET = "subset"  # the pattern's in any order, and possibly more
    ANY_ORDER = "commutative"

    @property
    def ordered(self) -> bool:
        """Whether inputs are compared position by position."""
        return self in (InputMatchType.ALL, InputMatchType.FIRST)

    @property
    def exact(self) -> bool:
        """Whether a node may have no more inputs than the pattern says."""
        return self in (InputMatchType.ALL, InputMatchType.COMMUTATIVE)


@dataclass(eq=False)
class MatcherNode:
    """One node of a pattern.

    Args:
        name: what the node is called in this pattern.
        inputs: the names of the pattern's nodes that are its inputs, with ``None`` for an input that may be anything.
            ``None`` instead of a list accepts any inputs.
        op_type: what the node may call: module classes (a QModule also answers to the class it stands for, and
            ``torch.cat`` to ``QuantCat``, since it stays a function in a prepared model), functions,
            tensor methods by name or as ``torch.Tensor.add``, operators under all their names as ``"op:relu"`` or as
            their record, and ``"placeholder"``, ``"get_attr"`` or ``"output"``. ``None``, for the list or in it, is
            anything at all.
        checker: called with the node and its instance (the module, function, or parameter). It returns whether
            the node matches, or a string that says why not, which is noted if everything else matches.
        input_match_type: how ``inputs`` are compared.
        subclasses: whether subclasses of the module classes match too.
        outside_users: whether a node that others in the pattern read may also be read from outside the match.
        through: what may stand between the node and the single input that it names, any number of times: op types as
            for ``op_type``, or a checker. Each must pass on its first argument. Such a chain is part of the match.
    """

    name: str
    inputs: Sequence[str | None] | None = ()
    op_type: Any = None
    checker: Checker | None = None
    input_match_type: InputMatchType = InputMatchType.ALL
    subclasses: bool = False
    outside_users: bool = True
    through: Any = ()
    _may_be: "dict[Kind, bool]" = field(default_factory=dict, init=False, repr=False)
    _passes: "dict[Kind, bool]" = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"a MatcherNode's name must be a non-empty string, not {self.name!r}")
        self.inputs = _checked_inputs(self.name, self.inputs)
        if not isinstance(self.input_match_type, InputMatchType):
            names = ", ".join(InputMatchType.__members__)
            raise ConfigError(
                f"the input_match_type of {self.name!r} must be one of InputMatchType ({names}), "
                f"not {self.input_match_type!r}"
            )
        if self.checker is not None and not callable(self.checker):
            raise ConfigError(f"the checker of {self.name!r} must be a function, not {self.checker!r}")
        self.op_type = _checked_types(f"the op_type of {self.name!r}", self.op_type)
        self.through = _checked_through(self.name, self.through, self.inputs or ())

    @cached_property
    def named(self) -> set[str]:
        """The names among the inputs."""
        return {name for name in self.inputs or () if name is not None}

    def may_be(self, kind: "Kind") -> bool:
        """Whether the node allows a target of this ``kind``."""
        if kind not in self._may_be:
            self._may_be[kind] = any(_answers(kind, each, self.subclasses) for each in self.op_type)
        return self._may_be[kind]

    def lets_through(self, node: fx.Node, kind: "Kind", instance: object) -> bool:
        """Whether a node of the graph may stand between this one and its input."""
        if callable(self.through):
            return bool(self.through(node, instance))
        if kind not in self._passes:
            self._passes[kind] = any(_answers(kind, each, self.subclasses) for each in self.through)
        return self._passes[kind]


@dataclass(frozen=True, eq=False)
class Kind:
    """What a node of a graph calls; patterns distinguish two nodes of one kind only by their instances.

    A graph's index has one object for each kind.

    Attributes:
        op: the node's ``op``, as torch.fx has it.
        thing: the module's class, the function, the method's name, or the class of a parameter.
        operator: the name of the operator (see ``bitwright.nn.operators``), if it is one that Bitwright knows.
        stands_for: the classes that a QModule replaces. For a function or a module that stays as it is in a
            prepared model, the QModule that serves it: ``QuantCat`` for ``torch.cat``.
    """

    op: str
    thing: Any = None
    operator: str = ""
    stands_for: tuple[type, ...] = ()


def _checked_inputs(name: str, inputs: Any) -> tuple[str | None, ...] | None:
    if inputs is None:
        return None
    if isinstance(inputs, str):
        raise ConfigError(f"the inputs of {name!r} must be a list of names or None, not the string {inputs!r}")
    if wrong := [i for i in inputs if i is not None and not isinstance(i, str)]:
        raise ConfigError(f"the inputs of {name!r} must be names or None, not {wrong[0]!r}")
    return tuple(inputs)


def _checked_types(what: str, given: object) -> tuple[Any, ...]:
    if given is None:
        return (None,)
    wanted = tuple(given) if isinstance(given, list | tuple | set | frozenset) else (given,)
    if not wanted:
        raise ConfigError(f"{what} is empty, so nothing could match; None matches anything")
    for each in wanted:
        if isinstance(each, str):
            _check_text(what, each)
        elif each is not None and not callable(each) and not isinstance(each, Operator):
            raise ConfigError(
                f"{what} must hold module classes, functions, names of tensor methods, 'op:…' or None, not {each!r}"
            )
    return wanted


def _checked_through(name: str, through: object, inputs: tuple[str | None, ...]) -> Any:
    if through is None or through == ():
        return ()
    named = [i for i in inputs if i is not None]
    if len(named) != 1:
        raise ConfigError(f"{name!r} has `through`, so its inputs must name one node, not {len(named)}")
    is_checker = callable(through) and not isinstance(through, type)
    return through if is_checker else _checked_types(f"the through of {name!r}", through)


def _check_text(what: str, text: str) -> None:
    if text.startswith("op:"):
        known = [f"op:{operator}" for operator in OPERATORS]
        if text not in known:
            raise ConfigError(f"{what} has the unknown operator {text!r}{suggest(text, known)}")
    elif text not in FX_KINDS and not hasattr(torch.Tensor, text):
        known = [*FX_KINDS, *(n for n in dir(torch.Tensor) if not n.startswith("_"))]
        raise ConfigError(f"{what} has {text!r}, which is not a method of a tensor{suggest(text, known)}")


def _answers(kind: Kind, wanted: object, subclasses: bool) -> bool:
    if wanted is None:
        return True
    if isinstance(wanted, str):
        return _answers_text(kind, wanted)
    if isinstance(wanted, Operator):
        return kind.operator == wanted.name
    if kind.thing is wanted or wanted in kind.stands_for:
        return True
    if kind.op == "call_method":
        return getattr(torch.Tensor, kind.thing, None) is wanted
    return subclasses and isinstance(wanted, type) and _is_kind_of(kind, wanted)


def _answers_text(kind: Kind, wanted: str) -> bool:
    if wanted.startswith("op:"):
        return kind.operator == wanted[3:]
    if wanted in FX_KINDS:
        return kind.op == wanted
    return kind.thing == wanted if kind.op == "call_method" else kind.thing is getattr(torch.Tensor, wanted)


def _is_kind_of(kind: Kind, wanted: type) -> bool:
    classes = (kind.thing, *kind.stands_for) if kind.op in ("call_module", "get_attr") else ()
    return any(issubclass(c, wanted) for c in classes)
