"""Sparsebit's settings for weights and activations as tensor recipes."""

from collections.abc import Mapping
from typing import Any

from bitwright.compat.attributes import plain
from bitwright.compat.keys import flag, number
from bitwright.compat.sparsebit.defaults import LAYOUTS, OBSERVERS, QUANTIZERS, SCHEMES
from bitwright.errors import ConfigError, UnknownNameError, suggest
from bitwright.methods import METHODS
from bitwright.observers import OBSERVERS as ALL_OBSERVERS
from bitwright.recipe import TensorRecipe
from bitwright.spec import PerChannel, PerTensor, QuantSpec

_OWN_START = {"LearnableFakeQuantize": "LSQObserver"}  # LSQ starts from the mean magnitude, whatever the observer


def read_tensor(kind: str, config: Mapping[str, Any]) -> TensorRecipe:
    """The recipe of the section ``W`` or ``A``."""
    quantizer, observer = config["QUANTIZER"], config["OBSERVER"]
    if flag(f"{kind}.QUANTIZER.DISABLE", quantizer["DISABLE"]):
        return TensorRecipe(spec="float")  # pyrefly: ignore
    method = _named(f"{kind}.QUANTIZER.TYPE", quantizer["TYPE"], QUANTIZERS, METHODS)
    found = _named(f"{kind}.OBSERVER.TYPE", observer["TYPE"], OBSERVERS, ALL_OBSERVERS)
    if found == "MinMaxObserver":
        found = "LSQPlusObserver" if (kind, method) == ("W", "LSQPlusFakeQuantize") else _OWN_START.get(method, found)
    spec, bits = _spec(kind, config)
    return TensorRecipe(
        spec=spec,
        bits=bits,
        observer=found,
        method=method,
        observer_options=_section(ALL_OBSERVERS.get(found), config) or _options(found, observer),
        method_options=_section(METHODS.get(method), config) or _method_options(kind, method, quantizer),
    )


def _section(cls: type, config: Mapping[str, Any]) -> dict[str, Any]:
    """The section as an option of classes that are written for Sparsebit and read it themselves."""
    return {"config": plain(config)} if getattr(cls, "takes_config", False) else {}


def _method_options(kind: str, method: str, config: Mapping[str, Any]) -> dict[str, Any]:
    if (kind, method) == ("A", "PACTFakeQuantize"):
        return {"alpha": number("A.QUANTIZER.PACT.ALPHA_VALUE", config["PACT"]["ALPHA_VALUE"])}
    return {"normalize": True} if (kind, method) == ("W", "DoReFaFakeQuantize") else {}


def _named(where: str, given: Any, names: Mapping[str, str], registry: Any) -> str:
    """The name of an observer or method for one of Sparsebit's, in any case, or for one of the registry."""
    if isinstance(given, str):
        if given.lower() in registry.names():  # a user's own, which may have the name of one of Sparsebit's
            return given.lower()
        if given.lower() in names or given in registry:
            return names.get(given.lower(), given)
    raise UnknownNameError(f"{where}: unknown type {given!r}{suggest(str(given), [*names, *registry.names()])}")


def _spec(kind: str, config: Mapping[str, Any]) -> tuple[QuantSpec | None, int | None]:
    scheme, bits = config["QSCHEME"], config["QUANTIZER"]["BIT"]
    if not isinstance(bits, int) or isinstance(bits, bool):
        raise ConfigError(f"{kind}.QUANTIZER.BIT must be a number of bits, not {bits!r}")
    if scheme is None:
        return None, None if bits == -1 else bits
    if scheme not in SCHEMES:
        raise UnknownNameError(f"{kind}.QSCHEME: unknown scheme {scheme!r}{suggest(str(scheme), SCHEMES)}")
    _, grain, symmetry = scheme.split("-")
    spec = QuantSpec(
        format=f"{'int' if symmetry == 'symmetric' else 'uint'}{8 if bits == -1 else bits}",  # pyrefly: ignore
        symmetric=symmetry == "symmetric",
        granularity=PerTensor() if grain == "tensor" else PerChannel(0 if kind == "W" else _axis(config)),
    )
    return spec, None


def _axis(config: Mapping[str, Any]) -> int:
    layout = config["OBSERVER"]["LAYOUT"]
    if layout not in LAYOUTS:
        raise UnknownNameError(f"A.OBSERVER.LAYOUT: unknown layout {layout!r}{suggest(str(layout), LAYOUTS)}")
    return LAYOUTS[layout]


def _options(observer: str, config: Mapping[str, Any]) -> dict[str, Any]:
    if observer == "PercentileObserver":
        return {"alpha": config["PERCENTILE"]["ALPHA"]}
    if observer == "ACIQObserver":
        return {"distribution": str(config["ACIQ"]["DISTRIBUTION"]).lower()}
    if observer == "EMAMinMaxObserver" and "MOVING_AVERAGE" in config:
        return {"ema_ratio": config["MOVING_AVERAGE"]["EMA_RATIO"]}
    return {}
