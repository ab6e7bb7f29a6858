"""What a training step costs with LSQ W4A4, compared with float: ``make bench BENCH=qat_step``.

Images of 112x112 in batches of 16 are what one trains such networks with on a processor; at 64x64 the weights of
ResNet-18 weigh as much as its activations, and the calls of MobileNetV2's many small operators as much as their work.

Time is processor time on one thread, float and quantized steps in turn, the least of several. Memory is what a
step holds at most, beyond what lives before it, counted tensor by tensor as they are made and freed. BatchNorm is
either frozen, which is the default, or goes by the batch.
"""

import copy
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

os.environ["BITWRIGHT_COMPILE"] = "1"

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import bitwright as bw
from benchmarks.nets import NETS, randomize_batchnorm
from bitwright.backends.onnxruntime import ONNXRUNTIME
from bitwright.methods import parameter_groups

RUNS = int(os.environ.get("QAT_STEP_RUNS", "8"))
CASES = (("resnet18", 16, 112), ("mobilenet_v2", 16, 112), ("resnet18", 16, 64), ("mobilenet_v2", 16, 64))
ACADEMIC = ONNXRUNTIME.with_(name="academic-bench", weights={"formats": ()}, activations={"formats": ()})
RECIPE = {
    "weight": {"spec": "int4 narrow channel:0", "method": "LearnableFakeQuantize"},
    "activation": {"spec": "uint4 affine", "method": "LearnableFakeQuantize"},
}


class Alive(TorchDispatchMode):
    """Counts the bytes of all tensors made within, as long as they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.known:
            return
        size, key = storage.nbytes(), storage._cdata
        self.known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def step_of(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    """One step of SGD as a function."""
    optimizer = torch.optim.SGD(parameter_groups(model, lr=1e-3), momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return step


def steps_of(name: str, batch: int, size: int) -> dict[str, Callable[[], None]]:
    """The step of a network in float, and quantized with its BatchNorm frozen (the default) or by the batch."""
    model = NETS[name]()
    randomize_batchnorm(model, 0)
    x, labels = torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))
    qmodel = bw.calibrate(bw.prepare(model.eval(), x, ACADEMIC, recipe=RECIPE), [x]).train()
    by_batch = bw.unfreeze_batchnorm(copy.deepcopy(qmodel))
    models = {"float": model.train(), "frozen": qmodel, "by batch": by_batch}
    return {which: step_of(m, x, labels) for which, m in models.items()}


def time_steps(steps: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Seconds of each step, in turn."""
    times = dict.fromkeys(steps, float("inf"))
    for run in range(RUNS + 2):
        for which, step in steps.items():
            start = time.process_time()
            step()
            if run >= 2:
                times[which] = min(times[which], time.process_time() - start)
    return times


def memory_of(step: Callable[[], None]) -> int:
    """Bytes of the tensors that a step holds at most."""
    with Alive() as alive:
        step()
    return alive.most


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    table = Table(title="One training step, LSQ W4A4 beside float")
    for column in ("network", "input", "BatchNorm", "float", "LSQ", "time", "goal", "float", "LSQ", "memory", "goal"):
        table.add_column(column)
    every = {case: steps_of(*case) for case in CASES}
    times = {case: time_steps(steps) for case, steps in every.items()}
    os.environ["BITWRIGHT_COMPILE"] = (
        "0"  # compiled kernels cannot be watched; operator by operator needs a little more
    )
    needs = {case: {which: memory_of(step) for which, step in steps.items()} for case, steps in every.items()}
    for case in CASES:
        name, batch, size = case
        for which in list(every[case])[1:]:
            table.add_row(
                name,
                f"{batch}x3x{size}x{size}",
                which,
                *(f"{times[case][w] * 1e3:.0f} ms" for w in ("float", which)),
                f"{times[case][which] / times[case]['float']:.2f}x",
                "1.25x",
                *(f"{needs[case][w] / 2**20:.0f} MB" for w in ("float", which)),
                f"{needs[case][which] / needs[case]['float']:.2f}x",
                "1.3x",
            )
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
