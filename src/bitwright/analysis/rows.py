"""Rows: for every operator of the ledger, the node or layer it stands for, and its quantizers."""

from torch import Tensor, fx, nn

from bitwright.analysis.meter import Meter, range_of
from bitwright.analysis.stats import LayerStats
from bitwright.graph import CapturedModel
from bitwright.graph.names import attribute_of, qualified
from bitwright.nn.mixins import QuantMixin
from bitwright.preparation import Entry, Verdict, decision_on, ledger_of
from bitwright.quantizer import TensorQuantizer


class Row:
    """One operator: what is known about it, and where its tensors are measured.

    Attributes:
        point: the node of that graph whose result counts as the operator's output.
        input: the layer's own input quantizer, outside graphs.
        output: the quantizer of the output.
        meters: meters of its tensors, by their name in the stats.
    """

    def __init__(self, entry: Entry) -> None:
        self.stats = LayerStats(entry.name, entry.operator, entry.verdict, entry.reason)
        self.stats.input.spec, self.stats.output.spec = entry.input, entry.output
        self.stats.weight.spec = entry.weight
        self.region: CapturedModel | None = None
        self.point: fx.Node | None = None
        self.module: nn.Module | None = None
        self.input: TensorQuantizer | None = None
        self.output: TensorQuantizer | None = None
        self.meters: dict[str, Meter] = {}
        self._weight: Tensor | None = None

    def stand_in(self, region: CapturedModel, node: fx.Node, end: fx.Node) -> "Row":
        """Represent the operator ``node`` of a graph, computed together with what follows up to ``end``."""
        self.region, self.point = region, end
        if (after := _quantizer_after(end, region)) is not None:
            self.point, self.output = after
            self.stats.output.spec = str(self.output.spec)
            self.stats.output.range = range_of(self.output)
        if node.op == "call_module":
            self._have(region.get_submodule(str(node.target)))
            self._weight = _constant_weight(region, node)
        return self

    def stand_alone(self, layer: nn.Module) -> "Row":
        """Represent a layer outside any graph."""
        self._have(layer)
        if isinstance(layer, QuantMixin) and isinstance(layer.input_quantizer, TensorQuantizer):
            self.input = layer.input_quantizer
            self.stats.input.range = range_of(self.input)
        return self

    def _have(self, module: nn.Module) -> None:
        self.module = module
        if isinstance(module, QuantMixin) and hasattr(module, "_weight_quantizer"):
            self.stats.weight.range = range_of(module.weight_quantizer)

    def weight(self) -> Tensor | None:
        """A copy of the current weight, with its BatchNorm folded in."""
        if not isinstance(self.module, QuantMixin) or not hasattr(self.module, "_weight_quantizer"):
            return None
        weight = self.module.stored_weights().get("_weight_quantizer", self._weight)
        return None if weight is None else weight.detach().clone()

    def measure_weight(self, exact: Tensor | None) -> None:
        """Compare the float model's weight with the quantized one."""
        weight, module = self.weight(), self.module
        if weight is None or exact is None or not isinstance(module, QuantMixin):
            return
        quantizer = module.weight_quantizer
        if quantizer.calibrated:
            meter = self.meters["weight"] = Meter(quantizer)
            meter.look(exact)
            meter.compare(exact, quantizer.fake_quantize(weight))

    def result(self) -> LayerStats:
        """The statistics, with the measurements filled in."""
        for kind, meter in self.meters.items():
            meter.fill(getattr(self.stats, kind))
        return self.stats


def rows_of(model: nn.Module) -> list[Row]:
    """One row for each quantized input and constant, then one for each entry of the ledger."""
    regions = {path: region for path, region in model.named_modules() if isinstance(region, CapturedModel)}
    rows = [row for path, region in regions.items() for row in _source_rows(path, region)]
    calls = {(path, node.name): node for path, region in regions.items() for node in region.graph.nodes}
    modules = dict(model.named_modules(remove_duplicate=False))
    for entry in ledger_of(model).entries:
        rows.append(Row(entry))
        if entry.graph is None:
            rows[-1].stand_alone(modules[entry.name])
        elif (node := calls.get((entry.graph, entry.node))) is not None:
            rows[-1].stand_in(regions[entry.graph], node, _end_of_group(node))
    return rows


def _source_rows(path: str, region: CapturedModel) -> list[Row]:
    rows = []
    for node in region.graph.nodes:
        kind = {"placeholder": "input", "get_attr": "constant"}.get(node.op)
        if kind is not None and _quantizer_after(node, region) is not None:
            entry = Entry(qualified(path, str(node.target)), kind, Verdict.INTEGER)
            rows.append(Row(entry).stand_in(region, node, node))
    return rows


def _end_of_group(node: fx.Node) -> fx.Node:
    """The last of what is computed together with an integer operator, or the operator itself."""
    own = decision_on(node)
    if own is None or own.verdict is not Verdict.INTEGER:
        return node
    while len(node.users) == 1 and (after := decision_on(user := next(iter(node.users)))) is not None:
        if after.verdict is not Verdict.FUSED:
            break
        node = user
    return node


def _quantizer_after(node: fx.Node, region: CapturedModel) -> tuple[fx.Node, TensorQuantizer] | None:
    for user in node.users:
        module = region.get_submodule(str(user.target)) if user.op == "call_module" else None
        if isinstance(module, TensorQuantizer):
            return user, module
    return None


def _constant_weight(region: CapturedModel, node: fx.Node) -> Tensor | None:
    """The second argument of a function, if it is a parameter or buffer."""
    source = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    if not isinstance(source, fx.Node) or source.op != "get_attr":
        return None
    return attribute_of(region, str(source.target))
