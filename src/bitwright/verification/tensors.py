"""Compare a file's quantized tensors with the simulation's, layer by layer from equal inputs.

At every quantizer the simulation computes its integers from the *runtime's* values upstream; after the comparison the
runtime's integers replace the simulation's. So a difference is charged to the layer that causes it, and the
simulation's outputs differ from the file's only by what comes after the last quantizers.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bitwright.exporting import ExportedTensor
from bitwright.exporting.interleaved import split_into_phases
from bitwright.quantizer import TensorQuantizer, quantizers
from bitwright.verification.proof import TensorCheck

Rounding = Callable[[str, int, TensorQuantizer, Tensor, Tensor], Tensor | None]
_INSIDE = "an operator of the file finds its range and rounds it itself"
_FAR = 1e9  # steps
_UNKNOWN = "the file's record does not know this call of the quantizer"


@contextmanager
def rounding_by(model: nn.Module, rounding: Rounding) -> Iterator[None]:
    """Inside, ask ``rounding`` for the result of every call of a quantizer; None leaves it unchanged.

    It receives the quantizer's name, the number of the call, the quantizer, the tensor to be quantized, and the result.
    """
    calls: Counter[str] = Counter()

    def hook(name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Tensor | None:  # noqa: ANN401
        call = calls[name]
        calls[name] += 1
        return rounding(name, call, module, args[0] if args else next(iter(kwargs.values())), result)

    with ExitStack() as hooks:
        for name, quantizer in quantizers(model).items():
            if quantizer.quantizes:
                bound = _bind(hook, name)
                handle = quantizer.register_forward_hook(bound, with_kwargs=True)
                hooks.callback(handle.remove)
        yield


def _bind(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
    return lambda *given: hook(name, *given)


class TensorTally:
    """Adds up differences of quantized tensors over batches.

    ``stored`` returns a tensor that the file stores.
    """

    def __init__(self, entries: tuple[ExportedTensor, ...], stored: Callable[[str], np.ndarray | None]) -> None:
        self._entries = {(e.quantizer, e.call): e for e in entries}
        self._weights = {e.quantizer: e for e in entries if e.kind == "weight"}
        self._stored = stored
        self._checks: dict[tuple[str, int], TensorCheck] = {}
        self._called: set[str] = set()
        self._fused: Mapping[str, str] = {}
        self._untouched: Mapping[str, str] = {}

    @property
    def watched(self) -> list[str]:
        """The tensors that the runtime must expose."""
        return [e.tensor for e in self._entries.values() if e.tensor and e.kind == "activation"]

    def deviating(self) -> ExportedTensor | None:
        """The first computed tensor so far that is off by more than one step."""
        for key, entry in self._entries.items():
            check = self._checks.get(key)
            if check is not None and check.kind == "activation" and (check.largest or 0) > 1:
                return entry
        return None

    @contextmanager
    def follow(
        self,
        model: nn.Module,
        given: Mapping[str, np.ndarray],
        fused: Mapping[str, str] | None = None,
        untouched: Mapping[str, str] | None = None,
    ) -> Iterator[None]:
        """While the model runs on one batch, compare its tensors with the runtime's, and continue from the runtime's.

        ``fused`` are tensors that the runtime does not round because they are part of a larger operator, with that
        operator; ``untouched`` cannot be compared, for the reasons given.
        """
        self._fused, self._untouched = fused or {}, untouched or {}

        def rounding(name: str, call: int, quantizer: TensorQuantizer, x: Tensor, result: Tensor) -> Tensor | None:
            self._called.add(name)
            entry = self._weights.get(name) or self._entries.get((name, call))
            if entry is None:
                inside = quantizer.dynamic and not quantizer.calibrated
                reason, key = (_INSIDE, (name, 0)) if inside else (_UNKNOWN, (name, call))
                self._checks[key] = TensorCheck(quantizer.label or name, reason=reason, excused=inside)
                return None
            if entry.kind == "weight":
                self._compare_weight(entry, quantizer, x, result)
                return None
            return self._compare(entry, quantizer, x, result, given.get(entry.tensor))

        with rounding_by(model, rounding):
            yield

    def checks(self) -> list[TensorCheck]:
        """The findings about each quantizer of the file, in file order."""
        made = []
        for key, entry in self._entries.items():
            check = self._checks.pop(key, None) or TensorCheck(entry.name, kind=entry.kind)
            if not check.values and not check.reason:
                check.reason, check.excused = self._why_not(entry)
            made.append(check)
        return [*made, *self._checks.values()]

    def _why_not(self, entry: ExportedTensor) -> tuple[str, bool]:
        if not entry.tensor:
            called = entry.quantizer in self._called
            return entry.reason, entry.excused or not called
        if entry.tensor in self._fused:
            return f"the runtime computes it as part of {self._fused[entry.tensor]}, and does not round it", True
        if entry.tensor in self._untouched:
            return self._untouched[entry.tensor], True
        if entry.quantizer not in self._called:
            return "the simulation did not call its quantizer", False
        return "it has no values", False

    def _compare_weight(self, entry: ExportedTensor, quantizer: TensorQuantizer, x: Tensor, result: Tensor) -> None:
        key = (entry.quantizer, entry.call)
        if key not in self._checks and entry.tensor:
            check = self._checks[key] = TensorCheck(entry.name, kind="weight")
            ours = returned_integers(quantizer, x, result)
            if entry.phases and len(entry.phases) == ours.ndim - 1 and not len(ours) % entry.phases[0]:
                ours = split_into_phases(ours, entry.phases[0], entry.phases[1:])
            self._tally(check, entry, quantizer, ours, self._stored(entry.tensor))

    def _compare(
        self,
        entry: ExportedTensor,
        quantizer: TensorQuantizer,
        x: Tensor,
        result: Tensor,
        theirs: np.ndarray | None,
    ) -> Tensor | None:
        if not entry.tensor or entry.tensor in self._untouched:
            return None
        if entry.tensor in self._fused:
            return _saturated(quantizer, x)
        check = self._checks.setdefault((entry.quantizer, entry.call), TensorCheck(entry.name))
        found = self._tally(check, entry, quantizer, returned_integers(quantizer, x, result), theirs)
        if found is None:
            return None
        return quantizer.values(found).to(x.dtype)

    def _tally(
        self,
        check: TensorCheck,
        entry: ExportedTensor,
        quantizer: TensorQuantizer,
        ours: Tensor,
        given: np.ndarray | None,
    ) -> Tensor | None:
        """Compare integers, or fp8 numbers, and return the runtime's, or None if that is impossible."""
        if given is None:
            return _give_up(check, "the runtime does not expose it")
        theirs = torch.from_numpy(np.array(given.view(np.uint8) if "float8" in given.dtype.name else given))
        theirs = theirs.to(ours.device)
        if theirs.shape != ours.shape:
            return _give_up(
                check, f"its shape is {list(theirs.shape)} in the file and {list(ours.shape)} in the simulation"
            )
        if ours.is_floating_point():  # fp8, as its bits or as float32
            theirs = theirs.to(ours.dtype) if theirs.is_floating_point() else theirs.view(ours.dtype)
        elif theirs.is_floating_point():
            return _give_up(check, f"the runtime exposes it as {given.dtype}, not as integers")
        elif entry.shift:
            theirs = theirs.to(torch.int32) - entry.shift
        if not check.reason and ours.numel():
            _add(check, (_steps(ours) - _steps(theirs)).abs())
        return theirs


def returned_integers(quantizer: TensorQuantizer, x: Tensor, result: Tensor) -> Tensor:
    """The integers that a quantizer's result is, in whole steps.

    They are those that are stored, unless a method computes other values than it stores.
    """
    stored = quantizer.integers(x)
    if stored.is_floating_point() or stored.shape != result.shape:
        return stored
    meant = quantizer.values(stored)
    if torch.equal(meant.to(result.dtype), result):
        return stored
    low, high = (quantizer.spec.qmin, quantizer.spec.qmax) if quantizer.method.uniform else (0, _last_level(quantizer))
    numbers = stored.to(torch.int32)
    above, below = (quantizer.values((numbers + step).clamp(low, high)) for step in (1, -1))
    step = torch.maximum(above - meant, meant - below)
    steps = ((result.to(meant.dtype) - meant) / step).nan_to_num(0.0).clamp(-_FAR, _FAR)
    steps = steps.masked_fill(result.isnan() & ~x.isnan(), _FAR)
    return numbers + steps.round().to(torch.int32)


def _last_level(quantizer: TensorQuantizer) -> int:
    return len(quantizer.method.levels()) - 1


def _saturated(quantizer: TensorQuantizer, x: Tensor) -> Tensor:
    """A tensor within its quantizer's range, not rounded."""
    scale, zero_point = quantizer.qparams()
    low, high = ((q - zero_point) * scale for q in (quantizer.spec.qmin, quantizer.spec.qmax))
    return x.clamp(low, high) if quantizer.uniform and not scale.ndim else x


def _give_up(check: TensorCheck, reason: str) -> None:
    check.reason, check.values = reason, 0


def _add(check: TensorCheck, gap: Tensor) -> None:
    total = check.values + gap.numel()
    share = gap.numel() / total
    mean, equal = float(gap.double().mean()), float((gap == 0).double().mean())
    check.largest = max(check.largest or 0, int(gap.max()))
    check.mean = (check.mean or 0.0) * (1 - share) + mean * share
    check.equal = (check.equal or 0.0) * (1 - share) + equal * share
    check.values = total


def _steps(stored: Tensor) -> Tensor:
    """Integers unchanged; for fp8, the rank among the format's numbers, so that neighbours differ by one."""
    if not stored.is_floating_point():
        return stored.to(torch.int64)
    bits = stored.view(torch.uint8).to(torch.int32)
    return torch.where(bits >= 128, 128 - bits, bits)
