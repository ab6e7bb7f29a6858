"""Layout: whether images can be channels-last in memory, as convolutions on a CPU prefer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from bitwright.reconstruction.samples import close
from bitwright.reconstruction.units import Unit


def takes_channels_last(
    model: nn.Module,
    units: Sequence[Unit],
    calls: Sequence[nn.Module],
    inputs: Mapping[fx.Node, Any],
    last_reader: Mapping[fx.Node, int],
) -> bool:
    """Whether all units accept their inputs channels-last, and return the same results.

    Depthwise and 1x1 convolutions are several times faster that way. Code that needs a view of other sizes rejects it.
    """
    if not _convolves(model) or not all(map(_on_cpu, inputs.values())):
        return False
    usual, other = dict(inputs), {node: _moved(value) for node, value in inputs.items()}
    for number, (unit, call) in enumerate(zip(units, calls, strict=True)):
        results = call(*(usual[node] for node in unit.inputs))
        moved = _tried(call, [other[node] for node in unit.inputs])
        if moved is None or not _same(moved, results):
            return False
        usual |= zip(unit.outputs, results, strict=True)
        other |= zip(unit.outputs, map(_moved, moved), strict=True)
        for node in [n for n in usual if last_reader.get(n, -1) <= number]:
            del usual[node], other[node]
    return True


def _tried(call: nn.Module, inputs: Sequence[Any]) -> Sequence[Any] | None:
    try:
        return call(*inputs)
    except RuntimeError:
        return None


def _convolves(model: nn.Module) -> bool:
    return any(isinstance(m, nn.Conv2d) for m in model.modules())


def _same(moved: Sequence[Any], results: Sequence[Any]) -> bool:
    return all(close(m, r) for m, r in zip(moved, results, strict=True) if isinstance(r, Tensor))


def _on_cpu(value: object) -> bool:
    return not isinstance(value, Tensor) or value.device.type == "cpu"


def _moved(value: Any) -> Any:  # noqa: ANN401
    images = isinstance(value, Tensor) and value.ndim == 4
    return value.contiguous(memory_format=torch.channels_last) if images else value
