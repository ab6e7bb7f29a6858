"""Backend: what a piece of hardware or a runtime really does, as data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import fx

from bitwright.errors import ConfigError
from bitwright.registry import Registry
from bitwright.spec import PerGroup, QuantSpec

BACKENDS: Registry["Backend"] = Registry("backend")


@dataclass(frozen=True)
class Backend:
    """How a target computes.

    Args:
        name: how users choose it.
        title: one line on what it is.
        weight: spec of weights; a channel axis means the output channels, wherever the operator has them.
        activation: spec of everything else.
        integer: operators that run in integers when their inputs are quantized. The value says whether the result
            must be quantized too (True), or may stay float where nothing needs it quantized (False).
        fused: activations that the target computes as part of the operator before them.
        reasons: why an operator stays float, for the ledger.
        conditions: for an operator, a function of the graph node that says why this very call cannot run in integers,
            or None if it can.
        share_inputs: operators all of whose inputs, and whose output, must have one scale.
        weight_formats: number formats a weight can have.
        activation_formats: number formats an activation can have.
        unsigned_activations: write int8 activations as uint8, shifted by 128: the same values in other integers.
        runtimes: programs on this machine that can execute the exported file.
        observer: default observer of activations.
        weight_observer: default observer of weights.
        method: default method.
        notes: what a user should know.
    """

    name: str
    title: str
    weight: QuantSpec
    activation: QuantSpec
    integer: Mapping[str, bool]
    fused: frozenset[str] = frozenset()
    reasons: Mapping[str, str] = field(default_factory=dict)
    conditions: Mapping[str, Callable[[fx.Node], str | None]] = field(default_factory=dict)
    share_inputs: frozenset[str] = frozenset()
    weight_formats: frozenset[str] = frozenset()
    activation_formats: frozenset[str] = frozenset()
    unsigned_activations: bool = False
    runtimes: tuple[str, ...] = ()
    observer: str = "MinMaxObserver"
    weight_observer: str = "MinMaxObserver"
    method: str = "FixedFakeQuantize"
    notes: tuple[str, ...] = ()

    def check_weight(self, spec: QuantSpec, where: str) -> QuantSpec:
        """Return ``spec`` if the target has weights like that, else refuse."""
        self._check(spec, self.weight_formats, "weights", where)
        if not spec.symmetric:
            raise ConfigError(f"{where}: {self.name} needs symmetric weights, not '{spec}'")
        return spec

    def check_activation(self, spec: QuantSpec, where: str) -> QuantSpec:
        """Return ``spec`` if the target has activations like that, else refuse."""
        self._check(spec, self.activation_formats, "activations", where)
        if str(spec.granularity) != "tensor":
            raise ConfigError(f"{where}: {self.name} needs one scale per activation tensor, not '{spec}'")
        return spec

    def _check(self, spec: QuantSpec, formats: frozenset[str], kind: str, where: str) -> None:
        if formats and spec.format.name not in formats:
            raise ConfigError(
                f"{where}: {self.name} has no {kind} in {spec.format}; it has {', '.join(sorted(formats))}"
            )
        if isinstance(spec.granularity, PerGroup):
            raise ConfigError(f"{where}: {self.name} has no scales per group ('{spec}')")


def register_backend(*, override: bool = False) -> Callable[[Backend], Backend]:
    """Return a function that files a Backend under its name.

    ::

        MINE = register_backend()(Backend(name="mine", ...))
    """

    def decorate(backend: Backend) -> Backend:
        return BACKENDS.register(backend.name, override=override)(backend)

    return decorate
