"""Arguments of the QAT layers: their names and synonyms, valid values, and what is refused."""

import enum
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from bitwright.errors import ConfigError, suggest
from bitwright.methods.options import flag

FLOAT_BITS = 32


class Qmodes(enum.Enum):
    """One scale for the whole weight, or one for each kernel (output channel)."""

    layer_wise = 1
    kernel_wise = 2


@dataclass(frozen=True)
class Options:
    """The arguments of a QAT layer in addition to its operator's.

    Attributes:
        num_bit_w: bits of the weight; 32 leaves it float. Also ``nbits_w`` and ``bit_w``.
        num_bit_a: bits of the input; 32 leaves it float. Also ``nbits_a`` and ``bit_a``.
        bSetQ: quantize; if not, the layer is the float one.
        quant_activation: quantize the input. Also ``QInput``.
        signed: the input has negative values (LSQ; LSQ+ without an offset).
        q_mode: one scale for the weight or one per kernel.
        add_offset_w: LSQ+ learns an offset of the weight's grid, too.
        add_offset_a: LSQ+ learns an offset of the input's grid. Also ``add_offset``.
        init_method_w: scale of the weight from its mean and deviation (1, LSQ+), its mean magnitude (2, LSQ), or by
            searching for the least squared error (3).
        init_method_a: the same for the input.
        scale_grad: multiply gradients of scales and offsets by 1 / √(n·qmax).
        debug: keep the last quantized weight and input as ``Qweight`` and ``Qactivation``.
    """

    num_bit_w: int = 4
    num_bit_a: int = 4
    bSetQ: bool = True
    quant_activation: bool = True
    signed: bool = False
    q_mode: Qmodes = Qmodes.layer_wise
    add_offset_w: bool = False
    add_offset_a: bool = True
    init_method_w: int = 1
    init_method_a: int = 1
    scale_grad: bool = True
    debug: bool = False

    @property
    def quantized(self) -> tuple[bool, bool]:
        """Whether the weight and the input are quantized, as far as bits say."""
        return self.num_bit_w != FLOAT_BITS, self.quant_activation and self.num_bit_a != FLOAT_BITS


COMMON = frozenset({"num_bit_w", "num_bit_a", "bSetQ", "quant_activation", "q_mode", "debug"})
OFFSETS = frozenset({"signed", "add_offset_a", "scale_grad"})
STARTS = frozenset({"add_offset_w", "init_method_w", "init_method_a"})
_SYNONYMS = {
    "nbits_w": "num_bit_w",
    "bit_w": "num_bit_w",
    "nbits_a": "num_bit_a",
    "bit_a": "num_bit_a",
    "QInput": "quant_activation",
    "add_offset": "add_offset_a",
}
# Arguments that did nothing, failed, or have no counterpart: accepted with the value found in old files.
_ONLY: dict[str, Any] = {
    "momentum": 0.1,
    "alpha_thres": 0.5,
    "bias_quant": False,
    "auto_signed": False,
    "customer_backward_w": False,
    "customer_backward_a": False,
    "wquant_error_loss": False,
    "aquant_error_loss": False,
    "quant_loss": False,
    "power": True,
    "additive": True,
    "grad_scale": None,
}


def operator_class(layer: type[nn.Module]) -> type[nn.Module]:
    """The class of torch.nn that a quantized layer is derived from."""
    return next(c for c in layer.__mro__ if c.__module__.startswith("torch.nn"))


def split_options(
    layer: type[nn.Module], known: frozenset[str], defaults: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[Options, dict[str, Any]]:
    """Separate a layer's own arguments from its operator's; raises for those that neither has."""
    theirs = list(inspect.signature(operator_class(layer)).parameters)
    names = [*known, *(s for s, name in _SYNONYMS.items() if name in known)]
    ours: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for key, value in given.items():
        if key in theirs:
            rest[key] = value
        elif key in names:
            name = _SYNONYMS.get(key, key)
            if name in ours and ours[name] != value:
                raise ConfigError(f"{layer.__name__} is given two values of {name}: {ours[name]!r} and {value!r}")
            ours[name] = value
        elif key not in _ONLY:
            raise ConfigError(f"{layer.__name__} has no argument {key!r}{suggest(key, [*names, *theirs])}")
        elif value != _ONLY[key]:
            raise ConfigError(f"{layer.__name__} supports {key}={_ONLY[key]!r} only, not {value!r}: leave it out")
    return _checked(layer.__name__, Options(**{**defaults, **ours})), rest


def _checked(layer: str, options: Options) -> Options:
    for field in fields(options):
        if isinstance(field.default, bool):
            flag(layer, field.name, getattr(options, field.name))
    for name, (fits, allowed) in _ALLOWED.items():
        value = getattr(options, name)
        if not fits(value):
            raise ConfigError(f"{name} of {layer} must be {allowed}, not {value!r}")
    return options


def _is_width(bits: object) -> bool:
    return isinstance(bits, int) and not isinstance(bits, bool) and (2 <= bits <= 16 or bits == FLOAT_BITS)


_WIDTH = (_is_width, f"from 2 to 16, or {FLOAT_BITS} for float")
_START = (lambda start: start in (1, 2, 3), "1 (LSQ+), 2 (LSQ) or 3 (search)")
_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "q_mode": (lambda mode: isinstance(mode, Qmodes), "Qmodes.layer_wise or Qmodes.kernel_wise"),
    **dict.fromkeys(("num_bit_w", "num_bit_a"), _WIDTH),
    **dict.fromkeys(("init_method_w", "init_method_a"), _START),
}
