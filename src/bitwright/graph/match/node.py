"""MatcherNode: one node of a pattern, with what it may be and what goes into it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import fx

from bitwright.errors import ConfigError, suggest
from bitwright.nn.operators import OPERATORS

Checker = Callable[[fx.Node, Any], Any]
FX_KINDS = ("placeholder", "get_attr", "output")


class InputMatchType(Enum):
    """How the inputs of a pattern's node are compared with those of a node of the graph.

    The inputs of a graph's node are all nodes among its arguments, in the order of the call, as often as they occur:
    ``x + x`` has two. Keyword arguments stand where the signature has them.
    """

    ALL = "all"  # as many as the pattern says, in its order
    COMMUTATIVE = "commutative"  # as many, in any order
    SUBSET = "subset"  # each of the pattern's is another one of the node's, in any order; the node may have more
    ANY_ORDER = "commutative"


@dataclass(eq=False)
class MatcherNode:
    """One node of a pattern.

    Args:
        name: what the node is called in this pattern.
        inputs: the names of the pattern's nodes that go in, ``None`` for one that may be anything. ``None`` in the
            place of the list leaves the inputs unlooked at.
        op_type: what the node may call: module classes (a QModule also answers to the class it stands for), functions,
            tensor methods by name or as ``torch.Tensor.add``, operators by all their names as ``"op:relu"``, and
            ``"placeholder"``, ``"get_attr"`` or ``"output"``. ``None``, for the list or in it, is anything at all.
        checker: called with the node and its instance (the module, function, or parameter). It returns whether
            the node will do; a text, instead, is the reason why not, which is noted if all the rest matches.
        input_match_type: how ``inputs`` are compared.
        subclasses: whether subclasses of the module classes match too.
        outside_users: whether the node, where others of the pattern read it, may also be read from outside.
    """

    name: str
    inputs: Sequence[str | None] | None = ()
    op_type: Any = None
    checker: Checker | None = None
    input_match_type: InputMatchType = InputMatchType.ALL
    subclasses: bool = False
    outside_users: bool = True
    _known: "dict[Kind, bool]" = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"a MatcherNode's name must be a text that is not empty, not {self.name!r}")
        if isinstance(self.inputs, str):
            raise ConfigError(
                f"the inputs of {self.name!r} must be a list of names or None, not the text {self.inputs!r}"
            )
        if self.inputs is not None:
            self.inputs = tuple(self.inputs)
            if wrong := [i for i in self.inputs if i is not None and not isinstance(i, str)]:
                raise ConfigError(f"the inputs of {self.name!r} must be names or None, not {wrong[0]!r}")
        if not isinstance(self.input_match_type, InputMatchType):
            names = ", ".join(InputMatchType.__members__)
            raise ConfigError(
                f"the input_match_type of {self.name!r} must be one of InputMatchType ({names}), "
                f"not {self.input_match_type!r}"
            )
        if self.checker is not None and not callable(self.checker):
            raise ConfigError(f"the checker of {self.name!r} must be a function, not {self.checker!r}")
        self.op_type = _wanted(self.name, self.op_type)

    def may_be(self, kind: "Kind") -> bool:
        """Whether the node may call what ``kind`` says."""
        if kind not in self._known:
            self._known[kind] = any(_answers(kind, wanted, self.subclasses) for wanted in self.op_type)
        return self._known[kind]


@dataclass(frozen=True)
class Kind:
    """What a node of a graph calls: two nodes of one kind are equal to every pattern, but for their instances.

    Attributes:
        op: the node's ``op``, as torch.fx has it.
        thing: the module's class, the function, the method's name, or the class of a parameter.
        operator: the name of the operator (see ``bitwright.nn.operators``), if it is one that Bitwright knows.
        stands_for: the classes that a QModule takes the place of.
    """

    op: str
    thing: Any = None
    operator: str = ""
    stands_for: tuple[type, ...] = ()


def _wanted(name: str, op_type: Any) -> tuple[Any, ...]:
    if op_type is None:
        return (None,)
    wanted = tuple(op_type) if isinstance(op_type, list | tuple | set | frozenset) else (op_type,)
    if not wanted:
        raise ConfigError(f"the op_type of {name!r} is empty, so nothing could match; None stands for anything")
    for each in wanted:
        if isinstance(each, str):
            _check_text(name, each)
        elif each is not None and not callable(each):
            raise ConfigError(
                f"the op_type of {name!r} must hold module classes, functions, names of tensor methods, 'op:…' "
                f"or None, not {each!r}"
            )
    return wanted


def _check_text(name: str, text: str) -> None:
    if text.startswith("op:"):
        known = [f"op:{operator}" for operator in OPERATORS]
        if text not in known:
            raise ConfigError(f"the op_type of {name!r} has the unknown operator {text!r}{suggest(text, known)}")
    elif text not in FX_KINDS and not hasattr(torch.Tensor, text):
        known = [*FX_KINDS, *(n for n in dir(torch.Tensor) if not n.startswith("_"))]
        raise ConfigError(f"the op_type of {name!r} has {text!r}, which is no method of a tensor{suggest(text, known)}")


def _answers(kind: Kind, wanted: Any, subclasses: bool) -> bool:
    if wanted is None:
        return True
    if isinstance(wanted, str):
        if wanted.startswith("op:"):
            return kind.operator == wanted[3:]
        if wanted in FX_KINDS:
            return kind.op == wanted
        return kind.thing == wanted if kind.op == "call_method" else kind.thing is getattr(torch.Tensor, wanted)
    if kind.thing is wanted or wanted in kind.stands_for:
        return True
    if kind.op == "call_method":
        return getattr(torch.Tensor, kind.thing, None) is wanted
    classes = isinstance(wanted, type) and isinstance(kind.thing, type) and kind.op in ("call_module", "get_attr")
    return subclasses and classes and any(issubclass(c, wanted) for c in (kind.thing, *kind.stands_for))
