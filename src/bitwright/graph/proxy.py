"""A proxy that carries the value it stands for, so that code which looks at shapes and types is traced.

Shapes stay symbolic where they flow into operations: ``x.view(x.shape[0], -1)`` is recorded. Where Python
itself needs a number (``if``, ``range``, ``len``), the example's is used and the decision is noted. Where it
needs the *data* of a tensor, tracing stops: the module becomes an island.
"""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from bitwright.errors import BitwrightError

# Attributes that depend on neither the data nor the size of a tensor.
_CONSTANT = {
    "dtype",
    "layout",
    "ndim",
    "requires_grad",
    "is_cuda",
    "is_sparse",
    "is_quantized",
    "is_leaf",
    "names",
}
_CONSTANT_METHODS = {
    "dim",
    "ndimension",
    "is_floating_point",
    "is_complex",
    "element_size",
    "get_device",
    "type",
}
_DATA_METHODS = {"item", "tolist", "numpy", "cpu_numpy", "__array__"}
# ``x += y`` and its like, with what they are without writing into x.
IN_PLACE_OPERATORS: dict[Callable[..., Any], Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ifloordiv: operator.floordiv,
    operator.imod: operator.mod,
    operator.ipow: operator.pow,
    operator.iand: operator.and_,
    operator.ior: operator.or_,
    operator.ixor: operator.xor,
}


class Untraceable(BitwrightError):
    """Python code asked for something only the data can answer."""


class ValueProxy(fx.Proxy):
    """Stands for a value while it is recorded how the value is computed."""

    tracer: Any

    def __init__(self, node: fx.Node, tracer: Any, value: Any) -> None:
        super().__init__(node, tracer)
        self.__dict__["_value"] = value

    @property  # isinstance(proxy, torch.Tensor) answers as for the value
    def __class__(self) -> type:  # pyrefly: ignore
        return type(self.__dict__["_value"]) if "_value" in self.__dict__ else ValueProxy

    def __getattr__(self, k: str) -> Any:
        value = self.__dict__["_value"]
        attribute = getattr(value, k)
        if k in _CONSTANT and isinstance(value, torch.Tensor):
            return attribute
        if callable(attribute) and not isinstance(attribute, torch.Tensor):
            return _Method(self, k)
        return self.tracer.create_proxy("call_function", getattr, (self, k), {})

    def __bool__(self) -> bool:
        return bool(self._number("if"))

    def __int__(self) -> int:
        return int(self._number("int()"))

    def __float__(self) -> float:
        return float(self._number("float()"))

    def __round__(self, digits: int | None = None) -> Any:
        return round(self._number("round()"), digits)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __abs__(self) -> Any:
        return self.tracer.create_proxy("call_function", operator.abs, (self,), {})

    def __format__(self, spec: str) -> str:
        return format(self._number("format()"), spec)

    def __str__(self) -> str:
        return repr(self) if isinstance(value_of(self), torch.Tensor) else str(self._number("str()"))

    def __index__(self) -> int:
        return self._number("an index").__index__()

    def __len__(self) -> int:
        self.tracer.note_decision(self.node, "len()")
        return len(self.__dict__["_value"])

    def __iter__(self) -> Iterator[Any]:
        value = self.__dict__["_value"]
        if isinstance(value, dict):
            return iter(value)
        if isinstance(value, torch.Tensor):
            self.tracer.note_decision(self.node, "for")
        return iter([self[i] for i in range(len(value))])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", set_item, (self, key, value), {})

    def __contains__(self, item: Any) -> bool:
        if isinstance(self.__dict__["_value"], torch.Tensor):
            raise Untraceable("`in` asks for the data of a tensor")
        return item in self.__dict__["_value"]

    def __hash__(self) -> int:  # a size may be the key of a dict; finding it there is a decision
        value = self.__dict__["_value"]
        return hash(value) if isinstance(value, int | float | str | tuple) else id(self)

    def __repr__(self) -> str:
        return f"ValueProxy({self.node.name})"

    def _number(self, reader: str) -> Any:
        value = self.__dict__["_value"]
        if isinstance(value, torch.Tensor):
            raise Untraceable(f"{reader} asks for the data of a tensor ({self.node.name})")
        self.tracer.note_decision(self.node, reader)
        return value


def _record_in_place(in_place: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    def record(self: ValueProxy, other: Any) -> Any:
        written = isinstance(value_of(self), torch.Tensor)
        return self.tracer.create_proxy("call_function", in_place if written else plain, (self, other), {})

    return record


for _in_place, _plain in IN_PLACE_OPERATORS.items():
    setattr(ValueProxy, f"__{_in_place.__name__}__", _record_in_place(_in_place, _plain))


def set_item(x: Any, key: Any, value: Any) -> Any:
    """``x[key] = value`` as a function, which returns ``x``."""
    x[key] = value
    return x


class _Method:
    """A method of a proxied value, waiting to be called."""

    def __init__(self, owner: ValueProxy, name: str) -> None:
        self.owner, self.name = owner, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        value = value_of(self.owner)
        if isinstance(value, torch.Tensor):
            if self.name in _DATA_METHODS:
                raise Untraceable(f".{self.name}() asks for the data of a tensor ({self.owner.node.name})")
            if self.name in _CONSTANT_METHODS and not args:
                return getattr(value, self.name)(**kwargs)
        elif isinstance(value, dict) and self.name == "keys":
            return value.keys()
        elif isinstance(value, dict) and self.name == "items":
            return [(key, self.owner[key]) for key in value]
        elif isinstance(value, dict) and self.name == "values":
            return [self.owner[key] for key in value]
        return self.owner.tracer.create_proxy("call_method", self.name, (self.owner, *args), kwargs)


def value_of(item: Any) -> Any:
    """Replace proxies by the values they carry, inside any nesting of containers."""
    if issubclass(type(item), ValueProxy):
        return item.__dict__["_value"]
    if isinstance(item, tuple):
        values = [value_of(i) for i in item]
        return type(item)(*values) if hasattr(item, "_fields") else tuple(values)
    if isinstance(item, list):
        return [value_of(i) for i in item]
    if isinstance(item, dict):
        return {key: value_of(i) for key, i in item.items()}
    if isinstance(item, slice):
        return slice(value_of(item.start), value_of(item.stop), value_of(item.step))
    return item
