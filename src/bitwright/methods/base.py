"""Method: how a value is rounded and what its gradient is."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bitwright.errors import ConfigError
from bitwright.numerics import dequantize, quantize, wide
from bitwright.numerics.views import broadcast
from bitwright.registry import Registry, check_class, describe
from bitwright.spec import PerGroup, PerTensor, QuantSpec
from bitwright.torch_internals import is_exported

_PAGE = "docs/how-to/custom-method.md"
_GIVEN = ("x", "scale", "zero_point")
_CALLS = {
    **{"__init__": ("spec",), "levels": (), "limits": ()},
    **dict.fromkeys(("start", "qparams", "unit"), _GIVEN[1:]),
    **dict.fromkeys(("forward", "integers", "values"), _GIVEN),
}


def _check(cls: object) -> None:
    check_class(cls, Method, _CALLS, _PAGE)
    if getattr(cls, "forward", None) is Method.forward:
        raise ConfigError(f"{describe(cls)} must define how it rounds, in forward(x, scale, zero_point): see {_PAGE}")


METHODS: Registry[type["Method"]] = Registry("method", _check)


def register_method(
    name: str, *, aliases: tuple[str, ...] = (), override: bool = False
) -> Callable[[type["Method"]], type["Method"]]:
    """File a method class under a name.

    Subclass :class:`Method`, write ``forward``, and decorate; that is the whole plug-in::

        @register_method("FloorFakeQuantize")
        class Floor(Method):
            def forward(self, x, scale, zero_point): ...
    """
    return METHODS.register(name, aliases=aliases, override=override)


class Method(nn.Module):
    """Turns float values into quantized ones (still float) for one spec.

    A method that learns something makes its Parameters in :meth:`start`, from the scale and zero point that the
    observer has found. A method with a scale of its own says so in :meth:`qparams`, and one that moves values before it
    rounds them in :meth:`integers`; export, verify and the bias of the layer ask these. One whose levels are not evenly
    spaced says them in :meth:`levels` and :meth:`unit`: a file then has a table of them, and integers are places in it.

    Attributes:
        uniform: whether results lie on the grid ``(q - zero_point) * scale``, so that they can be stored as integers.
        floating: whether it can round to fp8, too.
        has_range: whether it has a range of its own and needs no calibrated one.
        keeps_size: whether what it gives grows with what it is given.
        reconstruction: the method of ``bw.reconstruct`` that teaches it what it is chosen for; empty once it is taught,
            or if calibration or ordinary training does.
    """

    uniform = True
    floating = False
    has_range = False
    keeps_size = True
    reconstruction = ""

    def __init__(self, spec: QuantSpec) -> None:
        super().__init__()
        self.spec = spec

    @property
    def axis(self) -> int | None:
        """The axis along which scales change, if any."""
        return None if isinstance(self.spec.granularity, PerTensor) else self.spec.granularity.axis

    @property
    def group(self) -> int | None:
        """Values per scale along the axis, if the spec groups them."""
        return self.spec.granularity.size if isinstance(self.spec.granularity, PerGroup) else None

    def differentiable(self, x: Tensor) -> bool:
        """Whether gradients may be asked for; if not, the plain operator gives the same values, and export knows it."""
        return torch.is_grad_enabled() and not is_exported(x)

    def learn(self, name: str, value: Tensor) -> None:
        """Make ``value`` a Parameter; one that is there in that shape is set in place, so optimizers keep it."""
        known = self._parameters.get(name)
        if known is None or known.shape != value.shape:
            self.register_parameter(name, nn.Parameter(value.detach().float().clone()))
        else:
            with torch.no_grad():
                known.copy_(value)

    def gradient_factor(self, x: Tensor, scale: Tensor) -> float:
        """1 / √(n·qmax) with n values per scale: makes a scale's steps fit the weights' (LSQ)."""
        return (max(x.numel() // max(scale.numel(), 1), 1) * self.spec.qmax) ** -0.5

    def start(self, scale: Tensor, zero_point: Tensor) -> None:
        """Begin from a calibrated scale and zero point: make Parameters, or set the existing ones."""

    def qparams(self, scale: Tensor, zero_point: Tensor) -> tuple[Tensor, Tensor]:
        """The scale and (integer) zero point in force, given those that were calibrated."""
        return scale, zero_point

    def integers(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """The integers that ``x`` is stored as, given the calibrated scale and zero point."""
        spec = self.spec
        if not self.uniform:
            levels, unit = self.levels(), broadcast(self.unit(scale, zero_point), x, self.axis, self.group)
            multiples = wide(self.forward(x, scale, zero_point)) / unit
            return torch.bucketize(multiples.contiguous(), (levels[1:] + levels[:-1]) / 2).to(torch.uint8)
        params = self.qparams(scale, zero_point)
        return quantize(x, *params, spec.qmin, spec.qmax, self.axis, self.group, dtype=spec.format.storage)

    def values(self, integers: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """What :meth:`integers` stand for, given the calibrated scale and zero point."""
        if self.uniform or self.spec.format.floating:
            return dequantize(integers, *self.qparams(scale, zero_point), self.axis, self.group)
        unit = broadcast(self.unit(scale, zero_point), integers, self.axis, self.group)
        return self.levels()[integers.long()] * unit

    def levels(self) -> Tensor:
        """The values that results can have, sorted, at most 256, as multiples of :meth:`unit`, if it is not uniform."""
        raise ConfigError(f"{type(self).__name__} does not define its levels: write levels() and unit()")

    def unit(self, scale: Tensor, zero_point: Tensor) -> Tensor:
        """What levels are multiples of, given the calibrated scale and zero point."""
        return self.qparams(scale, zero_point)[0]

    def limits(self) -> tuple[Tensor, Tensor] | None:
        """The ends that values are clipped to before they are rounded, if they are."""
        return None

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        """Quantize and dequantize ``x``, given the calibrated scale and zero point."""
        raise NotImplementedError(
            f"{type(self).__name__} must define how it rounds: write forward(x, scale, zero_point)"
        )
