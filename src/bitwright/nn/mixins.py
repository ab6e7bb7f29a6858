"""Mixins that make a module a QModule, which owns, or refers to, the quantizers of its input and weight.

Both mixins work on either side of the class they are mixed with, and have no ``__init__``:

    class QuantMaxPool2d(nn.MaxPool2d, QuantInputMixin):
        def __init__(self, *args, **kwargs):
            quant_desc_input = kwargs.pop("quant_desc_input", self.default_quant_desc_input)
            super().__init__(*args, **kwargs)
            self.init_quantizer(quant_desc_input)
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Self, cast

from torch import Tensor, nn

from bitwright.errors import ConfigError, suggest
from bitwright.nn.placed import InputQuantizer, PlacedQuantizer
from bitwright.nn.registry import adopt
from bitwright.quantizer import QuantDescriptor, TensorQuantizer

INPUT, WEIGHT = "quant_desc_input", "quant_desc_weight"


class QuantInputMixin:
    """An operator with an ``input_quantizer``; ``descriptors`` are the names of its constructor's."""

    descriptors: ClassVar[tuple[str, ...]] = (INPUT,)
    default_quant_desc_input: ClassVar[QuantDescriptor] = QuantDescriptor()
    quantizer_class: ClassVar[type[TensorQuantizer]] = TensorQuantizer
    _input_quantizer: InputQuantizer

    @classmethod
    def set_default_quant_desc_input(cls, value: QuantDescriptor) -> None:
        """Set how inputs of this class are quantized from now on; a copy is kept."""
        cls.default_quant_desc_input = copy.deepcopy(_descriptor(value, INPUT))

    @property
    def input_quantizer(self) -> InputQuantizer:
        return self._input_quantizer

    def init_quantizer(self, quant_desc_input: QuantDescriptor) -> None:
        """Create the quantizer of the input; call this after the constructor of ``nn.Module``."""
        self._input_quantizer = self.build_quantizer(quant_desc_input, INPUT)

    @classmethod
    def build_quantizer(cls, descriptor: QuantDescriptor, name: str) -> TensorQuantizer:
        """Build a quantizer from its descriptor, which must use fake quantization: modules compute on floats."""
        if not _descriptor(descriptor, name).fake_quant:
            raise ValueError(f"Only fake quantization is supported inside a module: {name} has fake_quant=False")
        return cls.quantizer_class(descriptor)

    def place_input_quantizer(self, quantizer: TensorQuantizer) -> None:
        """Record that ``quantizer`` runs on the edge before this module."""
        self.__dict__.get("_modules", {}).pop("_input_quantizer", None)
        self._input_quantizer = PlacedQuantizer(quantizer)

    @classmethod
    def from_float(cls, module: nn.Module, **descriptors: QuantDescriptor | None) -> Self:
        """Build this QModule from a float module: same parameters, buffers, hooks and settings, plus quantizers."""
        refuse_unknown(f"{cls.__name__}.from_float", descriptors, cls.descriptors)
        made = adopt_checked(cls, module)
        made.init_quantizer(*(descriptors.get(n) or getattr(cls, f"default_{n}") for n in cls.descriptors))
        return made


class QuantMixin(QuantInputMixin):
    """An operator with an ``input_quantizer`` and a ``weight_quantizer``.

    Attributes:
        channel_axis: the axis of the weight that has the output channels.
    """

    descriptors: ClassVar[tuple[str, ...]] = (INPUT, WEIGHT)
    default_quant_desc_weight: ClassVar[QuantDescriptor] = QuantDescriptor(axis=0)
    channel_axis = 0
    weight: Tensor
    bias: Tensor | None
    _weight_quantizer: TensorQuantizer

    @classmethod
    def set_default_quant_desc_weight(cls, value: QuantDescriptor) -> None:
        """Set how weights of this class are quantized from now on; a copy is kept."""
        cls.default_quant_desc_weight = copy.deepcopy(_descriptor(value, WEIGHT))

    @property
    def weight_quantizer(self) -> TensorQuantizer:
        return self._weight_quantizer

    def init_quantizer(
        self,
        quant_desc_input: QuantDescriptor,
        quant_desc_weight: QuantDescriptor | None = None,
        num_layers: int | None = None,
    ) -> None:
        """Create the quantizers, or for ``num_layers`` layers one pair each in ``_input_quantizers`` and so on."""
        desc_weight = quant_desc_weight or type(self).default_quant_desc_weight
        num_layers = num_layers or self._places()
        if num_layers is None:
            self._input_quantizer = self.build_quantizer(quant_desc_input, INPUT)
            self._weight_quantizer = self.build_quantizer(desc_weight, WEIGHT)
            return
        layers = range(num_layers)
        self._input_quantizers = nn.ModuleList(self.build_quantizer(quant_desc_input, INPUT) for _ in layers)
        self._weight_quantizers = nn.ModuleList(self.build_quantizer(desc_weight, WEIGHT) for _ in layers)

    def _places(self) -> int | None:
        """The number of pairs of quantizers, or None if there is a single unnumbered one."""
        return None

    def folded_weight(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias before quantization, with folds multiplied in."""
        return self.weight, getattr(self, "bias", None)

    def stored_weights(self) -> dict[str, Tensor]:
        """The tensor that each weight quantizer quantizes, by the quantizer's name; files store these as integers."""
        own = isinstance(getattr(self, "weight", None), Tensor) and hasattr(self, "_weight_quantizer")
        return {"_weight_quantizer": self.folded_weight()[0]} if own else {}

    def weight_keys(self) -> list[str]:
        """The names of the weight quantizers that :meth:`stored_weights` has weights for."""
        return list(self.stored_weights())

    def bias_scale(self) -> Tensor | None:
        """The scale of an int32 bias, or None where the bias stays float."""
        return None


def refuse_unknown(name: str, given: Mapping[str, object], allowed: Iterable[str]) -> None:
    """Raise a TypeError if ``name`` is called with an argument that it does not have."""
    for argument in given:
        if argument not in allowed:
            raise TypeError(f"Unused keys: {name} has no argument {argument!r}{suggest(argument, allowed)}")


def adopt_checked(cls: type[Any], module: nn.Module) -> Any:  # noqa: ANN401
    """Adopt ``module`` if ``cls`` derives from its class."""
    if isinstance(module, QuantInputMixin):
        raise ConfigError(f"this {type(module).__name__} is quantized already")
    if not issubclass(cls, type(module)):
        wanted = next((c.__name__ for c in cls.__mro__ if c.__module__.startswith("torch.nn")), "float")
        raise ConfigError(f"{cls.__name__}.from_float takes a {wanted} module, not a {type(module).__name__}")
    return adopt(cls, module)


def _descriptor(value: object, name: str) -> QuantDescriptor:
    if not isinstance(value, QuantDescriptor):
        raise ValueError(f"{name} must be a QuantDescriptor, not {value!r}")
    return cast("QuantDescriptor", value)


def pop_quant_desc_in_kwargs(quant_cls: type[Any], input_only: bool = False, **kwargs: object) -> Any:  # noqa: ANN401
    """Read the descriptors from ``kwargs``; one that is missing or None is the default of ``quant_cls``.

    Anything else that is left in ``kwargs`` is a TypeError. With ``input_only``, return the input's alone.
    """
    names = (INPUT,) if input_only else (INPUT, WEIGHT)
    refuse_unknown(quant_cls.__name__, kwargs, names)
    found = tuple(kwargs.get(name) or getattr(quant_cls, f"default_{name}") for name in names)
    return found[0] if input_only else found


class TakesDescriptors:
    """Mixed before a torch module, takes descriptors in addition to the original constructor's arguments."""

    descriptors: ClassVar[tuple[str, ...]]
    init_quantizer: Callable[..., None]

    def __init__(self, *args: object, **kwargs: object) -> None:
        cls = type(self)
        original = next(c for c in cls.__mro__ if c.__module__.startswith("torch.nn"))
        own = list(inspect.signature(original.__init__).parameters.values())[1:]
        takes_anything = any(p.kind is p.VAR_KEYWORD for p in own)
        asked = {k: v for k, v in kwargs.items() if k.startswith("quant_desc")} if takes_anything else kwargs
        refuse_unknown(cls.__name__, asked, [*cls.descriptors, *(p.name for p in own)])
        descriptors = [kwargs.pop(n, None) or getattr(cls, f"default_{n}") for n in cls.descriptors]
        super().__init__(*args, **kwargs)
        self.init_quantizer(*descriptors)
