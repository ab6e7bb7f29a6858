"""Build a program of ``torch.export`` from a deployed model, and its record."""

from collections import Counter
from dataclasses import asdict
from typing import Any

import torch
from torch import fx, nn

from bitwright.errors import ExportError, useful_line
from bitwright.exporting.deploy import Deployment, Origin
from bitwright.exporting.fingerprint import fingerprint
from bitwright.exporting.formats.base import ExportOptions
from bitwright.exporting.making import Making
from bitwright.exporting.parts import IntegerTensor, parts_of
from bitwright.exporting.record import NOT_CALLED, ExportedOperator, ExportedTensor, ExportRecord
from bitwright.exporting.sizes import Sizes, WishedSizes
from bitwright.exporting.torch_program.parts import lower
from bitwright.exporting.torch_program.transposed import keep_transposed_float
from bitwright.graph import Inputs
from bitwright.graph.facts import noted_by_torch
from bitwright.graph.inputs import flat_inputs
from bitwright.graph.model import inputs_as_arguments

_KINDS = {"quantize_per": "QuantizeLinear", "dequantize_per": "DequantizeLinear"}


def build(deployment: Deployment, inputs: Inputs, options: ExportOptions, format: str) -> tuple[Any, ExportRecord, Any]:
    """The program, its record, and what else is known of it: its inputs, outputs and operators."""
    twin = deployment.model
    digest, sites = fingerprint(twin), [(name, part) for name, part in parts_of(twin) if part.site is not None]
    stored = {name for name, part in sites if isinstance(part, IntegerTensor)}
    lower(twin)
    with inputs_as_arguments(twin):
        program = _export(twin, inputs, options.dynamic_shapes)
    keep_transposed_float(program)
    graph = program.module().graph
    called = [(node, module_of(node)) for node in graph.nodes if node.op == "call_function"]
    made = _quantizers_by_module(called)
    tensors = [entry for name, part in sites for entry in _entries(name, part.site, name in stored, made.get(name, []))]
    origins = [ExportedOperator(n.name, *_origin(m, deployment.origins)) for n, m in called]
    arguments = tuple(flat_inputs(twin, inputs))
    record = ExportRecord(
        format=format,
        model=twin.__class__.__name__,
        quantized=deployment.quantized,
        fingerprint=digest,
        inputs=arguments,
        tensors=tuple(tensors),
        operators=tuple(o for o in origins if o.name),
        making=asdict(Making.of(twin, inputs, options, ())),
    )
    nodes = [(n.name, kind_of(n), [i.name for i in n.all_input_nodes], [n.name]) for n, _ in called]
    count = len([spec for spec in program.graph_signature.output_specs if spec.kind.name == "USER_OUTPUT"])
    origin = {"inputs": list(arguments), "outputs": _results(deployment, count), "nodes": nodes}
    return program, record, origin


def _quantizers_by_module(called: list[tuple[fx.Node, str]]) -> dict[str, list[str]]:
    """The names of the nodes that quantize, by the module they were called in."""
    made: dict[str, list[str]] = {}
    for node, module in called:
        if str(node.target).startswith("bitwright."):
            raise ExportError(f"the program needs {node.target}, which PyTorch alone does not have: export with 'onnx'")
        if kind_of(node) == "QuantizeLinear":
            made.setdefault(module, []).append(node.name)
    return made


def module_of(node: fx.Node) -> str:
    """The module that a node of a program was called in."""
    stack = list((noted_by_torch(node, "nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


def kind_of(node: fx.Node) -> str:
    """The type of a node: ONNX's words for quantizers, torch's for the rest."""
    name = str(getattr(node.target, "__name__", node.target)).partition(".")[0]
    return next((kind for start, kind in _KINDS.items() if name.startswith(start)), name)


def _entries(module: str, site: Any, stored: bool, nodes: list[str]) -> list[ExportedTensor]:
    plain = (site.name, site.kind, site.spec)
    if stored:
        return [ExportedTensor(site.quantizer, 0, *plain, tensor=f"{module}.integers", phases=site.phases)]
    if not nodes and site.placed:
        raise ExportError(f"the exporter lost the quantizer of {site.name}: nothing was written")
    if not nodes:
        return [ExportedTensor(site.quantizer, 0, *plain, reason=NOT_CALLED)]
    return [ExportedTensor(site.quantizer, call, *plain, tensor=name) for call, name in enumerate(nodes)]


def _origin(module: str, origins: dict[str, Origin]) -> tuple[str, str]:
    """What the user calls the module of a node, or the nearest around it."""
    while module and module not in origins:
        module = module.rpartition(".")[0]
    found = origins.get(module, Origin(""))
    return found.name, found.operator


def _results(deployment: Deployment, count: int) -> list[str]:
    names = deployment.results()
    if len(names) != count or max(Counter(names).values(), default=1) > 1:
        names = [f"output_{i}" for i in range(count)]
    return names


def _export(twin: nn.Module, inputs: Inputs, wished: object) -> Any:
    """Export with free sizes where the model takes others, or as the user wishes."""
    if wished is True:
        sizes = Sizes(twin, inputs)
        free = sizes.free()
        while free:
            try:
                return _program(twin, sizes.inputs, sizes.shapes(free))
            except Exception:  # whatever torch says: fewer sizes are free
                free.pop()
    given = None if isinstance(wished, bool) else WishedSizes(twin, inputs, wished)
    try:
        return _program(twin, inputs if given is None else given.inputs, None if given is None else given.shapes)
    except Exception as error:
        raise ExportError(f"torch.export refused the model: {type(error).__name__}: {useful_line(error)}") from error


def _program(twin: nn.Module, inputs: Inputs, shapes: Any) -> Any:
    with torch.no_grad():
        return torch.export.export(twin, inputs.args, inputs.kwargs, dynamic_shapes=shapes)
