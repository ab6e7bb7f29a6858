"""A proxy that carries the value it stands for, so that code which looks at shapes and types is traced.

Shapes stay symbolic where they flow into operations: ``x.view(x.shape[0], -1)`` is recorded. Where Python
itself needs a number (``if``, ``range``, ``len``), it gets the example's, and a guard is noted. Where it needs the
*data* of a tensor, tracing stops: the module becomes an island.
"""

import dis
import math
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from bitwright.graph.capture.failures import Unhashable, boundary, call_model
from bitwright.graph.capture.guards import check_keys, check_length, check_text, check_truth, check_value

# Attributes that depend on neither the data nor the size of a tensor.
_CONSTANT = {"dtype", "layout", "ndim", "requires_grad", "is_cuda", "is_sparse", "is_quantized", "is_leaf", "names"}
_CONSTANT_METHODS = {"dim", "ndimension", "is_floating_point", "is_complex", "element_size", "get_device", "type"}
_UNPACK = dis.opmap["UNPACK_SEQUENCE"]
_LOOKUPS = {dis.opmap[name] for name in ("BINARY_SUBSCR", "CONTAINS_OP", "BUILD_SET", "SET_ADD") if name in dis.opmap}
_DATA_METHODS = {"item", "tolist", "numpy", "cpu_numpy", "__array__"}
# ``x += y`` and the like, with their equivalents that do not write into x.
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


class ValueProxy(fx.Proxy):
    """Stands for a value while its computation is recorded."""

    tracer: Any

    def __init__(self, node: fx.Node, tracer: object, value: object) -> None:
        self.__dict__.update(tracer=tracer, node=node, _value=value)

    @property
    def __class__(self) -> type:  # pyrefly: ignore
        """The class of the value, except for tensors: torch's C++ code would mistake the proxy for a real one."""
        value = self.__dict__.get("_value", self)
        return ValueProxy if value is self or isinstance(value, torch.Tensor) else type(value)

    def __getattr__(self, k: str) -> Any:
        value = self.__dict__["_value"]
        attribute = call_model(getattr, value, k)
        if k in _CONSTANT and isinstance(value, torch.Tensor):
            return attribute
        if callable(attribute) and not isinstance(attribute, torch.Tensor | type):
            return _Method(self, k)
        if isinstance(value, torch.device):
            return attribute  # a model may be moved, so nothing may rely on it
        return self.tracer.create_proxy("call_function", getattr, (self, k), {})

    def __setattr__(self, name: str, value: object) -> None:
        self.tracer.create_proxy("call_function", setattr, (self, name, value), {})

    def __bool__(self) -> bool:
        value = self.__dict__["_value"]
        if isinstance(value, torch.Tensor):
            raise self.tracer.refuse(f"if needs the data of a tensor ({self.node.name})")
        truth = call_model(bool, value)
        self.tracer.guard(self, "if", check_truth, truth)
        return truth

    def __round__(self, digits: int | None = None) -> Any:
        return self._computed(round) if digits is None else self._computed(round, digits)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return other // self, other % self

    def __format__(self, spec: str) -> str:
        """Tensors show no data here, as in ``str()``: their text is meant for people."""
        value = self.__dict__["_value"]
        if isinstance(value, torch.Tensor):
            return repr(self)
        return call_model(format, self._number("format()", check_text), spec)

    def __str__(self) -> str:
        return repr(self) if isinstance(value_of(self), torch.Tensor) else str(self._number("str()", check_text))

    def __len__(self) -> int:
        value = self.__dict__["_value"]
        length = call_model(len, value)
        if not isinstance(value, torch.Size):  # that is the number of dimensions
            self.tracer.guard(self, "len()", check_length, length)
        return length

    def __iter__(self) -> Iterator[Any]:
        value = self.__dict__["_value"]
        if isinstance(value, dict):
            return iter(self._keys())
        if not hasattr(value, "__getitem__"):
            raise self.tracer.refuse(f"a loop over {type(value).__name__} ({self.node.name}) cannot be recorded")
        length = call_model(len, value)
        if not isinstance(value, torch.Size) and not _is_unpacked():
            self.tracer.guard(self, "for", check_length, length)
        return iter([self[i] for i in range(length)])

    def __reversed__(self) -> Iterator[Any]:
        return reversed(list(self))

    def __setitem__(self, key: object, value: object) -> None:
        self._computed(set_item, key, value)

    def __delitem__(self, key: object) -> None:
        self._computed(operator.delitem, key)

    def __contains__(self, item: object) -> bool:
        if isinstance(self.__dict__["_value"], torch.Tensor):
            raise self.tracer.refuse("`in` needs the data of a tensor")
        return bool(self._computed(operator.contains, item))

    def __hash__(self) -> int:
        """A size may be looked up in a dict or set; but functions that keep results must not find or keep proxies."""
        value = self.__dict__["_value"]
        if isinstance(value, torch.Tensor):
            return id(self)
        frame = sys._getframe(1)
        if frame.f_code.co_code[frame.f_lasti] in _LOOKUPS:
            return call_model(hash, value)
        if not self.tracer.meets_keepers(frame):
            raise Unhashable(f"unhashable: {self!r} stands for a {type(value).__name__} while a model is traced")
        return id(self)

    def __repr__(self) -> str:
        return f"ValueProxy({self.node.name})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if isinstance(self.__dict__["_value"], torch.Tensor):
            return self.clone()
        return self

    def __copy__(self) -> Any:
        return self

    def _keys(self) -> list[Any]:
        keys = list(self.__dict__["_value"])
        self.tracer.guard(self, "the keys", check_keys, keys)
        return keys

    def _computed(self, function: Callable[..., Any], *args: object) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, *args), {})

    def _number(self, reader: str, check: Callable[..., None] = check_value) -> Any:
        value = self.__dict__["_value"]
        if isinstance(value, torch.Tensor):
            raise self.tracer.refuse(f"{reader} needs the data of a tensor ({self.node.name})")
        self.tracer.guard(self, reader, check, value)
        return value


def _is_unpacked() -> bool:
    """Whether the caller's caller unpacks ``a, b = x``, so that the program itself fixes the number of items."""
    frame = sys._getframe(2)
    return frame.f_code.co_code[frame.f_lasti] == _UNPACK


def _record_in_place(in_place: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    def record(self: ValueProxy, other: object) -> Any:
        written = hasattr(type(value_of(self)), f"__{in_place.__name__}__")  # a tensor or a container, but not a number
        return self._computed(in_place if written else plain, other)

    return record


for _in_place, _plain in IN_PLACE_OPERATORS.items():
    setattr(ValueProxy, f"__{_in_place.__name__}__", _record_in_place(_in_place, _plain))
for _function in (math.ceil, math.floor, math.trunc, operator.abs):
    setattr(ValueProxy, f"__{_function.__name__}__", lambda self, function=_function: self._computed(function))
for _kind, _reader in {int: "int()", float: "float()", complex: "complex()", operator.index: "an index"}.items():
    setattr(ValueProxy, f"__{_kind.__name__}__", lambda self, k=_kind, r=_reader: call_model(k, self._number(r)))


@boundary
def set_item(x: Any, key: Any, value: Any) -> Any:
    """``x[key] = value`` as a function, which returns ``x``."""
    x[key] = value
    return x


class _Method:
    """A method of a proxied value, waiting to be called."""

    def __init__(self, owner: ValueProxy, name: str) -> None:
        self.owner, self.name = owner, name

    def __call__(self, *args: object, **kwargs: object) -> Any:
        owner, name, value = self.owner, self.name, value_of(self.owner)
        if isinstance(value, torch.Tensor):
            if name in _DATA_METHODS:
                raise owner.tracer.refuse(f".{name}() needs the data of a tensor ({owner.node.name})")
            if name in _CONSTANT_METHODS and not args:
                return call_model(getattr(value, name), **kwargs)
        elif isinstance(value, dict) and name in _DICT_VIEWS:
            return _DICT_VIEWS[name](owner)
        return owner.tracer.create_proxy("call_method", name, (owner, *args), kwargs)


_DICT_VIEWS: dict[str, Callable[[ValueProxy], list[Any]]] = {
    "keys": lambda owner: owner._keys(),
    "items": lambda owner: [(key, owner[key]) for key in owner._keys()],
    "values": lambda owner: [owner[key] for key in owner._keys()],
}


def value_of(item: Any) -> Any:
    """Replace proxies by the values they carry, inside any nesting of containers."""
    kind = type(item)
    if kind is ValueProxy:
        return item.__dict__["_value"]
    if kind is tuple:
        return tuple([value_of(i) for i in item])
    if kind is dict:
        return {key: value_of(i) for key, i in item.items()}
    if isinstance(item, tuple):
        values = [value_of(i) for i in item]
        return call_model(type(item), *values) if hasattr(item, "_fields") else tuple(values)
    if isinstance(item, list):
        return [value_of(i) for i in item]
    if isinstance(item, dict):
        return {key: value_of(i) for key, i in item.items()}
    if isinstance(item, slice):
        return slice(value_of(item.start), value_of(item.stop), value_of(item.step))
    return item
