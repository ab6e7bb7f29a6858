"""simulate: make a copy of a calibrated model that computes in integers, as a runtime does."""

from typing import Any

import torch
from torch import fx, nn

from bitwright.exporting.deploy import Deployment, deploy
from bitwright.exporting.modules import Call, DeployedLayer, GlobalAveragePool
from bitwright.exporting.parts import Part
from bitwright.exporting.precision import in_float32
from bitwright.graph import CapturedModel
from bitwright.graph.facts import facts
from bitwright.graph.names import add_internal, qualified
from bitwright.nn.operators import OPERATORS, Operator
from bitwright.simulation.arithmetic import GLOBAL_AVERAGE_POOL, SIMULATED_RUNTIMES, Arithmetic, IntegerOperator
from bitwright.simulation.grid import Grid

INTEGER = "integer"  # in a model's namespace: operators that compute in integers
_NO_GRAPH = "it is not in a graph: only what prepare has captured can be simulated"
_SATURATION_FREE = 64  # 255 · (64 + 64) fits 16 bits
_EIGHT_BITS = (
    "no saturation: some weights need more than 7 bits, and x86 CPUs without VNNI add pairs of u8×s8 products in 16 "
    "bits, which may saturate"
)


class Simulated(nn.Module):
    """A model in evaluation mode that computes in integers what a runtime computes.

    Attributes:
        model: the graph that computes it.
        runtime: the name of the runtime.
        exact: the operators that compute bit for bit as the runtime's integer kernels do, with the kernels' names.
        inexact: the operators that compute in float as in the ordinary simulation, with the reason.
        assumptions: what the CPU must do for the runtime to compute these bits.
    """

    def __init__(self, model: nn.Module, runtime: str) -> None:
        super().__init__()
        self.model, self.runtime = model, runtime
        self.exact: dict[str, str] = {}
        self.inexact: dict[str, str] = {}
        self.assumptions: list[str] = []
        self.eval()

    def forward(self, *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        """Compute what the runtime computes from these inputs."""
        with torch.no_grad():
            return self.model(*args, **kwargs)

    def train(self, mode: bool = True) -> "Simulated":
        """Stay in evaluation mode, the only one of a runtime."""
        return super().train(False)

    def extra_repr(self) -> str:
        return f"{self.runtime}: {len(self.exact)} operators exact, {len(self.inexact)} in float"


def simulate(model: nn.Module, runtime: str = "onnxruntime") -> Simulated:
    """Make a copy of a calibrated model that computes what a runtime computes, bit for bit.

    Convolutions, linear layers, matrix products, sums, products, average pools and concatenations accumulate integers,
    add int32 biases and round as the runtime's kernels do. Operators that only move values, including max-pools, are
    exact anyway. Everything else computes in float as in the ordinary simulation, and is listed in ``inexact``.

    Use it to evaluate a model, after calibration or during training, as it will compute once deployed.

    Args:
        model: the prepared and calibrated model; it is left untouched. The copy computes in float32, as files do.
        runtime: the runtime to simulate (see ``bitwright.simulation.SIMULATED_RUNTIMES``).
    """
    arithmetic = SIMULATED_RUNTIMES.get(runtime)
    deployment = deploy(in_float32(model))
    simulated = Simulated(deployment.model, arithmetic.name)
    for prefix, region in list(deployment.model.named_modules()):
        if isinstance(region, CapturedModel):
            _Simulating(deployment, arithmetic, simulated, prefix, region).run()
    noted = {*simulated.exact, *simulated.inexact}
    layers = [n for n, m in deployment.model.named_modules() if isinstance(m, DeployedLayer) and n not in noted]
    simulated.inexact.update(dict.fromkeys(layers, _NO_GRAPH))
    return simulated


class _Simulating:
    """Converts one graph."""

    def __init__(
        self, deployment: Deployment, arithmetic: Arithmetic, simulated: Simulated, prefix: str, region: CapturedModel
    ) -> None:
        self.origins, self.arithmetic, self.simulated = deployment.origins, arithmetic, simulated
        self.prefix, self.region = prefix, region

    def run(self) -> None:
        """Insert an integer operator wherever the runtime has one, and list the rest."""
        for node in [n for n in self.region.graph.nodes if n.op in ("call_module", "call_function", "call_method")]:
            module = self._module(node)
            if isinstance(module, Part | IntegerOperator) or facts(node).plain:
                continue
            name = self.origins[qualified(self.prefix, str(node.target))].name if module is not None else node.name
            reason = self._replace(node, module, name) if module is not None else self._float()
            if reason and not self._moves(node, module):
                self.simulated.inexact[name] = reason
        self.region.recompile()

    def _replace(self, node: fx.Node, module: nn.Module, name: str) -> str:
        """Compute a node in integers, with the quantizer after it, or say why the runtime does not."""
        rule = self.arithmetic.rules.get(self._key(node, module))
        if rule is None:
            return self._float()
        if why := rule.refusal(node, module):
            return why
        if not (grids := self._inputs(node)):
            return "not all of its inputs are quantized to 8 bits with one scale"
        after = next(iter(node.users)) if len(node.users) == 1 else node
        output = self._grid(after) if after is not node else None
        if output is None and not rule.result_free:
            return "its result is not quantized to 8 bits right after it"
        exact = IntegerOperator(rule.kernel, module, grids, output)
        self._put(exact, node, node if output is None else after)
        self._note(exact, name)
        return ""

    def _inputs(self, node: fx.Node) -> list[Grid]:
        """The grids of a node's tensors; none if one of them has none."""
        found = [self._grid(source) for source in node.all_input_nodes if facts(source).tensor is not None]
        return [grid for grid in found if grid is not None] if None not in found else []

    def _put(self, exact: IntegerOperator, node: fx.Node, place: fx.Node) -> None:
        """Make ``place``, the node itself or the quantizer after it, compute on the node's inputs in integers."""
        target = add_internal(self.region, INTEGER, place.name, exact)
        place.args, place.kwargs, place.target = node.args, node.kwargs, target
        if place is not node:
            self.region.graph.erase_node(node)

    def _note(self, exact: IntegerOperator, name: str) -> None:
        self.simulated.exact[name] = exact.kernel.__name__
        stored = getattr(exact.module, "stored", None)
        if stored is None or stored.weight.integers.dtype is not torch.int8:
            return
        if int(stored.weight.integers.int().abs().max()) > _SATURATION_FREE and not self.simulated.assumptions:
            self.simulated.assumptions.append(_EIGHT_BITS)

    def _float(self) -> str:
        return f"{self.arithmetic.name} computes it in float, or with a kernel that is not known here"

    def _key(self, node: fx.Node, module: nn.Module) -> str:
        if isinstance(module, GlobalAveragePool):
            return GLOBAL_AVERAGE_POOL
        operator = self._operator(node)
        return operator.name if operator is not None else ""

    def _operator(self, node: fx.Node) -> Operator | None:
        origin = self.origins.get(qualified(self.prefix, str(node.target)))
        return OPERATORS.get(origin.operator) if origin is not None and origin.operator else None

    def _moves(self, node: fx.Node, module: nn.Module | None) -> bool:
        """Whether a node only passes on or clamps values of its input, which is exact in float, too."""
        operator = self._operator(node)
        if operator is None:
            return facts(node).tensor is None
        own = None if isinstance(module, Call) else module
        return operator.carries_scale(node, own) or operator.limits_of(node, own) is not None

    def _grid(self, node: fx.Node) -> Grid | None:
        module = self._module(node)
        return module.output if isinstance(module, IntegerOperator) else Grid.of(module)

    def _module(self, node: fx.Node) -> nn.Module | None:
        return self.region.get_submodule(str(node.target)) if node.op == "call_module" else None
