"""Calibrate block by block: all batches go through one block before the next, so each weight is read once."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn

from bitwright.calibration import as_batches, as_inputs, calibrate_by, watched
from bitwright.checkpoints import digest_of
from bitwright.correction.steps import say_what_is_left
from bitwright.distributed import TIMEOUT, job_name
from bitwright.errors import CalibrationError
from bitwright.files import scratch_folder
from bitwright.graph.inputs import bind_inputs
from bitwright.graph.names import module_of
from bitwright.mapped_weights import in_memory
from bitwright.preparation import ledger_of
from bitwright.progress import track
from bitwright.quantizer import TensorQuantizer, quantizers
from bitwright.reconstruction.block_progress import BlockProgress, Place
from bitwright.reconstruction.block_values import Values
from bitwright.reconstruction.columns import Memory
from bitwright.reconstruction.subgraph import subgraph
from bitwright.reconstruction.units import Unit, find_units
from bitwright.reconstruction.whole import graph_of


@torch.inference_mode(False)  # its results outlive it, and may be trained
def calibrate_by_block(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    memory_limit: float = 4e9,
    progress: bool | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    uneven: bool = False,
    timeout: float = TIMEOUT,
) -> nn.Module:
    """Calibrate a model whose weights are too large for memory; the ranges are those of ``calibrate``, to the bit.

    Corrections of the recipe are left to ``bw.correct``.

    All batches go through one block of the graph (a residual block, an attention with its sum) before the next. If the
    weights come from :func:`~bitwright.map_weights`, only those of the current block are in memory. Only values between
    this block and later ones are kept. A model that could not be captured is one block.

    Args:
        model: what ``prepare`` returned.
        batches: as for ``calibrate``.
        memory_limit: bytes of values between blocks to keep in memory; more go to files in the temporary folder
            (``TMPDIR``).
        progress: show a progress bar; by default only on a terminal.
        checkpoint: a folder for the progress, written at each finished block, once a minute, and on SIGINT or SIGTERM.
            The same call continues from there; a checkpoint of another model, recipe or data set is refused. Nothing
            is written while an object that is not plain data passes from one block to the next. Until the job is done,
            the folder also holds the values between blocks.
        uneven: as for ``calibrate``, and so is the last.
        timeout: seconds.

    Returns:
        The same model, now quantizing.
    """

    def observe(seeing: dict[str, TensorQuantizer]) -> int:
        with scratch_folder(tempfile.gettempdir()) as folder:
            job = _Job(model, seeing, Memory(memory_limit, folder))
            data = job.take(batches, digests=checkpoint is not None)
            if not job.batches:
                return 0
            saved = None
            if checkpoint is not None:
                saved = BlockProgress(checkpoint, job_name("blocks"), model, job.graph, seeing, data)
            with saved or nullcontext():
                job.run(saved, show=progress)
            return job.batches

    calibrate_by(observe, model, uneven=uneven, timeout=timeout)
    say_what_is_left(model)
    return model


class _Job:
    """One call of calibrate_by_block."""

    def __init__(self, model: nn.Module, seeing: dict[str, TensorQuantizer], memory: Memory) -> None:
        self.model, self.seeing, self.values = model, set(seeing.values()), Values(memory)
        self.example = ledger_of(model).example
        self.graph = graph_of(model, self.example)
        self.batches = 0

    def take(self, batches: Iterable[Any], *, digests: bool) -> str:
        """Store the inputs of all batches; return a digest of them, if wanted."""
        places = [n for n in self.graph.graph.nodes if n.op == "placeholder"]
        digest = ""
        for batch in as_batches(batches):
            self.batches += 1
            given = as_inputs(batch, len(self.example.args))
            digest = digest_of([digest, given.args, given.kwargs]) if digests else digest
            bound = bind_inputs(self.model, given.args, given.kwargs)
            for node in places:
                self.values.add(node, bound.get(str(node.target), node.args[0] if node.args else None))
        return digest

    def run(self, saved: BlockProgress | None, *, show: bool | None) -> None:
        """Take all batches through all blocks, starting where a saved job was."""
        graph = self.graph
        blocks = find_units(graph, lambda node: _has_weights(node, graph), "block", 1, self.seeing.__contains__)
        done = Place() if saved is None else saved.restore(self.values)
        for number, unit in enumerate(track(blocks, "calibrating", show=show)):
            if number >= done.blocks:
                self._observe_block(unit, Place(number, done.batches if number == done.blocks else 0), saved)
            self.values.finish(unit.nodes)
            if saved is not None and number >= done.blocks:
                saved.keep(Place(number + 1), self.values)
        if saved is not None:
            saved.finish()

    def _observe_block(self, unit: Unit, place: Place, saved: BlockProgress | None) -> None:
        """Take the batches from a position on through one block, and store its results."""
        call = subgraph(self.graph, unit.nodes, unit.inputs, unit.outputs)
        own = [q for node in unit.nodes for q in _quantizers(node, self.graph) if q in self.seeing]
        with in_memory(_weights(call)):
            for number in range(place.batches, self.batches):
                results = self._through(call, unit, own, number)
                for node, result in zip(unit.outputs, results, strict=True):
                    if any(user.op != "output" for user in node.users):
                        self.values.add(node, result)
                if saved is not None and number + 1 < self.batches:
                    saved.keep(Place(place.blocks, number + 1), self.values)

    def _through(self, call: fx.GraphModule, unit: Unit, own: list[TensorQuantizer], number: int) -> tuple[Any, ...]:
        """Take one batch through a block."""
        try:
            with watched(own, number + 1):
                return call(*(self.values.get(node, number) for node in unit.inputs))
        except CalibrationError:
            raise
        except Exception as error:
            raise CalibrationError(
                f"the block {unit.name} refuses calibration batch {number + 1}: {type(error).__name__}: {error}"
            ) from error


def _has_weights(node: fx.Node, model: nn.Module) -> bool:
    module = module_of(node, model)
    return module is not None and any(True for _ in module.parameters())


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
