"""The deployed twin of a prepared model: weights and biases as integers, quantizers where a runtime needs them.

Each call in the graph becomes a module with the name of its node, so that the exporter's record of module names says
which node an ONNX operator came from.
"""

import copy
from typing import Any

import torch
from torch import fx, nn

from bitwright.errors import ExportError
from bitwright.exporting.modules import (
    Call,
    DeployedFunction,
    DeployedLayer,
    DeployedQuantizer,
    FloatLayer,
    GlobalAveragePool,
    KeepFloat,
    as_integers,
)
from bitwright.graph import CapturedModel
from bitwright.graph.capture.objects import make_results_plain
from bitwright.graph.expression import Expression, is_constant
from bitwright.graph.facts import copy_facts, facts, set_facts, shape_of
from bitwright.graph.names import add_internal, attribute_of, put_submodule
from bitwright.nn.attention import QuantMultiheadAttention
from bitwright.nn.functional import QuantFunction
from bitwright.nn.layer import QuantLayer
from bitwright.nn.operators import operator_of
from bitwright.nn.weight_sites import weight_sites
from bitwright.preparation import Verdict, decision_on
from bitwright.quantizer import TensorQuantizer, quantizers

CALLS = "calls"  # in the model's namespace: modules that stand for single nodes


def deploy(model: nn.Module) -> nn.Module:
    """Return the deployed twin of a calibrated model; the model itself is left untouched."""
    waiting = [q.label or name for name, q in quantizers(model).items() if not q.quantizes and q.enabled]
    if waiting:
        more = f" and {len(waiting) - 3} more" if len(waiting) > 3 else ""
        raise ExportError(f"not quantizing yet: {', '.join(waiting[:3])}{more}; calibrate the model first")
    twin = copy.deepcopy(model).eval()
    for parameter in twin.parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():
        if isinstance(twin, CapturedModel):
            make_results_plain(twin.graph)
            _deploy_graph(twin)
        for name, module in list(twin.named_modules()):
            if isinstance(module, CapturedModel) and name:
                _deploy_graph(module)
            elif isinstance(module, QuantFunction) or not isinstance(module, QuantLayer):
                continue
            else:
                made = DeployedLayer(module) if module.weight_quantizer.enabled else FloatLayer(module)
                put_submodule(twin, name, made)
        _deploy_own_quantizers(twin)
    return twin


def _deploy_own_quantizers(twin: nn.Module) -> None:
    """Settle the quantizers inside users' QModules and forwards: weights are stored as integers."""
    for site in list(weight_sites(twin)):
        if site.quantizer.enabled:
            put_submodule(site.layer, site.key, _settled(site.layer, as_integers(site.weight(), site.quantizer)))
    for module in list(twin.modules()):
        if isinstance(module, QuantFunction):
            continue
        for name, quantizer in list(module._modules.items()):
            if isinstance(quantizer, TensorQuantizer) and quantizer.enabled:
                module._modules[name] = _settled(module, DeployedQuantizer(quantizer))


def _settled(module: nn.Module, deployed: nn.Module) -> nn.Module:
    """Keep onnxruntime from rewriting attention, which it gets wrong; seen with 1.31.

    It does not load a file in which a quantizer feeds a Transpose and something else, and rounds the inputs of a
    projection whose weight alone is quantized (MatMulNBits).
    """
    return nn.Sequential(deployed, KeepFloat()) if isinstance(module, QuantMultiheadAttention) else deployed


def float_twin(model: nn.Module) -> nn.Module:
    """A copy of a model without quantization, in which every call of a graph is a module named after its node."""
    twin = copy.deepcopy(model).eval()
    for quantizer in quantizers(twin).values():
        quantizer.off()
    if isinstance(twin, CapturedModel):
        make_results_plain(twin.graph)
    for module in [twin, *twin.modules()]:
        if isinstance(module, CapturedModel):
            _name_calls(module)
    return twin


def _deploy_graph(model: CapturedModel) -> None:
    modules = dict(model.named_modules())
    for node in list(model.graph.nodes):
        module = _module(node, modules)
        if isinstance(module, QuantFunction):
            _deploy_function(model, node, module)
    for rewrite in (_drop_redundant_activations, _requantize_carried, _guard_float_layers):
        rewrite(model, dict(model.named_modules()))
    _name_calls(model)


def _deploy_function(model: CapturedModel, node: fx.Node, function: QuantFunction) -> None:
    """Store the weight and bias of a function as integers where they are constants."""
    names = ("input", "weight", "bias")
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    weight, bias = given.get("weight"), given.get("bias")
    constants = [n is None or is_constant(n) for n in (weight, bias)]
    if not all(constants) or not isinstance(weight, fx.Node):
        return
    values: list[Any] = [None if n is None else Expression(model, n)() for n in (weight, bias)]
    name = add_internal(model, CALLS, node.name, DeployedFunction(function, values[0], values[1]))
    rest = {k: v for k, v in node.kwargs.items() if k not in names}
    node.op, node.target = "call_module", name
    node.args, node.kwargs = (given["input"], *node.args[3:]), rest


def _guard_float_layers(model: CapturedModel, modules: dict[str, nn.Module]) -> None:
    """Make sure that what stays float is not quantized by the runtime: layers with a weight, and what it gets wrong."""
    for node in list(model.graph.nodes):
        operator = operator_of(node, modules)
        decision = decision_on(node)
        if decision is not None and decision.judgement.keep_float:
            for source in node.all_input_nodes:
                if facts(source).tensor is not None:
                    _guard(model, source, [node])
        elif operator is not None and operator.weight and not isinstance(modules.get(str(node.target)), QuantLayer):
            _guard(model, node, list(node.users))


def _guard(model: CapturedModel, tensor: fx.Node, users: list[fx.Node]) -> None:
    name = add_internal(model, CALLS, f"{tensor.name}_kept_float", KeepFloat())
    with model.graph.inserting_after(tensor):
        guard = model.graph.call_module(name, (tensor,))
    set_facts(guard, tensor=facts(tensor).tensor)
    for user in users:
        user.replace_input_with(tensor, guard)


def _drop_redundant_activations(model: CapturedModel, modules: dict[str, nn.Module]) -> None:
    """Remove ReLU and clamps whose effect the quantizer after them has anyway: it saturates at the same values."""
    for node in list(model.graph.nodes):
        operator = operator_of(node, modules)
        limits = None if operator is None else operator.limits_of(node, _module(node, modules))
        if limits is None or len(node.users) != 1:
            continue
        after = next(iter(node.users))
        quantizer = _module(after, modules)
        if not isinstance(quantizer, TensorQuantizer) or not quantizer.enabled or quantizer.scale.ndim:
            continue
        scale, zero_point = (p.item() for p in quantizer.qparams())
        lowest = round(limits[0] / scale) + zero_point if limits[0] is not None else quantizer.spec.qmin
        highest = round(limits[1] / scale) + zero_point if limits[1] is not None else quantizer.spec.qmax
        if lowest <= quantizer.spec.qmin and highest >= quantizer.spec.qmax:
            node.replace_all_uses_with(node.args[0])  # pyrefly: ignore
            model.graph.erase_node(node)


def _requantize_carried(model: CapturedModel, modules: dict[str, nn.Module]) -> None:
    """Repeat the quantizer after each operator that carries its scale on: runtimes look for one at every integer input.

    The values are on the grid already: in the simulation the repetition changes nothing, so it is only made here.
    """
    carried: dict[fx.Node, str] = {}
    wanted = _leads_to_quantized(model, modules)
    for node in list(model.graph.nodes):
        if node.op == "call_module" and isinstance(modules.get(str(node.target)), TensorQuantizer):
            carried[node] = str(node.target)
            continue
        operator = operator_of(node, modules)
        module = _module(node, modules)
        source = node.args[0] if node.args else None
        if operator is None or not isinstance(source, fx.Node) or source not in carried:
            continue
        if not operator.carries_scale(node, module):
            continue
        carried[node] = carried[source]
        if facts(node).tensor is None or node not in wanted:
            continue
        with model.graph.inserting_after(node):
            again = model.graph.create_node("call_module", carried[source], (node,), name=f"{node.name}_carried")
        node.replace_all_uses_with(again, delete_user_cb=lambda user, own=again: user is not own)
        copy_facts(node, again)
        carried[again] = carried[source]


def _leads_to_quantized(model: CapturedModel, modules: dict[str, nn.Module]) -> set[fx.Node]:
    """The nodes whose values reach an integer operator before anything else computes on them."""
    reach: set[fx.Node] = set()
    for node in reversed(list(model.graph.nodes)):
        for user in node.users:
            module = _module(user, modules)
            operator = operator_of(user, modules)
            if operator is not None and operator.carries_scale(user, module):
                reach.update({node} if user in reach else set())
            elif (decision := decision_on(user)) is not None and decision.verdict is Verdict.INTEGER:
                reach.add(node)
    return reach


def _name_calls(model: CapturedModel) -> None:
    modules = dict(model.named_modules())
    for node in model.graph.nodes:
        if _averages_planes(node, modules):
            replacement: nn.Module = GlobalAveragePool()
        elif node.op in ("call_function", "call_method") and facts(node).tensor is not None:
            replacement = Call(node)
        elif node.op == "call_module" and isinstance(modules.get(str(node.target)), TensorQuantizer):
            replacement = _deployed_quantizer(model, node, modules[str(node.target)])
        else:
            continue
        node.op, node.target = "call_module", add_internal(model, CALLS, node.name, replacement)
    model.recompile()


def _deployed_quantizer(model: CapturedModel, node: fx.Node, quantizer: Any) -> nn.Module:  # noqa: ANN401
    """Quantize while running, or store the integers where the tensor is a constant."""
    source = node.args[0]
    if quantizer.quantizes and isinstance(source, fx.Node) and source.op == "get_attr":
        return as_integers(attribute_of(model, str(source.target)), quantizer)
    return DeployedQuantizer(quantizer)


def _averages_planes(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    operator, shape = operator_of(node, modules), shape_of(node)
    if operator is None or shape is None or len(shape) != operator.rank + 2:
        return False
    return operator.averages_planes_of(node, _module(node, modules))


def _module(node: fx.Node, modules: dict[str, nn.Module]) -> nn.Module | None:
    return modules.get(str(node.target)) if node.op == "call_module" else None
