"""The float model that correctors aim at: the prepared one with its quantizers off, before any corrector ran.

A corrector changes parameters, and with them what the model computes in float. The first one therefore keeps a copy of
the parameters, and later ones compare with it. If anything else changes the parameters afterwards, such as training or
loading, they become the new original.
"""

import copy
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from bitwright.graph import Inputs
from bitwright.modes import eval_mode
from bitwright.nn.weight_sites import weight_sites
from bitwright.quantizer import TensorQuantizer, float_state_dict, quantizers
from bitwright.quantizer.mode import Mode

_KEPT = "bitwright_original"  # in the __dict__ of a model that was corrected


class Original:
    """The parameters and buffers of a model before it was corrected."""

    def __init__(self, model: nn.Module) -> None:
        self.state = {name: value.detach().clone() for name, value in float_state_dict(model).items()}
        self.ranges = _weight_ranges(model)
        self.marks: list[float] = []

    def run(self, model: nn.Module, inputs: Inputs) -> Any:  # noqa: ANN401
        """Run the original model in float."""
        given = inputs.copied()
        with torch.no_grad(), eval_mode(model), all_off(model):
            return functional_call(model, self.state, given.args, given.kwargs, tie_weights=False)  # each has its own

    @contextmanager
    def restored(self, model: nn.Module) -> Generator[None, None, None]:
        """Temporarily restore a model's original parameters and buffers."""
        tensors = {n: v for n, v in float_state_dict(model).items() if isinstance(v, Tensor) and n in self.state}
        now = {name: value.detach().clone() for name, value in tensors.items()}
        try:
            _copy(self.state, tensors)
            yield
        finally:
            _copy(now, tensors)

    def twin(self, model: nn.Module) -> nn.Module:
        """A copy of the original model, with its quantizers off."""
        made = copy.deepcopy(model)
        _copy(self.state, {n: v for n, v in float_state_dict(made).items() if isinstance(v, Tensor)})
        for quantizer in quantizers(made).values():
            quantizer.mode = Mode.OFF
        return made

    def follow(self, model: nn.Module, change: Callable[[], object]) -> None:
        """Apply to the original a parameter change that does not alter what the model computes."""
        with self.restored(model):
            change()
            self.state |= {n: v.detach().clone() for n, v in float_state_dict(model).items() if n in self.state}
            self.ranges = _weight_ranges(model)

    def keep(self, model: nn.Module) -> None:
        """Remain the original of a model with its current parameters."""
        self.marks = _marks(model)
        model.__dict__[_KEPT] = self

    def bring_back(self, model: nn.Module) -> None:
        """Permanently undo all corrections but those that do not alter what the model computes in float."""
        _copy(self.state, {n: v for n, v in float_state_dict(model).items() if isinstance(v, Tensor)})
        for quantizer, state in self.ranges.items():
            quantizer.load_state_dict(state, strict=False)
        model.__dict__.pop(_KEPT, None)


@contextmanager
def all_off(model: nn.Module) -> Generator[None, None, None]:
    """Make every quantizer of a model pass tensors unchanged, then restore each mode."""
    modes = {q: q.mode for q in quantizers(model).values()}
    try:
        for quantizer in modes:
            quantizer.mode = Mode.OFF
        yield
    finally:
        for quantizer, mode in modes.items():
            quantizer.mode = mode


@contextmanager
def correcting(model: nn.Module) -> Generator[Original, None, None]:
    """Yield the original of a model that is about to be corrected, and remember it for the next corrector."""
    original = original_of(model) or Original(model)
    yield original
    original.keep(model)


def original_of(model: nn.Module) -> Original | None:
    """The model before it was corrected, or None if it was not, or has changed since."""
    known: Original | None = model.__dict__.get(_KEPT)
    return known if known is not None and known.marks == _marks(model) else None


@contextmanager
def in_float(model: nn.Module) -> Generator[None, None, None]:
    """Temporarily give a model the parameters that it had before it was corrected, if it was."""
    original = original_of(model)
    with nullcontext() if original is None else original.restored(model):
        yield


@contextmanager
def uncorrected(model: nn.Module) -> Generator[None, None, None]:
    """Temporarily undo corrections, as :func:`undo_corrections` does."""
    original, now = original_of(model), Original(model)
    undone = undo_corrections(model)
    try:
        yield
    finally:
        if undone and original is not None:
            now.bring_back(model)
            original.keep(model)


def undo_corrections(model: nn.Module) -> bool:
    """Undo what correctors did, except for factors that they moved between layers; return whether there was anything.

    Roundings that were learned since then were learned with the corrections, so these stay.
    """
    original = original_of(model)
    if original is None or any(getattr(q.method, "rounding", None) is not None for q in original.ranges):
        return False
    original.bring_back(model)
    return True


def _weight_ranges(model: nn.Module) -> dict[TensorQuantizer, dict[str, Any]]:
    """The state of the quantizers of weights, whose ranges follow re-estimated norms."""
    return {site.quantizer: copy.deepcopy(site.quantizer.state_dict()) for site in weight_sites(model)}


def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in target.items():
            value.copy_(source[name])


def _marks(model: nn.Module) -> list[float]:
    """A few numbers that differ once parameters do."""
    values = [v for v in float_state_dict(model).values() if isinstance(v, Tensor)]
    return [float(part) for v in values for part in (v.double().sum(), v.double().square().sum())]
