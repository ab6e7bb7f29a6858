"""Descriptors among constructor arguments: ``quant_desc_input`` and ``quant_desc_weight``, and nothing misspelt."""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from bitwright.nn.mixins import INPUT, WEIGHT, refuse_unknown


def pop_quant_desc_in_kwargs(quant_cls: type[Any], input_only: bool = False, **kwargs: Any) -> Any:  # noqa: ANN401
    """Read the descriptors from ``kwargs``; where one is not given, or None, it is the default of ``quant_cls``.

    Args:
        quant_cls: the class that is being constructed.
        input_only: whether the class has no weight.
        kwargs: all that is left of the constructor's arguments; anything but descriptors is a TypeError.

    Returns:
        The input's descriptor, or that and the weight's.
    """
    names = (INPUT,) if input_only else (INPUT, WEIGHT)
    refuse_unknown(quant_cls.__name__, kwargs, names)
    found = tuple(kwargs.get(name) or getattr(quant_cls, f"default_{name}") for name in names)
    return found[0] if input_only else found


class TakesDescriptors:
    """Mixed before a module of torch, takes descriptors besides the arguments of the original's constructor."""

    descriptors: ClassVar[tuple[str, ...]]
    init_quantizer: Callable[..., None]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        cls = type(self)
        original = next(c for c in cls.__mro__ if c.__module__.startswith("torch.nn"))
        own = list(inspect.signature(original.__init__).parameters.values())[1:]
        takes_anything = any(p.kind is p.VAR_KEYWORD for p in own)
        asked = {k: v for k, v in kwargs.items() if k.startswith("quant_desc")} if takes_anything else kwargs
        refuse_unknown(cls.__name__, asked, [*cls.descriptors, *(p.name for p in own)])
        descriptors = [kwargs.pop(n, None) or getattr(cls, f"default_{n}") for n in cls.descriptors]
        super().__init__(*args, **kwargs)
        self.init_quantizer(*descriptors)
