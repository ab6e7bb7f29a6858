"""A quantizer beyond its tensors: spec, observer, method and switches, and how to rebuild it."""

import inspect
from typing import Any

from pydantic import Field, JsonValue
from torch import Tensor

from bitwright.errors import BitwrightError, SaveError
from bitwright.methods import METHODS, Method
from bitwright.observers import OBSERVERS
from bitwright.quantizer import Mode, TensorQuantizer
from bitwright.quantizer.build import build_method, build_observer
from bitwright.registry import Registry
from bitwright.saving.tensors import SEEN
from bitwright.spec import QuantSpec
from bitwright.validation import Strict

_SWITCHES = ("label", "observer_name", "method_name", "dynamic", "fixed", "scale_amax", "enabled")
_OF_TORCH = ("training", "_is_full_backward_hook")
_PLAIN = (bool, int, float, str, type(None))


class QuantizerRecord(Strict):
    """One quantizer of a saved model."""

    spec: str
    placed: str
    """The spec it had when it was made; another one since then is the work of change_spec."""
    observer: str
    observer_options: dict[str, JsonValue] = Field(default_factory=dict)
    method: str
    method_settings: dict[str, JsonValue] = Field(default_factory=dict)
    switches: dict[str, JsonValue] = Field(default_factory=dict)
    mode: int = Field(strict=True)

    @classmethod
    def of(cls, name: str, quantizer: TensorQuantizer) -> "QuantizerRecord":
        """Describe a quantizer."""
        options = quantizer.observer._given[1]
        odd = [key for key, value in options.items() if not _is_plain(value)]
        if odd:
            raise SaveError(
                f"the observer of {name} has the option {odd[0]!r}, which a folder of plain data cannot hold"
            )
        return cls(
            spec=str(quantizer.spec),
            placed=_placed_spec(quantizer),
            observer=_name(OBSERVERS, quantizer.observer),
            observer_options=dict(options),
            method=_name(METHODS, quantizer.method),
            method_settings=_settings(quantizer.method),
            switches={key: getattr(quantizer, key) for key in _SWITCHES},
            mode=quantizer.mode.value,
        )

    def restore(self, name: str, quantizer: TensorQuantizer, tensors: dict[str, Tensor]) -> None:
        """Turn ``quantizer`` into the described one, with its tensors."""
        if (placed := _placed_spec(quantizer)) != self.placed:
            raise SaveError(f"the quantizer {name} was made as '{self.placed}', but now as '{placed}'")
        try:
            self._configure(quantizer)
            quantizer.load_state_dict({key: t for key, t in tensors.items() if not key.startswith(SEEN)})
            seen = {key.removeprefix(SEEN): t for key, t in tensors.items() if key.startswith(SEEN)}
            if seen:
                quantizer.observer.load_state_tensors(seen)
        except (BitwrightError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise SaveError(f"the quantizer {name} cannot load what was saved: {reason}") from error
        for key in _SWITCHES:
            setattr(quantizer, key, self.switches[key])
        quantizer.mode = Mode(self.mode)

    def _configure(self, quantizer: TensorQuantizer) -> None:
        spec = QuantSpec.parse(self.spec)
        if _name(OBSERVERS, quantizer.observer) != self.observer:
            quantizer.observer = build_observer(spec, self.observer, self.observer_options)
        if _name(METHODS, quantizer.method) != self.method:
            known = inspect.signature(METHODS.get(self.method)).parameters
            options = {key: value for key, value in self.method_settings.items() if key in known}
            quantizer.method = build_method(spec, self.method, options)
        quantizer.forget_range()
        if quantizer.spec != spec:
            quantizer.change_spec(spec)
        for key in _settings(quantizer.method).keys() & self.method_settings.keys():
            setattr(quantizer.method, key, self.method_settings[key])


def _placed_spec(quantizer: TensorQuantizer) -> str:
    """The spec that a quantizer was created with, which its observer remembers."""
    args = quantizer.observer._given[0]
    return str(args[0] if args and isinstance(args[0], QuantSpec) else quantizer.spec)


def _name(registry: Registry[Any], item: object) -> str:
    """The name of an observer or a method in its registry, or its class if it has none."""
    return next((n for n in registry if registry.get(n) is type(item)), type(item).__name__)


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return isinstance(value, _PLAIN) or (isinstance(value, list | tuple) and all(map(_is_plain, value)))


def _settings(method: Method) -> dict[str, Any]:
    """The plain attributes of a method: its options, and what it remembers."""
    return {k: v for k, v in method.__dict__.items() if isinstance(v, _PLAIN) and k not in _OF_TORCH}
