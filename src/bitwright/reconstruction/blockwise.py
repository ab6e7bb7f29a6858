"""Calibrate block by block: all batches go through one block before the next, so each weight is read once."""

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from bitwright.calibration import as_batches, as_inputs, calibrate_by, watched
from bitwright.distributed import TIMEOUT
from bitwright.errors import CalibrationError
from bitwright.files import scratch_folder
from bitwright.graph.inputs import bind_inputs
from bitwright.graph.names import module_of
from bitwright.mapped_weights import in_memory
from bitwright.preparation import ledger_of
from bitwright.progress import track
from bitwright.quantizer import TensorQuantizer, quantizers
from bitwright.reconstruction.columns import Memory
from bitwright.reconstruction.subgraph import subgraph
from bitwright.reconstruction.units import Unit, find_units
from bitwright.reconstruction.whole import graph_of


@torch.inference_mode(False)  # what it makes outlives it, and may be trained
def calibrate_by_block(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    memory_limit: float = 4e9,
    progress: bool | None = None,
    uneven: bool = False,
    timeout: float = TIMEOUT,
) -> nn.Module:
    """Calibrate a model whose weights are too large for memory; the ranges are those of ``calibrate``, to the bit.

    All batches go through one block of the graph (a residual block, an attention with its sum) after the other. If
    :func:`~bitwright.map_weights` gave the model its weights, only those of the block are in memory. Of all values,
    only those between this block and later ones are kept. A model that could not be captured is one block.

    Args:
        model: what ``prepare`` returned.
        batches: as for ``calibrate``.
        memory_limit: bytes of values between blocks to keep in memory; more go to files in the temporary folder
            (``TMPDIR``).
        progress: show a progress bar; by default only on a terminal.
        uneven: as for ``calibrate``, and so is the last.
        timeout: seconds.

    Returns:
        The same model, now quantizing.
    """
    example = ledger_of(model).example

    def observe(seeing: dict[str, TensorQuantizer]) -> int:
        with scratch_folder(tempfile.gettempdir()) as folder:
            graph = graph_of(model, example)
            values = _Values(Memory(memory_limit, folder))
            inputs = [n for n in graph.graph.nodes if n.op == "placeholder"]
            number = 0
            for batch in as_batches(batches):
                number += 1
                given = as_inputs(batch, len(example.args))
                bound = bind_inputs(model, given.args, given.kwargs)
                for node in inputs:
                    values.add(node, bound.get(str(node.target), node.args[0] if node.args else None))
            if not number:
                return 0
            all_seeing = set(seeing.values())
            blocks = find_units(graph, lambda node: _has_weights(node, graph), "block", 1, all_seeing.__contains__)
            for unit in track(blocks, "calibrating", show=progress):
                _observe_block(graph, unit, values, all_seeing, number)
            return number

    return calibrate_by(observe, model, uneven=uneven, timeout=timeout)


def _has_weights(node: fx.Node, model: nn.Module) -> bool:
    module = module_of(node, model)
    return module is not None and any(True for _ in module.parameters())


def _observe_block(
    model: fx.GraphModule, unit: Unit, values: "_Values", seeing: set[TensorQuantizer], batches: int
) -> None:
    """Take all batches through one block, and keep its results instead of what only it reads."""
    call = subgraph(model, unit.nodes, unit.inputs, unit.outputs)
    own = [q for node in unit.nodes for q in _quantizers(node, model) if q in seeing]
    with in_memory(_weights(call)):
        for number in range(batches):
            try:
                with watched(own, number + 1):
                    results = call(*(values.get(node, number) for node in unit.inputs))
            except CalibrationError:
                raise
            except Exception as error:
                raise CalibrationError(
                    f"the block {unit.name} refuses calibration batch {number + 1}: {type(error).__name__}: {error}"
                ) from error
            for node, result in zip(unit.outputs, results, strict=True):
                if any(user.op != "output" for user in node.users):
                    values.add(node, result)
    values.done.update(unit.nodes)
    for node in unit.inputs:
        if all(user in values.done or user.op == "output" for user in node.users):
            values.free(node)


def _quantizers(node: fx.Node, model: nn.Module) -> list[TensorQuantizer]:
    module = module_of(node, model)
    return [] if module is None else list(quantizers(module).values())


def _weights(call: fx.GraphModule) -> Iterator[Tensor]:
    """The tensors that a block reads, each once."""
    found: dict[int, Tensor] = {}
    for node in call.graph.nodes:
        if node.op == "call_module":
            found |= {id(p): p for p in call.get_submodule(str(node.target)).parameters()}
        elif node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            value = getattr(call.get_submodule(owner), name)
            found |= {id(value): value} if isinstance(value, Tensor) else {}
    yield from found.values()


class _Values:
    """What nodes between two blocks gave, batch by batch."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._kept: dict[fx.Node, list[Any]] = {}
        self.done: set[fx.Node] = set()

    def add(self, node: fx.Node, value: Any) -> None:  # noqa: ANN401
        """Keep the value for the next batch."""
        plain = isinstance(value, Tensor) and value.layout is torch.strided and value.numel() > 0
        self._kept.setdefault(node, []).append(_Laid.of(value.detach(), self._memory) if plain else value)

    def get(self, node: fx.Node, batch: int) -> Any:  # noqa: ANN401
        """The value for one batch; a copy, as who computes with it may write into it."""
        value = self._kept[node][batch]
        if isinstance(value, _Laid):
            return value.tensor()
        return value.clone() if isinstance(value, Tensor) else value

    def free(self, node: fx.Node) -> None:
        """Give memory and files back."""
        for value in self._kept.pop(node):
            if isinstance(value, _Laid) and value.path is not None:
                value.path.unlink(missing_ok=True)
            elif isinstance(value, _Laid):
                self._memory.used -= value.span.nbytes


class _Laid(NamedTuple):
    """A tensor as it lies in memory: kernels compute by that, and their results shall have the same bits."""

    span: Tensor  # from its first value in memory to its last
    path: Path | None
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, value: Tensor, memory: Memory) -> "_Laid":
        length = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        span, path = memory.empty((length,), value)
        span.copy_(value.as_strided((length,), (1,)))
        return cls(span, path, value.shape, value.stride())

    def tensor(self) -> Tensor:
        """A copy."""
        return self.span.clone().as_strided(self.size, self.stride)
