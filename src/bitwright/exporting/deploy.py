"""The deployed twin of a prepared model: weights and biases as integers, quantizers where a runtime needs them.

Each call in a graph becomes a separate module, so that an exporter's record of modules tells which node an operator of
the file came from; each quantizer knows its site.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from bitwright.backends import OperatorRules
from bitwright.errors import ExportError
from bitwright.exporting import rewrites
from bitwright.exporting.guards import guard
from bitwright.exporting.interleaved import InterleavedLayer, Interleaving, can_interleave
from bitwright.exporting.modules import (
    Call,
    ComputedWeightFunction,
    DeployedFunction,
    DeployedLayer,
    FloatLayer,
    GlobalAveragePool,
)
from bitwright.exporting.parts import DeployedQuantizer, KeepFloat, Site, TableQuantizer, as_integers, deployed
from bitwright.exporting.precision import drop_idle_casts
from bitwright.exporting.recurrent import DeployedLSTM
from bitwright.graph import CapturedModel
from bitwright.graph.capture.objects import make_results_plain
from bitwright.graph.expression import Expression, is_constant
from bitwright.graph.facts import facts, user_name
from bitwright.graph.names import add_internal, attribute_of, node_name, put_submodule, replace_modules
from bitwright.nn.attention import QuantMultiheadAttention
from bitwright.nn.dynamic_recurrent import DynamicLSTM
from bitwright.nn.functional import QuantFunction
from bitwright.nn.layer import QuantLayer
from bitwright.nn.operators import operator_of_module
from bitwright.nn.weight_sites import weight_sites
from bitwright.preparation import decision_on, ledger_of
from bitwright.preparation.ledger import is_prepared
from bitwright.quantizer import TensorQuantizer, quantizers

CALLS, READ = "calls", "read"  # in a model's namespace: modules that stand for single nodes, and weights they read


@dataclass(frozen=True)
class Origin:
    """What a part of the deployed model stands for: the user's module or node, and the name of its operator."""

    name: str
    operator: str = ""


@dataclass
class Deployment:
    """A model ready for an exporter.

    Attributes:
        model: the deployed twin.
        quantized: whether it computes on quantized tensors.
        origins: what its modules stand for, by their qualified names.
        clean: whether it has nothing added only for a runtime.
        rules: what its target does with operators.
    """

    model: nn.Module
    quantized: bool
    origins: dict[str, Origin]
    clean: bool = False
    rules: OperatorRules = field(default_factory=OperatorRules)

    def results(self) -> list[str]:
        """The names of what the model returns: keys and attributes, or else nodes; empty if no graph tells."""
        if not isinstance(self.model, CapturedModel):
            return []
        return list(_result_names(next(iter(reversed(self.model.graph.nodes))).args[0]))


def _result_names(item: object, path: tuple[str, ...] = ()) -> Iterator[str]:
    if isinstance(item, dict | tuple | list):
        for key, value in item.items() if isinstance(item, dict) else enumerate(item):
            yield from _result_names(value, (*path, str(key)))
    elif isinstance(item, fx.Node):
        yield ".".join(path) if any(not part.isdigit() for part in path) else _tensor_name(item)


def _tensor_name(node: fx.Node) -> str:
    """The user's name for a tensor that a graph returns, quantized or not."""
    owner = node.graph.owning_module
    while node.op == "call_module" and owner is not None:
        if not isinstance(owner.get_submodule(str(node.target)), DeployedQuantizer | TableQuantizer | KeepFloat):
            break
        (node,) = node.all_input_nodes
    return node_name(node)


def deploy(model: nn.Module, *, clean: bool = False) -> Deployment:
    """Make the deployed twin of a calibrated model; the model itself is left untouched.

    A ``clean`` twin keeps activations that quantizers imply, and has no guards against what runtimes do unasked.
    """
    waiting = [q.label or name for name, q in quantizers(model).items() if not q.quantizes and q.enabled]
    if waiting:
        more = f" and {len(waiting) - 3} more" if len(waiting) > 3 else ""
        raise ExportError(f"not quantizing yet: {', '.join(waiting[:3])}{more}; calibrate the model first")
    twin = copy.deepcopy(model).eval()
    for parameter in twin.parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():
        return _Deploying(twin, clean).run()


def float_twin(model: nn.Module) -> Deployment:
    """Make a copy of a model without quantization, in which every call of a graph is a separate module."""
    twin = copy.deepcopy(model).eval()
    for quantizer in quantizers(twin).values():
        quantizer.off()
    if isinstance(twin, CapturedModel):
        make_results_plain(twin.graph)
    deploying = _Deploying(twin)
    for name, region in list(twin.named_modules()):
        if isinstance(region, CapturedModel):
            deploying.name_calls(region, name, {})
    return Deployment(twin, quantized=False, origins=deploying.origins)


class _Deploying:
    """Builds one twin."""

    def __init__(self, twin: nn.Module, clean: bool = False) -> None:
        self.twin, self.clean = twin, clean
        self.rules = ledger_of(twin).backend.operators if is_prepared(twin) and not clean else OperatorRules()
        self.results: dict[nn.Module, list[TensorQuantizer]] = {}  # of the calls of transposed convolutions
        self.origins: dict[str, Origin] = {}
        self.names = {id(quantizer): name for name, quantizer in quantizers(twin).items()}
        self.in_graphs: set[int] = set()

    def run(self) -> Deployment:
        twin = self.twin
        if isinstance(twin, CapturedModel):
            make_results_plain(twin.graph)
        for name, module in list(twin.named_modules()):
            operator = operator_of_module(module)
            self.origins[name] = Origin(name, operator.name if operator is not None else "")
            if isinstance(module, CapturedModel):
                self._deploy_graph(module, name)
        layers = self._deployed_layers()
        replace_modules(twin, layers)
        self.twin = twin = layers.get(twin, twin)
        self._deploy_own_quantizers()
        for region in [m for m in twin.modules() if isinstance(m, CapturedModel)]:
            region.delete_all_unused_submodules()  # an exporter's work grows with the square of parameters and buffers
        if self.clean:
            self._drop_guards()
        return Deployment(twin, quantized=True, origins=self.origins, clean=self.clean, rules=self.rules)

    def _deployed_layers(self) -> dict[Any, nn.Module]:
        layers: dict[Any, nn.Module] = {}
        for name, module in self.twin.named_modules():
            if isinstance(module, QuantLayer) and not isinstance(module, QuantFunction):
                layers[module] = self._deployed_layer(module, name)
            elif isinstance(module, DynamicLSTM):
                layers[module] = self._deployed_lstm(module, name)
        return layers

    def _drop_guards(self) -> None:
        guards = [module for module in self.twin.modules() if isinstance(module, KeepFloat)]
        replace_modules(self.twin, {module: nn.Identity() for module in guards})

    def _site(self, quantizer: TensorQuantizer, kind: Any, name: str = "", placed: bool = False) -> Site | None:
        """The site of a quantizer, or None if it is not part of the model or quantizes nothing."""
        known = self.names.get(id(quantizer))
        if known is None or not quantizer.quantizes:
            return None
        spec = quantizer.spec
        shown = name or quantizer.label or known
        return Site(known, shown, kind, str(spec), spec.format.signed and quantizer.method.uniform, placed)

    def _deployed_layer(self, layer: Any, name: str) -> nn.Module:
        if not layer.weight_quantizer.enabled:
            return FloatLayer(layer)
        own = layer.input_quantizer
        start = f"{name}." if name else ""
        self.origins[f"{start}stored"] = self.origins[name]
        weight_site = self._site(layer.weight_quantizer, "weight", f"{start}weight")
        input_site = self._site(own, "activation") if isinstance(own, TensorQuantizer) else None
        way = Interleaving.of(layer) if len(self.results.get(layer, ())) == len(layer.calls) else None
        if way is None:
            return DeployedLayer(layer, weight_site, input_site)
        return InterleavedLayer(layer, way, self.results[layer], weight_site, input_site)

    def _deployed_lstm(self, layer: DynamicLSTM, name: str) -> nn.Module:
        if not layer.is_active():
            for quantizer in quantizers(layer).values():
                quantizer.disable()
            return layer
        self.origins |= {
            path: Origin(name, "lstm") for path in (name, *(f"{name}.{own}" for own in layer.weight_names()))
        }
        return DeployedLSTM(layer, [self._site(q, "weight") for q in layer._weight_quantizers])  # pyrefly: ignore

    def _deploy_own_quantizers(self) -> None:
        """Deploy the quantizers inside users' QModules and forwards; weights are stored as integers."""
        for site in list(weight_sites(self.twin)):
            if site.quantizer.enabled:
                stored = as_integers(site.weight(), site.quantizer, self._site(site.quantizer, "weight"))
                put_submodule(site.layer, site.key, _settled(site.layer, stored))
        for module in list(self.twin.modules()):
            if isinstance(module, QuantFunction):
                continue
            for name, quantizer in list(module._modules.items()):
                if isinstance(quantizer, TensorQuantizer) and quantizer.enabled and id(quantizer) not in self.in_graphs:
                    settled = deployed(quantizer, self._site(quantizer, "activation"))
                    module._modules[name] = _settled(module, settled)

    def _deploy_graph(self, model: CapturedModel, prefix: str) -> None:
        modules = dict(model.named_modules())
        called = [(n, modules.get(str(n.target))) for n in model.graph.nodes if n.op == "call_module"]
        placed = {n: _join(prefix, str(n.args[0])) for n, m in called if isinstance(m, TensorQuantizer)}
        for node, module in called:
            if isinstance(module, QuantFunction):
                self._deploy_function(model, node, module, prefix)
        for node in [n for n in model.graph.nodes if n.op == "get_attr"]:
            _keep_what_is_read(model, node)
        rewrites.limits_to_relu(model, dict(model.named_modules()))
        if not self.clean:
            rewrites.drop_redundant_activations(model, dict(model.named_modules()))
            drop_idle_casts(model)
        rewrites.requantize_carried(model, dict(model.named_modules()))
        if self.rules.transposed_as_convolutions:
            self._note_results(model)
        if not self.clean:
            guard(model, dict(model.named_modules()), apart=self.rules.float_apart)
        self.name_calls(model, prefix, placed)

    def _note_results(self, model: CapturedModel) -> None:
        """Note what quantizes the results of transposed convolutions, call by call."""
        modules = dict(model.named_modules())
        for node in model.graph.nodes:
            layer: Any = modules.get(str(node.target)) if node.op == "call_module" else None
            quantizer = rewrites.plain_quantizer_after(node, modules)
            if quantizer is not None and can_interleave(layer, node):
                self.results.setdefault(layer, []).append(quantizer)

    def _deploy_function(self, model: CapturedModel, node: fx.Node, function: QuantFunction, prefix: str) -> None:
        """Store the weight and bias of a function as integers where they are constants."""
        names = ("input", "weight", "bias")
        given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        weight, bias = given.get("weight"), given.get("bias")
        if not function.weight_quantizer.enabled:
            return
        constant = isinstance(weight, fx.Node) and all(n is None or is_constant(n) for n in (weight, bias))
        origin = Origin(_join(prefix, node.name), _operator_name(node))
        site = self._site(
            function.weight_quantizer, "weight" if constant else "activation", f"{origin.name}.weight", not constant
        )
        if not constant:
            node.target = self._call(model, prefix, node, ComputedWeightFunction(function, site), origin)
            return
        values: list[Any] = [None if n is None else Expression(model, n)() for n in (weight, bias)]
        stored = DeployedFunction(function, values[0], values[1], site)
        target = self._call(model, prefix, node, stored, origin)
        node.target, node.args = target, (given["input"], *node.args[3:])
        node.kwargs = {k: v for k, v in node.kwargs.items() if k not in names}

    def _call(self, model: CapturedModel, prefix: str, node: fx.Node, module: nn.Module, origin: Origin) -> str:
        """Add the module that stands for one node, and return its name."""
        target = add_internal(model, CALLS, node.name, module)
        self.origins[_join(prefix, target)] = self.origins[_join(prefix, f"{target}.stored")] = origin
        return target

    def name_calls(self, model: CapturedModel, prefix: str, placed: dict[fx.Node, str]) -> None:
        """Turn every call of the graph into a separate module, and note what it stands for.

        ``placed`` has the nodes of quantizers that are in the prepared model, with the names of their tensors.
        """
        modules = dict(model.named_modules())
        for node in model.graph.nodes:
            module = modules.get(str(node.target)) if node.op == "call_module" else None
            if rewrites.averages_planes(node, modules):
                replacement: nn.Module = GlobalAveragePool()
            elif node.op in ("call_function", "call_method") and facts(node).tensor is not None:
                replacement = Call(node)
            elif isinstance(module, TensorQuantizer):
                replacement = self._deployed_quantizer(model, node, module, placed.get(node))
            else:
                continue
            origin = Origin(_join(prefix, user_name(node)), _operator_name(node))
            if isinstance(module, TensorQuantizer):
                origin = Origin(_join(prefix, node.name))
            node.op, node.target = "call_module", self._call(model, prefix, node, replacement, origin)
        model.recompile()

    def _deployed_quantizer(
        self, model: CapturedModel, node: fx.Node, quantizer: TensorQuantizer, name: str | None
    ) -> nn.Module:
        """Quantize at run time, or store the integers if the tensor is a constant."""
        self.in_graphs.add(id(quantizer))
        source = node.args[0]
        constant = isinstance(source, fx.Node) and source.op == "get_attr"
        site = None if name is None else self._site(quantizer, "weight" if constant else "activation", name, True)
        if constant and quantizer.quantizes:
            return as_integers(attribute_of(model, str(source.target)), quantizer, site)  # pyrefly: ignore
        return deployed(quantizer, site)


def _keep_what_is_read(model: CapturedModel, node: fx.Node) -> None:
    """Copy a layer's weight that something else reads, before the layer stores integers instead."""
    owner, _, name = str(node.target).rpartition(".")
    if not node.users:
        model.graph.erase_node(node)
    elif isinstance(layer := model.get_submodule(owner), QuantLayer):
        kept = nn.Module()
        kept.register_buffer(name, getattr(layer, name).detach())
        node.target = f"{add_internal(model, READ, node.name, kept)}.{name}"


def _settled(module: nn.Module, part: nn.Module) -> nn.Module:
    """Keep onnxruntime from rewriting attention, which it gets wrong; seen with 1.31.

    It does not load a file in which a quantizer feeds a Transpose and something else, and rounds the inputs of a
    projection whose weight alone is quantized (MatMulNBits).
    """
    return nn.Sequential(part, KeepFloat()) if isinstance(module, QuantMultiheadAttention) else part


def _operator_name(node: fx.Node) -> str:
    decision = decision_on(node)
    return decision.operator.name if decision is not None and decision.operator is not None else ""


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
