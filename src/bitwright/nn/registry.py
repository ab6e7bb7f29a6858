"""Which QModule serves which source: ``register_qmodule`` and the look-ups behind it."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn

from bitwright.errors import ConfigError

QMODULES: dict[Any, type[nn.Module]] = {}
C = TypeVar("C", bound=type)


def register_qmodule(sources: Iterable[Any], *, override: bool = False) -> Callable[[C], C]:
    """Say which modules, functions and method names a QModule class takes the place of.

    ::

        @register_qmodule(sources=[nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d])
        class QAdaptiveAvgPool2d(QuantOpr): ...
    """

    def decorate(cls: C) -> C:
        for source in sources:
            taken = QMODULES.get(source)
            if taken is not None and not override:
                name = getattr(source, "__name__", source)
                raise ConfigError(
                    f"{name} is registered twice: by {taken.__module__}.{taken.__qualname__} and by "
                    f"{cls.__module__}.{cls.__qualname__}; pass override=True to replace the first"
                )
        for source in sources:
            QMODULES[source] = cls
        return cls

    return decorate


def adopt(cls: type[nn.Module], module: nn.Module) -> Any:  # noqa: ANN401
    """Make a ``cls`` of ``module`` without a constructor: same parameters, buffers, hooks and settings."""
    adopted = cls.__new__(cls)
    adopted.__dict__.update(module.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        adopted.__dict__[name] = module.__dict__[name].copy()
    return adopted


def list_qmodules() -> dict[str, list[str]]:
    """Every QModule class by name, with the sources it serves."""
    table: dict[str, list[str]] = {}
    for source, cls in QMODULES.items():
        table.setdefault(cls.__name__, []).append(getattr(source, "__name__", str(source)))
    return table
