"""Witnesses: follow the tensors of marked quantizers through the optimizer, which merges, folds and renames.

Each marked tensor gets one more reader, a node of a private domain with a number of its own, which no optimization
touches. What it reads at the end is what became of the tensor. Then the witnesses are removed.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as passes

from bitwright.errors import ExportError
from bitwright.exporting.onnx.translate import SITE
from bitwright.exporting.record import CONSTANT, NOT_CALLED, UNREAD, ExportedTensor
from bitwright.exporting.sites import Site

_DOMAIN = "bitwright.witness"


@dataclass
class Witness:
    """One call of a quantizer, and what the file has for it."""

    site: Site
    call: int
    value: Any = None
    reason: str = ""

    def entry(self) -> ExportedTensor:
        """What the record says of it, once all names are final."""
        site = self.site
        kept = (site.quantizer, self.call, site.name, site.kind, site.spec)
        if self.value is None:
            return ExportedTensor(*kept, reason=self.reason)
        written_unsigned = site.signed and self.value.dtype == ir.DataType.UINT8
        return ExportedTensor(*kept, tensor=self.value.name, shift=128 if written_unsigned else 0)


def optimize(program: Any, sites: list[Site]) -> list[Witness]:  # noqa: ANN401
    """Optimize an exported program, and tell what became of every site."""
    witnesses = _add(program.model, sites)
    program.optimize()
    model = program.model
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
    return [*witnesses, *_never_called(sites, witnesses)]


def _add(model: Any, sites: list[Site]) -> list[Witness]:  # noqa: ANN401
    """Put a witness at every marked tensor, in the order in which the model computes them."""
    witnesses: list[Witness] = []
    calls: Counter[str] = Counter()
    for node in list(model.graph):
        number = node.metadata_props.pop(SITE, None)
        if number is None:
            continue
        site = sites[int(number)]
        if site.kind == "weight" and calls[site.quantizer]:
            continue  # a layer that is called again: its weight is the same
        witness = Witness(site, calls[site.quantizer])
        calls[site.quantizer] += 1
        reader = ir.node("Witness", [node.inputs[0]], {"number": len(witnesses)}, domain=_DOMAIN)
        reader.outputs[0].name = f"{_DOMAIN}.{len(witnesses)}"
        model.graph.append(reader)
        model.graph.outputs.append(reader.outputs[0])
        witnesses.append(witness)
    model.opset_imports[_DOMAIN] = 1
    return witnesses


def _settle(witness: Witness, value: Any) -> None:  # noqa: ANN401
    producer = value.producer()
    if witness.site.kind == "weight":
        witness.value = value
    elif producer is None or producer.op_type != "QuantizeLinear":
        witness.reason = CONSTANT
    else:
        witness.value = value


def _never_called(sites: list[Site], witnesses: list[Witness]) -> list[Witness]:
    """Witnesses for the sites that the exporter never met; a quantizer in a graph must not get lost."""
    met = {w.site for w in witnesses}
    missing = [s for s in sites if s not in met]
    lost = [s.name for s in missing if s.placed]
    if lost:
        raise ExportError(f"the exporter lost the quantizers of {', '.join(lost[:3])}: nothing was written")
    return [Witness(site, 0, reason=NOT_CALLED) for site in missing]
