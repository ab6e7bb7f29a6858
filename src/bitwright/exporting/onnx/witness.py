"""Witnesses: follow the tensors of marked quantizers through the optimizer, which merges, folds and renames.

Each marked tensor gets another reader, a node of a private domain with a unique number, which no optimization touches.
Its input at the end is what became of the tensor. Then the witnesses are removed.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnxscript.optimizer import fold_constants_ir
from onnxscript.rewriter import RewritePass
from onnxscript.rewriter.rules import common as rules

from bitwright.errors import ExportError
from bitwright.exporting.onnx.translate import KEPT, PART
from bitwright.exporting.parts import Part, Site
from bitwright.exporting.record import CONSTANT, NOT_CALLED, UNREAD, ExportedTensor

_DOMAIN = "bitwright.witness"

# Those of the exporter's own rules that leave layers and guards alone, and whose work does not grow with the square
# of the graph.
_RULES = [
    *(rules.add_0_rule, rules.sub_0_rule, rules.mul_by_1_rule, rules.div_by_1_rule),
    *(rules.dropout_zero_rule, rules.dropout_inference_rule),
    *(rules.two_reshapes_matmul_reshape_rule, rules.one_reshape_matmul_reshape_rule),
    *(rules.cast_constant_of_shape_rule, rules.cast_constant_of_shape_without_value_rule),
    *(rules.collapse_slice_rule, rules.collapse_slice2_rule, rules.materialize_reshape_shape_rule),
    *(rules.cast_cast_rule, rules.no_op_cast_rule, rules.no_op_expand_rule, rules.flatten_to_reshape_rule),
    *(rules.reshape_reshape_rule, rules.no_op_transpose_rule, rules.transpose_transpose_rule),
    *(rules.unsqueeze_unsqueeze_rule, rules.squeeze_reshape_1d_rule),
    *(rules.no_op_dynamic_scatter_nd_rule, rules.no_op_static_scatter_nd_rule),
]


@dataclass
class Witness:
    """One call of a quantizer, and its counterpart in the file."""

    site: Site
    call: int
    value: Any = None
    reason: str = ""

    def entry(self) -> ExportedTensor:
        """Its entry in the record, once all names are final."""
        site = self.site
        kept = (site.quantizer, self.call, site.name, site.kind, site.spec)
        if self.value is None:
            return ExportedTensor(*kept, reason=self.reason)
        written_unsigned = site.signed and self.value.dtype == ir.DataType.UINT8
        shift = 128 if written_unsigned else 0
        return ExportedTensor(*kept, tensor=self.value.name, shift=shift, phases=site.phases)


def optimize(model: Any, parts: list[Part]) -> list[Witness]:
    """Optimize an exported model, and return what became of every site."""
    passes.InlinePass()(model)
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    witnesses = _add(model, parts)
    _simplify(model)
    for node in [n for n in model.graph if n.domain == _DOMAIN]:
        _settle(witnesses[node.attributes["number"].as_int()], node.inputs[0])
        model.graph.outputs.remove(node.outputs[0])
        model.graph.remove(node, safe=True)
    model.opset_imports.pop(_DOMAIN, None)
    passes.RemoveUnusedNodesPass()(model)
    alive = {id(v) for n in model.graph for v in n.outputs} | {id(v) for v in model.graph.initializers.values()}
    for witness in witnesses:
        if witness.value is not None and id(witness.value) not in alive:
            witness.value, witness.reason = None, UNREAD
    return [*witnesses, *_never_called([p.site for p in parts if p.site is not None], witnesses)]


def _simplify(model: Any) -> None:
    """Fold constants and remove no-ops, until nothing changes, at most twice."""
    for _ in range(2):
        changed = fold_constants_ir(model, onnx_shape_inference=True, should_fold=_may_be_folded).modified
        changed |= RewritePass(_RULES)(model).modified
        changed |= passes.RemoveUnusedNodesPass()(model).modified
        if not changed:
            break
    passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    passes.LiftSubgraphInitializersToMainGraphPass()(model)
    passes.DeduplicateInitializersPass()(model)
    passes.CommonSubexpressionEliminationPass()(model)
    passes.RemoveUnusedFunctionsPass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    passes.OutputFixPass()(model)
    passes.NameFixPass()(model)


def _may_be_folded(node: Any) -> bool | None:
    return False if KEPT in node.metadata_props else None


def _add(model: Any, parts: list[Part]) -> list[Witness]:
    """Put a witness at every marked tensor, in the order in which the model computes them."""
    witnesses: list[Witness] = []
    calls: Counter[str] = Counter()
    for node in list(model.graph):
        number = node.metadata_props.pop(PART, None)
        site = None if number is None else parts[int(number)].site
        if site is None:
            continue
        if site.kind == "weight" and calls[site.quantizer]:
            continue  # a layer that is called again has the same weight
        witness = Witness(site, calls[site.quantizer])
        calls[site.quantizer] += 1
        integers = node.outputs[0] if node.op_type == "Where" else node.inputs[0]
        reader = ir.node("Witness", [integers], {"number": len(witnesses)}, domain=_DOMAIN)
        reader.outputs[0].name = f"{_DOMAIN}.{len(witnesses)}"
        model.graph.append(reader)
        model.graph.outputs.append(reader.outputs[0])
        witnesses.append(witness)
    model.opset_imports[_DOMAIN] = 1
    return witnesses


def _settle(witness: Witness, value: Any) -> None:
    producer = value.producer()
    if witness.site.kind == "weight":
        witness.value = value
    elif producer is None or producer.op_type not in ("QuantizeLinear", "Where"):
        witness.reason = CONSTANT
    else:
        witness.value = value


def _never_called(sites: list[Site], witnesses: list[Witness]) -> list[Witness]:
    """Witnesses for the sites that the exporter never saw; a quantizer in a graph must not get lost."""
    met = {w.site for w in witnesses}
    missing = [s for s in sites if s not in met]
    lost = [s.name for s in missing if s.placed]
    if lost:
        raise ExportError(f"the exporter lost the quantizers of {', '.join(lost[:3])}: nothing was written")
    return [Witness(site, 0, reason=NOT_CALLED) for site in missing]
