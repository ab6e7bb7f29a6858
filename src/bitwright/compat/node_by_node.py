"""Run a prepared graph node by node over several batches: calibration on quantized inputs, and errors of layers."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from bitwright.errors import ConfigError
from bitwright.graph import CapturedModel, Inputs
from bitwright.graph.evaluate import Evaluator
from bitwright.graph.inputs import bind_inputs
from bitwright.graph.names import node_name
from bitwright.modes import eval_mode
from bitwright.nn.mixins import QuantMixin
from bitwright.nn.weight_sites import weight_sites
from bitwright.quantizer import Mode, TensorQuantizer

Checker = Callable[[Tensor, Tensor], Any]


def calibrate_on_quantized(model: nn.Module, batches: list[Inputs], w_quant: bool, a_quant: bool) -> None:
    """Find the range of every activation again while everything before it is quantized.

    Parts of the model outside of its graph keep their ranges.
    """
    runs = _Runs(model, batches)
    with torch.no_grad(), eval_mode(model):
        for site in weight_sites(model):
            if site.quantizer.calibrated:
                site.quantizer.mode = Mode.QUANTIZE if w_quant else Mode.OFF
        for node in runs.nodes:
            quantizer = runs.quantizer(node)
            if quantizer is None or not quantizer.enabled:
                runs.step(node)
            else:
                quantizer.observe()
                runs.step(node)
                quantizer.compute_qparams()
                if a_quant:
                    quantizer.quantize()
                    runs.step(node)
                quantizer.off()
            runs.forget_inputs(node)
    for node in runs.nodes:
        if (quantizer := runs.quantizer(node)) is not None:
            quantizer.observer.reset()


def layer_errors(model: nn.Module, inputs: Inputs, checker: Checker, alone: bool) -> dict[str, Any]:
    """For every operator with quantizers, how far its result is from the float one, as ``checker`` measures it.

    Alone, each operator gets float inputs; otherwise everything before it is quantized, too.
    """
    floats, runs = _Runs(model, [inputs]), _Runs(model, [inputs])
    before = [(q, q.mode) for q in model.modules() if isinstance(q, TensorQuantizer)]
    errors: dict[str, Any] = {}
    try:
        with torch.no_grad(), eval_mode(model):
            for node in floats.nodes:
                _switch(before, False)
                floats.step(node)
                if alone and floats.quantizer(node) is None:
                    runs.values[0] = floats.with_quantized_inputs(node)
                _switch(before, True)
                runs.step(node)
                if floats.quantizes(node):
                    errors[node_name(node)] = checker(runs.values[0][node], floats.values[0][node])
    finally:
        for quantizer, mode in before:
            quantizer.mode = mode
    return errors


class _Runs:
    """Values of a graph's nodes for several batches."""

    def __init__(self, model: nn.Module, batches: Iterable[Inputs]) -> None:
        if not isinstance(model, CapturedModel):
            raise ConfigError(
                f"{type(model).__name__} runs as it is written, not as one graph: it cannot be run node by node"
            )
        self.graph = model
        self.nodes = [node for node in model.graph.nodes if node.op != "output"]
        self.left = {node: len(node.users) for node in self.nodes}
        given = [bind_inputs(model, inputs.args, inputs.kwargs) for inputs in batches]
        heads = [node for node in self.nodes if node.op == "placeholder"]
        self.values: list[dict[fx.Node, Any]] = [
            {node: values.get(str(node.target), next(iter(node.args), None)) for node in heads} for values in given
        ]

    def step(self, node: fx.Node) -> None:
        """Compute a node for every batch."""
        for values in self.values:
            if node.op != "placeholder":
                values[node] = Evaluator(self.graph, values).compute(node)

    def forget_inputs(self, node: fx.Node) -> None:
        """Forget what nothing after ``node`` reads."""
        for source in node.all_input_nodes:
            self.left[source] -= 1
            for values in self.values if not self.left[source] else ():
                values.pop(source, None)

    def quantizer(self, node: fx.Node) -> TensorQuantizer | None:
        """The quantizer that a node calls, if it does."""
        module = self.graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        return module if isinstance(module, TensorQuantizer) else None

    def quantizes(self, node: fx.Node) -> bool:
        """Whether a node is an operator with a quantized input or weight."""
        if self.quantizer(node) is not None:
            return False
        module = self.graph.get_submodule(str(node.target)) if node.op == "call_module" else None
        return isinstance(module, QuantMixin) or any(self.quantizer(n) for n in node.all_input_nodes)

    def with_quantized_inputs(self, node: fx.Node) -> dict[fx.Node, Any]:
        """The float values, except that inputs of ``node`` behind quantizers are quantized."""
        values = dict(self.values[0])
        for source in node.all_input_nodes:
            quantizer = self.quantizer(source)
            if quantizer is not None and quantizer.calibrated:
                quantizer.mode = Mode.QUANTIZE
                values[source] = quantizer(values[source])
        return values


def _switch(quantizers: list[tuple[TensorQuantizer, Mode]], on: bool) -> None:
    for quantizer, _ in quantizers:
        quantizer.mode = Mode.QUANTIZE if on and quantizer.calibrated and quantizer.enabled else Mode.OFF
