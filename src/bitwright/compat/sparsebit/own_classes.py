"""Base classes for users' Sparsebit observers and quantizers, adapted to Bitwright's."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from bitwright.compat.sparsebit.descriptor import QuantDescriptor
from bitwright.compat.sparsebit.quantization.quant_config import CfgNode
from bitwright.errors import CalibrationError
from bitwright.methods.base import Method
from bitwright.observers.base import Observer
from bitwright.observers.state.rows import as_rows
from bitwright.spec import QuantSpec


class Granularity(Enum):
    """What an observer treats as one: the whole tensor, or each channel."""

    LAYERWISE = 0
    CHANNELWISE = 1
    GROUPWISE = 2


class DataCache(list[Tensor]):
    """The batches that an old observer has been shown; as a list, each with its channels first: (channels, n)."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer
        self._batches: list[Tensor] = []

    def update(self, data: Tensor) -> None:
        """Keep one batch."""
        self._batches.append(data)
        self.append(as_rows(data, self._observer.spec).transpose(0, 1).flatten(1))  # from (outer, channel, inner)

    def reset(self) -> None:
        """Let go of all batches."""
        self._batches = []
        self.clear()

    def get_data_cache(self) -> list[Tensor]:
        """The batches."""
        return self._batches

    def get_batch_size(self) -> int:
        """How many samples there are."""
        return sum(len(batch) for batch in self._batches)

    def get_data_for_calibration(self, granularity: Granularity) -> Tensor:
        """All values: (n,) layerwise, or (channels, n)."""
        if not self:
            raise CalibrationError("no data was seen: run the model after prepare_calibration()")
        if granularity is Granularity.LAYERWISE:
            return torch.cat([batch.reshape(-1) for batch in self._batches])
        return torch.cat(self, 1)


class _Described:
    """What both kinds of classes need to know about their spec."""

    spec: QuantSpec
    takes_config = True

    @property
    def qdesc(self) -> QuantDescriptor:
        """The current spec."""
        return QuantDescriptor(self.spec)

    @property
    def bit(self) -> int:
        return self.qdesc.bit

    @property
    def is_perchannel(self) -> bool:
        return self.qdesc.is_perchannel

    @property
    def is_symmetric(self) -> bool:
        """Whether zero is in the middle of the grid."""
        return self.qdesc.is_symmetric


class BaseObserver(_Described, Observer):
    """An observer that keeps its data and returns the range from ``calc_minmax``.

    ::

        @register_observer
        class Observer(BaseObserver):
            TYPE = "mine"

            def calc_minmax(self):
                data = self.data_cache.get_data_for_calibration(Granularity.CHANNELWISE)
                self.data_cache.reset()
                return data.amin(1), data.amax(1)

    Prefer to override ``observe`` and ``range`` like Bitwright's observers, which keep no data.
    """

    def __init__(self, config: object, qdesc: QuantDescriptor) -> None:
        super().__init__(qdesc.spec)
        self.cfg = config
        self.data_cache = DataCache(self)
        self.min_val, self.max_val = torch.tensor(float("-inf")), torch.tensor(float("inf"))
        self._found: tuple[Tensor, Tensor] | None = None

    def observe(self, x: Tensor) -> None:
        self.data_cache.update(x.detach().clone())
        self._found = None

    def get_calibration_data(self, c_first: bool = False) -> Tensor:
        """All values, as joined batches or (channels, n), which are then forgotten."""
        cache = self.data_cache
        data = cache.get_data_for_calibration(Granularity.CHANNELWISE) if c_first else torch.cat(cache.get_data_cache())
        cache.reset()
        return data

    def reset_data_cache(self) -> None:
        """Let go of all batches."""
        self.data_cache.reset()

    def calc_minmax(self) -> tuple[Tensor, Tensor]:
        """The lowest and highest value to represent, one for each scale."""
        raise NotImplementedError(f"{type(self).__name__} must say in calc_minmax() what the range is")

    def range(self) -> tuple[Tensor, Tensor]:
        if self._found is None:
            lo, hi = self.calc_minmax()
            self._found = self.shaped(torch.as_tensor(lo).reshape(-1), torch.as_tensor(hi).reshape(-1))
        return self._found

    def absorb(self, other: "BaseObserver") -> None:
        for batch in other.data_cache.get_data_cache():
            self.observe(batch)


class Quantizer(_Described, Method):
    """A way to round, written in ``_forward``; ``STE.apply`` is the usual one.

    ::

        @register_quantizer
        class Quantizer(BaseQuantizer):
            TYPE = "mine"

            def _forward(self, x, scale, zero_point):
                return STE.apply(x, scale, zero_point, self.qdesc, self.backend)
    """

    backend = None

    def __init__(self, config: Any) -> None:
        qdesc = config["qdesc"] if isinstance(config, Mapping) and "qdesc" in config else QuantDescriptor(config)
        super().__init__(qdesc.spec)
        self.cfg = config

    def _forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must say in _forward(x, scale, zero_point) how it rounds")

    def forward(self, x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
        if self.axis is not None:
            shape = [1] * x.dim()
            shape[self.axis] = -1
            scale, zero_point = scale.reshape(shape), zero_point.reshape(shape)
        return self._forward(x, scale, zero_point)


def fit(cls: type, takes_qdesc: bool) -> None:
    """Make a class whose constructor takes ``(config, qdesc)`` or ``(config)`` constructible from a spec."""
    made: Any = cls.__init__

    def __init__(self: Any, spec: Any, config: Any = None) -> None:
        if not isinstance(spec, QuantSpec):  # a class derived from this one calls it as it was written
            made(self, spec, config) if takes_qdesc else made(self, spec)
        elif takes_qdesc:
            made(self, CfgNode.of(config or {}), QuantDescriptor(spec))
        else:
            made(self, CfgNode.of({**(config or {}), "qdesc": QuantDescriptor(spec)}))

    cls.__init__ = __init__  # pyrefly: ignore


class STE:
    """Round to the grid; gradients as if nothing was rounded, for the scale and the zero point, too."""

    @staticmethod
    def apply(x: Tensor, scale: Tensor, zero_point: Tensor, qdesc: QuantDescriptor, backend: object = None) -> Tensor:
        """``x`` on the grid of scale and zero point."""
        unit = x / scale
        zero = zero_point + (zero_point.round() - zero_point).detach()
        level = unit + (unit.round() - unit).detach() + zero
        return (level.clamp(*qdesc.qrange) - zero) * scale
