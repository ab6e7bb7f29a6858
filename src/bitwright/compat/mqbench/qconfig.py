"""``extra_qconfig_dict``: MQBench's observers, fake quantizers and schemes as tensor recipes."""

from collections.abc import Mapping
from typing import Any

from bitwright.compat.keys import flag, section
from bitwright.compat.mqbench.backend_type import BackendType
from bitwright.errors import ConfigError
from bitwright.methods import METHODS
from bitwright.observers import OBSERVERS
from bitwright.recipe import TensorRecipe
from bitwright.spec import PerChannel, PerTensor, QuantSpec

_PARTS = ("observer", "fakequantize", "qscheme", "observer_extra_args", "fakeq_params")
KEYS = [f"{letter}_{part}" for part in _PARTS for letter in "wa"]
_SCHEME = {"bit": 8, "symmetry": True, "per_channel": False, "pot_scale": False, "symmetric_range": False}
_DOREFA: dict[str, dict[str, Any]] = {"w": {"normalize": True}, "a": {}}  # weights are rounded after the tanh
_CHANNELS = {"w": 0, "a": 1}  # for weights the output channels, for activations those after the batch


# What MQBench chooses for OpenVINO, where Bitwright's backend learns nothing.
_OPENVINO = {
    **{"w_observer": "MinMaxObserver", "a_observer": "EMAMinMaxObserver"},
    **dict.fromkeys(("w_fakequantize", "a_fakequantize"), "LearnableFakeQuantize"),
}


def read_qconfig(given: object, target: BackendType) -> dict[str, TensorRecipe]:
    """The recipes of weights and activations that ``extra_qconfig_dict`` asks for."""
    config = section("extra_qconfig_dict", given, KEYS)
    if target is BackendType.OPENVINO:
        config = {**_OPENVINO, **config}
    return {"weight": _tensor("w", config), "activation": _tensor("a", config)}


def _tensor(letter: str, config: Mapping[str, Any]) -> TensorRecipe:
    observer, method = (_name(config, f"{letter}_{part}") for part in ("observer", "fakequantize"))
    if observer is not None:
        OBSERVERS.get(observer)
    if method is not None:
        METHODS.get(method)
    spec, options = _scheme(letter, config.get(f"{letter}_qscheme"))
    more, settings = (
        section(key, config.get(key)) for key in (f"{letter}_observer_extra_args", f"{letter}_fakeq_params")
    )
    return TensorRecipe(
        spec=spec,
        observer=observer,
        method=method,
        observer_options={**options, **more},
        method_options={**_DOREFA[letter], **settings} if method == "DoReFaFakeQuantize" else dict(settings),
    )


def _name(config: Mapping[str, Any], key: str) -> str | None:
    value = config.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{key} must be a name in quotes, not {value!r}")
    return value


def _scheme(letter: str, given: Any) -> tuple[QuantSpec | None, dict[str, Any]]:
    """The spec of a scheme, and the observer's arguments among its keys."""
    if given is None:
        return None, {}
    return read_scheme(letter, given), {key: value for key, value in given.items() if key not in _SCHEME}


def read_scheme(letter: str, given: object) -> QuantSpec:
    """The spec of a scheme of a weight (``w``) or an activation (``a``)."""
    where = f"{letter}_qscheme"
    scheme = {key: section(where, given).get(key, default) for key, default in _SCHEME.items()}
    for key in _SCHEME:
        if key != "bit":
            flag(f"{where}: {key}", scheme[key])
    if scheme["symmetric_range"] and not scheme["symmetry"]:
        raise ConfigError(f"{where}: symmetric_range is for symmetric schemes; this one has symmetry False")
    if not isinstance(scheme["bit"], int) or isinstance(scheme["bit"], bool):
        raise ConfigError(f"{where}: bit must be a number of bits, not {scheme['bit']!r}")
    return QuantSpec(
        format=f"{'int' if scheme['symmetry'] else 'uint'}{scheme['bit']}",  # pyrefly: ignore
        symmetric=scheme["symmetry"],
        narrow=scheme["symmetric_range"],
        power_of_two=scheme["pot_scale"],
        granularity=PerChannel(_CHANNELS[letter]) if scheme["per_channel"] else PerTensor(),
    )
