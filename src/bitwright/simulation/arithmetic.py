"""Arithmetic: how a runtime computes in integers, one function per operator. A new runtime is one file with its own."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from bitwright.registry import Registry
from bitwright.simulation.grid import Grid, Quantized

SIMULATED_RUNTIMES: Registry["Arithmetic"] = Registry("runtime to simulate")
Kernel = Callable[..., Tensor]
Refusal = Callable[[fx.Node, nn.Module], str]
GLOBAL_AVERAGE_POOL = "global_average_pool"


@dataclass(frozen=True)
class Rule:
    """One kernel.

    Attributes:
        kernel: takes an :class:`Operation` and the operator's own arguments, tensors among them as
            :class:`Quantized`. Returns integers if the operation has an output grid, and float32 values if it has none.
        result_free: whether the runtime uses it even if the result is not quantized.
        refusal: says why the runtime does not compute a call in integers; empty if it does.
    """

    kernel: Kernel
    result_free: bool = False
    refusal: Refusal = lambda node, module: ""


@dataclass
class Arithmetic:
    """What is known about a runtime's integer kernels, by the names of operators."""

    name: str
    rules: dict[str, Rule] = field(default_factory=dict)

    def kernel(
        self, *operators: str, result_free: bool = False, refusal: Refusal | None = None
    ) -> Callable[[Kernel], Kernel]:
        """Return a decorator that registers a function as the kernel of operators."""

        def decorate(kernel: Kernel) -> Kernel:
            rule = Rule(kernel, result_free) if refusal is None else Rule(kernel, result_free, refusal)
            self.rules.update(dict.fromkeys(operators, rule))
            return kernel

        return decorate


def register_arithmetic(arithmetic: Arithmetic, *, override: bool = False) -> Arithmetic:
    """Register a runtime's arithmetic under the runtime's name."""
    return SIMULATED_RUNTIMES.register(arithmetic.name, override=override)(arithmetic)


@dataclass(frozen=True)
class Operation:
    """One call of a kernel.

    Attributes:
        module: the module that computes the operator in the ordinary simulation, with its weight and settings.
        output: the grid of the result; None if the result stays float.
    """

    module: nn.Module
    output: Grid | None


class IntegerOperator(nn.Module):
    """An operator as a runtime's kernel computes it, with the quantizer after it if there is one.

    Takes and returns the values that integers stand for, so it can replace the operator anywhere.
    """

    def __init__(self, kernel: Kernel, module: nn.Module, inputs: list[Grid], output: Grid | None) -> None:
        super().__init__()
        self.module, self.kernel = module, kernel
        self.inputs, self.output = inputs, output

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        grids = iter(self.inputs)
        device = None

        def read(value: Any) -> Any:  # noqa: ANN401
            nonlocal device
            if not isinstance(value, Tensor):
                return value
            device = value.device
            grid = next(grids).to(value.device)
            return Quantized(grid.quantize(value.float()), grid)

        with torch.no_grad():
            given, named = map_aggregate(args, read), map_aggregate(kwargs, read)
            output = self.output if self.output is None or device is None else self.output.to(device)
            result = self.kernel(Operation(self.module, output), *given, **named)  # pyrefly: ignore
            return result.float() if output is None else output.values(result)

    def extra_repr(self) -> str:
        return self.kernel.__name__
