"""Operator: one computation under all its names, and every fact about it that the rest of Bitwright needs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import fx, nn

from bitwright.errors import ConfigError
from bitwright.nn.mixins import QuantInputMixin
from bitwright.registry import Registry, describe

T = TypeVar("T")
Source = type[nn.Module] | Callable[..., Any] | str
Limits = tuple[float | None, float | None]  # the lowest and the highest value; None where there is no bound
# A fact that holds for every call, or a function of the node and its module (None for functions and methods).
PerCall = T | Callable[[fx.Node, nn.Module | None], T]

OPERATORS: Registry["Operator"] = Registry("operator")
_BY_SOURCE: dict[Source, "Operator"] = {}
_KEPT = "_bitwright_kept_whole"


@dataclass(frozen=True)
class Operator:
    """What an operator is, not what a backend does with it; a computation without a record stays float.

    Args:
        name: its name in rules and reports.
        sources: module classes, functions, and names of tensor methods.
        rank: number of spatial dimensions: 2 for ``conv2d``, 0 if there are none or any number.
        weight: whether it multiplies its input by a weight, the second argument of its function.
        weight_axis: the axis of the weight that holds the output channels.
        binary: whether it computes on two tensors, or on a tensor and a number.
        elementwise: whether each value of the result depends only on the inputs' values at that position.
        same_shape: whether the result has the shape of the first input, as an activation always does.
        homogeneous: whether f(s·x) = s·f(x) for every factor s > 0 per channel.
        pool: whether it reduces windows of a plane to one value each.
        averages_planes: whether it averages each plane (all spatial dimensions) to one value.
        limits: the lowest and highest value of the result of a plain clamp, None for everything else.
        carries: whether the result holds only values of the input (and zero), so that its scale still fits.
        rearranges: whether the result holds exactly the values of the input, in another order or shape.
    """

    name: str
    sources: tuple[Source, ...]
    rank: int = 0
    weight: bool = False
    weight_axis: int = 0
    binary: bool = False
    elementwise: bool = False
    same_shape: bool = False
    homogeneous: bool = False
    pool: bool = False
    averages_planes: PerCall[bool] = False
    limits: PerCall[Limits | None] = None
    carries: PerCall[bool] = False
    rearranges: bool = False

    @property
    def activation(self) -> bool:
        return self.elementwise and not self.binary

    @property
    def channel_axis(self) -> int:
        """The axis of a layer's result that holds its output channels, counted from the end."""
        return -1 - self.rank

    @property
    def carries_when(self) -> Literal["always", "sometimes", "never"]:
        """Whether every call, some calls or no call passes on its input's values unchanged."""
        return "sometimes" if callable(self.carries) else "always" if self.carries else "never"

    def carries_scale(self, node: fx.Node, module: nn.Module | None) -> bool:
        """Whether this call passes on its input's values unchanged."""
        return self.carries(node, module) if callable(self.carries) else self.carries

    def limits_of(self, node: fx.Node, module: nn.Module | None) -> Limits | None:
        """The lowest and highest value that this call returns if it is a plain clamp with known limits, else None."""
        found = self.limits(node, module) if callable(self.limits) else self.limits
        return None if found is None else _finite(*found)

    def averages_planes_of(self, node: fx.Node, module: nn.Module | None) -> bool:
        """Whether this call averages each plane to one value."""
        return self.averages_planes(node, module) if callable(self.averages_planes) else self.averages_planes


def _finite(low: float | None, high: float | None) -> Limits | None:
    """Limits without those at infinity, which limit nothing; None if they leave no finite value."""
    if low == math.inf or high == -math.inf:
        return None
    return None if low == -math.inf else low, None if high == math.inf else high


def register_operator(operator: Operator, *, override: bool = False) -> Operator:
    """Add an operator, so that rules, backends and schedules can name it and look up its traits.

    ::

        register_operator(Operator("squared_relu", (SquaredReLU, squared_relu), elementwise=True))

    ``override`` replaces an operator of the same name, and takes sources over from the operators that have them.
    """
    for source in operator.sources:
        taken = _BY_SOURCE.get(source)
        if taken is not None and not override:
            raise ConfigError(
                f"operator {operator.name!r}: {describe(source)} already belongs to the operator {taken.name!r}; "
                "pass override=True to replace it"
            )
    OPERATORS.register(operator.name, override=override)(operator)
    _BY_SOURCE.update(dict.fromkeys(operator.sources, operator))
    return operator


def unregister_operator(name: str) -> None:
    """Remove an operator; sources it took over return to the operators that list them."""
    OPERATORS.unregister(name)
    _BY_SOURCE.clear()
    for operator in OPERATORS.values():
        _BY_SOURCE.update(dict.fromkeys(operator.sources, operator))


def operator_of_source(source: Source) -> Operator | None:
    """The operator that a module class, a function or a tensor method of that name computes."""
    return _BY_SOURCE.get(source)


def keep_whole(module: nn.Module) -> None:
    """Make a module run as written: no pattern matches it, and nothing relies on what its class computes."""
    vars(module)[_KEPT] = True


def is_kept_whole(module: nn.Module) -> bool:
    """Whether a module runs as written, because the user wishes so or its hooks change what it computes."""
    return _KEPT in vars(module)


def operator_of_module(module: nn.Module) -> Operator | None:
    """The operator a module computes, by its class or by the parent whose ``forward`` it inherits."""
    if "_input_quantizer" in module._modules:  # it quantizes its input itself, so its values differ from its input's
        return None
    if is_kept_whole(module):
        return None
    for cls in type(module).__mro__:
        if cls in _BY_SOURCE:
            return _BY_SOURCE[cls]
        if "forward" in vars(cls) and not isinstance(module, QuantInputMixin):
            return None  # a subclass with its own forward computes something else
    return None


def operator_of(node: fx.Node, modules: dict[str, nn.Module]) -> Operator | None:
    """The operator a graph node computes, or None."""
    if node.op == "call_module":
        return operator_of_module(modules[str(node.target)])
    if node.op in ("call_function", "call_method"):
        return _BY_SOURCE.get(node.target)
    return None


def argument(node: fx.Node, module: nn.Module | None, position: int, name: str, default: Any = None) -> Any:  # noqa: ANN401
    """An argument of a call: an attribute of the module, or an argument of the function."""
    if module is not None:
        return getattr(module, name, default)
    return node.kwargs.get(name, node.args[position] if len(node.args) > position else default)


def each_dimension(setting: int | Sequence[int], rank: int) -> list[int]:
    """A setting of a layer, such as its stride, for each dimension."""
    given = [setting] if isinstance(setting, int) else list(setting)
    return given * rank if len(given) == 1 else given
