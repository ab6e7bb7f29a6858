"""Descriptors among constructor arguments: ``quant_desc_input`` and ``quant_desc_weight``, and nothing misspelt."""

import inspect
from collections.abc import Callable
from typing import Any, Literal, overload

from bitwright.errors import suggest
from bitwright.nn.mixins import QuantMixin
from bitwright.quantizer import QuantDescriptor

INPUT, WEIGHT = "quant_desc_input", "quant_desc_weight"


@overload
def pop_quant_desc_in_kwargs(quant_cls: type[Any], input_only: Literal[True], **kwargs: Any) -> QuantDescriptor: ...


@overload
def pop_quant_desc_in_kwargs(
    quant_cls: type[Any], input_only: Literal[False] = False, **kwargs: Any
) -> tuple[QuantDescriptor, QuantDescriptor]: ...


def pop_quant_desc_in_kwargs(
    quant_cls: type[Any], input_only: bool = False, **kwargs: Any
) -> QuantDescriptor | tuple[QuantDescriptor, QuantDescriptor]:
    """Read the descriptors from ``kwargs``; where one is not given, or None, it is the default of ``quant_cls``.

    Args:
        quant_cls: the class that is being constructed.
        input_only: whether the class has no weight.
        kwargs: all that is left of the constructor's arguments; anything but descriptors is a TypeError.

    Returns:
        The input's descriptor, or that and the weight's.
    """
    allowed = [INPUT] if input_only else [INPUT, WEIGHT]
    _refuse_unknown(quant_cls, kwargs, allowed)
    desc_input = kwargs.get(INPUT) or quant_cls.default_quant_desc_input
    return desc_input if input_only else (desc_input, kwargs.get(WEIGHT) or quant_cls.default_quant_desc_weight)


class TakesDescriptors:
    """Mixed before a module of torch, takes descriptors besides the arguments of the original's constructor."""

    init_quantizer: Callable[..., None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        cls = type(self)
        names = [INPUT, WEIGHT] if issubclass(cls, QuantMixin) else [INPUT]
        original = next(c for c in cls.__mro__ if c.__module__.startswith("torch.nn"))
        refuse_unknown(cls, kwargs, original, names)
        descriptors = [kwargs.pop(n, None) or getattr(cls, f"default_{n}") for n in names]
        super().__init__(*args, **kwargs)
        self.init_quantizer(*descriptors)


def refuse_unknown(cls: type[Any], kwargs: dict[str, Any], original: type[Any], names: list[str]) -> None:
    """Raise a TypeError for an argument that neither the ``original`` class nor the descriptors' ``names`` know."""
    own = list(inspect.signature(original.__init__).parameters.values())[1:]
    takes_anything = any(p.kind is p.VAR_KEYWORD for p in own)
    asked = {k: v for k, v in kwargs.items() if k.startswith("quant_desc")} if takes_anything else kwargs
    _refuse_unknown(cls, asked, [*names, *(p.name for p in own)])


def _refuse_unknown(cls: type[Any], kwargs: dict[str, Any], allowed: list[str]) -> None:
    for name in kwargs:
        if name not in allowed:
            raise TypeError(f"{cls.__name__} has no argument {name!r}{suggest(name, allowed)}")
