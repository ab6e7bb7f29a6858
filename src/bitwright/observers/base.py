"""Observer: sees tensors, keeps O(channels) state and never the tensors, answers scale and zero point."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Self

import torch
from torch import Tensor

from bitwright.errors import CalibrationError, ConfigError
from bitwright.numerics import scale_and_zero_point
from bitwright.numerics.ranges import SMALLEST_SCALE
from bitwright.observers.state.rows import as_params, as_rows, row_min_max
from bitwright.registry import Registry, check_class
from bitwright.spec import PerTensor, QuantSpec

SCALE_OF_ZEROS = 2.0**-20
"""The scale of a tensor of zeros: a bias in units of it fits into int32 without raising the scale of the weights."""

_PAGE = "docs/how-to/custom-observer.md"
_CALLS = {"__init__": ("spec",), "observe": ("x",), "range": (), "absorb": ("other",)}
OBSERVERS: Registry[type["Observer"]] = Registry("observer", lambda cls: check_class(cls, Observer, _CALLS, _PAGE))


def register_observer(name: str, *, aliases: tuple[str, ...] = (), override: bool = False):  # noqa: ANN201
    """File an observer class under a name.

    Subclass :class:`Observer`, write ``observe`` and ``range``, and decorate; that is the whole plug-in::

        @register_observer("Top99Observer")
        class Top99Observer(Observer):
            def observe(self, x): ...
            def range(self): ...
    """
    return OBSERVERS.register(name, aliases=aliases, override=override)


class Observer(ABC):
    """Finds the range of a tensor for one spec, batch by batch.

    Attributes:
        batch: the number of the current batch, if calibration sets it: an observer that several tensors share is
            called several times per batch.
        kept: the attributes, tensors and whole numbers, that hold what was seen; ``"histogram.lo"`` is one of a part.
    """

    batch: int | None = None
    kept: tuple[str, ...] = ()

    def __new__(cls, *args: object, **options: object) -> Self:
        if missing := sorted(cls.__abstractmethods__):
            lack = " and ".join(missing)
            raise ConfigError(f"observer {cls.__name__} does not define {lack}: see {_PAGE}")
        observer = super().__new__(cls)
        observer._given = (args, options)  # for reset()
        return observer

    _given: tuple[tuple[Any, ...], dict[str, Any]]

    def __init__(self, spec: QuantSpec) -> None:
        self.spec = spec
        self.param_shape: tuple[int, ...] | None = None
        self.batches = 0

    def __call__(self, x: Tensor) -> None:
        if x.numel() == 0:
            return
        shape = self.spec.param_shape(tuple(x.shape))
        if self.param_shape is not None and shape != self.param_shape:
            raise CalibrationError(
                f"the shape changed: {self.param_shape} channels before, now {shape} for a tensor of {tuple(x.shape)}"
            )
        self.param_shape = shape
        with torch.no_grad():
            self.observe(x.detach())
        self.batches += 1

    @abstractmethod
    def observe(self, x: Tensor) -> None:
        """Take one non-empty tensor into account."""

    @abstractmethod
    def range(self) -> tuple[Tensor, Tensor]:
        """Return the lowest and highest value to represent, each of ``param_shape``."""

    def merge(self, other: Self) -> None:
        """Take over what another observer of the same kind has seen, as if this one had seen it next."""
        check_same_kind(self, other)
        if other.batches:
            self.absorb(other)
            self.param_shape = other.param_shape
            self.batches += other.batches

    def absorb(self, other: Self) -> None:
        """Combine ``kept`` with that of another observer of the same kind, which has seen something."""
        raise ConfigError(f"{type(self).__name__} cannot be merged: write absorb(other), or observe all data with one")

    def state_tensors(self) -> dict[str, Tensor]:
        """Return copies of what was seen, by name; :meth:`load_state_tensors` continues from there."""
        if not self.kept:
            raise ConfigError(f"{type(self).__name__} does not define what it keeps: name its tensors in `kept`")
        state = {"batches": torch.tensor(self.batches)}
        if self.param_shape is not None:
            state["param_shape"] = torch.tensor(self.param_shape, dtype=torch.int64)
        for name in self.kept:
            value = attrgetter(name)(self)
            if value is not None:
                state[name] = torch.as_tensor(value).clone(memory_format=torch.contiguous_format)
        return state

    def load_state_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Forget everything and take over the ``state_tensors`` of an observer of the same kind, spec and options."""
        known = {"batches", "param_shape", *self.kept}
        if "batches" not in state or not known.issuperset(state):
            raise ConfigError(
                f"{type(self).__name__} keeps {', '.join(sorted(known))}, "
                f"but the state has {', '.join(sorted(state)) or 'nothing'}"
            )
        self.reset()
        self.batches = int(state["batches"])
        shape = state.get("param_shape")
        self.param_shape = None if shape is None else tuple(shape.tolist())
        for name in state.keys() & set(self.kept):
            part, _, last = name.rpartition(".")
            owner = attrgetter(part)(self) if part else self
            whole = isinstance(getattr(owner, last), int)
            setattr(owner, last, int(state[name]) if whole else state[name].detach().clone())

    def shaped(self, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        """Give a range of channels, in the order of ``as_rows``, the shape of the spec's scale."""
        shape = self.param_shape or ()
        return as_params(lo, self.spec, shape), as_params(hi, self.spec, shape)

    def seen(self) -> tuple[Tensor, Tensor]:
        """Return two tensors that are finite only if everything seen was; cheap, unlike ``range``, which may search."""
        found: Any = self.range()
        if not (isinstance(found, tuple | list) and len(found) == 2 and all(isinstance(end, Tensor) for end in found)):
            raise ConfigError(f"{type(self).__name__}.range must return two tensors, not {found!r}: see {_PAGE}")
        return found[0], found[1]

    def qparams(self) -> tuple[Tensor, Tensor]:
        """Return scale and zero point for what was seen."""
        if not self.batches:
            raise CalibrationError("no data was seen")
        lo, hi = Observer.seen(self)
        if not bool(torch.isfinite(lo).all() & torch.isfinite(hi).all()):
            raise CalibrationError("NaN or infinity was seen")
        if bool((lo > hi).any()):
            raise CalibrationError(f"{type(self).__name__}.range returns a highest value below the lowest")
        scale, zero_point = scale_and_zero_point(lo, hi, self.spec)
        return torch.where(scale <= 2 * SMALLEST_SCALE, SCALE_OF_ZEROS, scale), zero_point

    def reset(self) -> None:
        """Forget everything seen, but keep the options and the spec."""
        (args, options), spec = self._given, self.spec
        self.__init__(*args, **options)  # pyrefly: ignore
        self.spec = spec


def min_max(x: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Lowest and highest value per tensor, channel or group, in the shape of the spec's scale."""
    if isinstance(spec.granularity, PerTensor):
        lo, hi = torch.aminmax(x)
        return lo.float(), hi.float()
    lo, hi = row_min_max(as_rows(x, spec))
    shape = spec.param_shape(tuple(x.shape))
    return as_params(lo, spec, shape), as_params(hi, spec, shape)


def check_same_kind(one: Observer, other: Observer) -> None:
    """Raise unless two observers can be merged: the same class, spec and options."""
    if type(one) is not type(other) or one.spec != other.spec:
        raise ConfigError(
            f"cannot merge {type(other).__name__} of '{other.spec}' into {type(one).__name__} of '{one.spec}'"
        )
    mine, theirs = _options(one), _options(other)
    for name, value in mine.items():
        if theirs[name] != value:
            raise ConfigError(
                f"cannot merge {type(one).__name__} with {name}={theirs[name]!r} into one with {name}={value!r}: "
                "observers of the same data need the same options"
            )


def _options(observer: Observer) -> dict[str, Any]:
    """The options an observer was made with, including defaults."""
    args, options = observer._given
    given = inspect.signature(type(observer)).bind(*args, **options)
    given.apply_defaults()
    return given.arguments
