"""Compare a file's tensors with the simulation's, layer by layer from equal inputs.

At every quantizer the simulation computes its integers from what the *runtime* had upstream; after the comparison the
runtime's integers take the place of the simulation's. So a difference is charged to the layer that makes it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from bitwright.graph import CapturedModel, Inputs
from bitwright.graph.inputs import bind_inputs
from bitwright.numerics import dequantize
from bitwright.quantizer import TensorQuantizer
from bitwright.verification.proof import OutputCheck, TensorCheck


class TensorTally:
    """Adds up differences of quantized tensors over batches."""

    def __init__(self) -> None:
        self.checks: dict[str, TensorCheck] = {}

    def follow(self, model: CapturedModel, inputs: Inputs, integers: Mapping[str, np.ndarray]) -> None:
        """Run the simulation on one batch along the integers that the runtime has computed on it."""
        named = bind_inputs(model, inputs.args, inputs.kwargs)
        with torch.no_grad():
            _Follower(model, integers, self).run(*named.values())

    def add(self, name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        """Compare the integers, or fp8 numbers, of one tensor."""
        gap = (_steps(ours) - _steps(theirs)).abs()
        check = self.checks.setdefault(name, TensorCheck(name, 0, 0.0, 0.0, 0))
        count = gap.numel()
        if not count:
            return
        total = check.values + count
        check.largest = max(check.largest, int(gap.max()))
        check.mean += (float(gap.double().mean()) - check.mean) * count / total
        check.equal += (float((gap == 0).double().mean()) - check.equal) * count / total
        check.values = total


def _steps(stored: torch.Tensor) -> torch.Tensor:
    """Integers as they are; of fp8 the place among the numbers of the format, so that neighbours differ by one."""
    if not stored.is_floating_point():
        return stored.to(torch.int32)
    bits = stored.view(torch.uint8).to(torch.int32)
    return torch.where(bits >= 128, 128 - bits, bits)


class _Follower(fx.Interpreter):
    def __init__(self, model: CapturedModel, integers: Mapping[str, np.ndarray], tally: TensorTally) -> None:
        super().__init__(model)
        self.integers, self.tally = integers, tally

    def run_node(self, n: fx.Node) -> Any:  # noqa: ANN401
        """Take the runtime's value at every quantizer."""
        found = self.integers.get(f"{n.name}/integers")
        quantizer = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        if found is None or not isinstance(quantizer, TensorQuantizer):
            return super().run_node(n)
        args, _ = self.fetch_args_kwargs_from_env(n)
        ours = quantizer.integers(args[0])
        theirs = torch.from_numpy(np.array(found)).to(ours.device)
        if ours.is_floating_point():  # fp8, as its bits or as float32
            theirs = theirs.to(ours.dtype) if theirs.is_floating_point() else theirs.view(ours.dtype)
        elif quantizer.spec.format.signed and not theirs.dtype.is_signed:  # written unsigned, shifted by half the range
            theirs = theirs.to(torch.int32) - 128
        self.tally.add(n.name.removesuffix("_quantized"), ours, theirs)
        method = quantizer.method
        return dequantize(theirs, *quantizer.qparams(), method.axis, method.group).to(args[0].dtype)


class OutputTally:
    """Adds up differences of the outputs over batches."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(self, name: str, ours: torch.Tensor, theirs: np.ndarray) -> None:
        """Compare one output."""
        expected = ours.detach().double().cpu()
        gap = (expected - torch.from_numpy(np.asarray(theirs)).double()).abs()
        sums = self._sums.setdefault(name, [0.0, 0.0, 0.0, 0.0])
        if gap.numel():
            sums[0] = max(sums[0], float(gap.max()))
            sums[1] += float(gap.sum())
            sums[2] += gap.numel()
            sums[3] = max(sums[3], float(expected.abs().max()))

    def checks(self) -> list[OutputCheck]:
        """The differences found."""
        return [
            OutputCheck(name, largest, total / max(count, 1.0), largest / reach if reach else largest)
            for name, (largest, total, count, reach) in self._sums.items()
        ]


def flatten(value: Any) -> list[torch.Tensor]:  # noqa: ANN401
    """The tensors in a model's result, in the order in which the exporter lists them."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for v in value.values() for t in flatten(v)]
    if isinstance(value, tuple | list):
        return [t for v in value for t in flatten(v)]
    if dataclasses.is_dataclass(value):
        return [t for f in dataclasses.fields(value) for t in flatten(getattr(value, f.name))]
    return []


def simulate(model: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    """The simulation's outputs on one batch."""
    with torch.no_grad():
        return flatten(model(*inputs.args, **inputs.kwargs))
