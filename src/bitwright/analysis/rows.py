"""Rows: for every operator of the ledger, the node or layer it stands for, and its quantizers."""

from collections import defaultdict, deque

from torch import Tensor, fx, nn

from bitwright.analysis.meter import Meter, range_of
from bitwright.analysis.stats import LayerStats
from bitwright.graph import CapturedModel
from bitwright.graph.names import attribute_of, node_name
from bitwright.nn.mixins import QuantMixin
from bitwright.preparation import Entry, Verdict, ledger_of
from bitwright.quantizer import TensorQuantizer


class Row:
    """One operator: what is known of it, and where its tensors are measured.

    Attributes:
        stats: what is known.
        region: the graph it is part of; None for a layer outside of any graph.
        point: the node of that graph whose result counts as the operator's output.
        module: the layer, where it is one.
        input: the layer's own input quantizer, which it has outside of graphs.
        output: the quantizer of the output.
        meters: what measures its tensors, by their name in the stats.
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
        """Be the operator ``node`` of a graph, computed together with what comes up to ``end``."""
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
        """Be a layer outside of any graph."""
        self._have(layer)
        if isinstance(layer, QuantMixin) and isinstance(layer.input_quantizer, TensorQuantizer):
            self.input = layer.input_quantizer
            self.stats.input.range = range_of(self.input)
        return self

    def _have(self, module: nn.Module) -> None:
        self.module = module
        if isinstance(module, QuantMixin) and hasattr(module, "_weight_quantizer"):
            self.stats.weight.range = range_of(module.weight_quantizer)

    def measure_weight(self) -> None:
        """Compare the weight, with its BatchNorm folded in, with its quantized self."""
        if not isinstance(self.module, QuantMixin) or not hasattr(self.module, "_weight_quantizer"):
            return
        if not self.module.weight_quantizer.calibrated:
            return
        weight = self.module.folded_weight()[0] if hasattr(self.module, "weight") else self._weight
        if weight is None:
            return
        quantizer = self.module.weight_quantizer
        meter = self.meters["weight"] = Meter(quantizer)
        meter.look(weight.detach())
        meter.compare(weight, quantizer.method(weight, *quantizer._params(weight)))

    def result(self) -> LayerStats:
        """What is known, with what was measured."""
        for kind, meter in self.meters.items():
            meter.fill(getattr(self.stats, kind))
        return self.stats


def rows_of(model: nn.Module) -> list[Row]:
    """A row for each quantized input and constant, then one for each entry of the ledger."""
    entries = ledger_of(model).entries
    rows: list[Row] = []
    calls: dict[str, deque[tuple[CapturedModel, fx.Node]]] = defaultdict(deque)
    for path, region in model.named_modules():
        if not isinstance(region, CapturedModel):
            continue
        rows += _source_rows(path, region)
        for node in region.graph.nodes:
            if node.op in ("call_module", "call_function", "call_method"):
                calls[_join(path, node_name(node))].append((region, node))
    # A layer called twice has two entries of one name; they and the calls are both in the order of the graph.
    places = [calls[entry.name].popleft() if calls[entry.name] else None for entry in entries]
    verdicts = {p[1]: e.verdict for p, e in zip(places, entries, strict=True) if p is not None}
    modules = dict(model.named_modules(remove_duplicate=False))
    for entry, place in zip(entries, places, strict=True):
        row = Row(entry)
        if place is not None:
            row.stand_in(*place, _end_of_group(place[1], verdicts))
        elif entry.verdict is not Verdict.FUSED and entry.name in modules:
            row.stand_alone(modules[entry.name])
        rows.append(row)
    return rows


def _source_rows(path: str, region: CapturedModel) -> list[Row]:
    rows = []
    for node in region.graph.nodes:
        kind = {"placeholder": "input", "get_attr": "constant"}.get(node.op)
        if kind is not None and _quantizer_after(node, region) is not None:
            entry = Entry(_join(path, str(node.target)), kind, Verdict.INTEGER)
            rows.append(Row(entry).stand_in(region, node, node))
    return rows


def _end_of_group(node: fx.Node, verdicts: dict[fx.Node, Verdict]) -> fx.Node:
    """The activation that is computed together with an integer operator, or the operator itself."""
    users = list(node.users)
    fused = len(users) == 1 and verdicts.get(users[0]) is Verdict.FUSED
    return users[0] if fused and verdicts[node] is Verdict.INTEGER else node


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


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
