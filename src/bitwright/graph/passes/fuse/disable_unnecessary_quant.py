"""No quantizer between an operator and its activation:  q(relu(q(conv(x))))  ->  q(relu(conv(x))).

A backend that computes both at once never rounds what is between them. This marks the activations whose input nobody
else reads; those that the backend can fuse (``Backend.fused``) then join the integer operator before them. Switched
off, every activation stands by itself, and what goes into it is quantized as well.
"""

from torch import fx

from bitwright.graph.facts import set_facts
from bitwright.graph.model import CapturedModel
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.nn.operators import operator_of


@register_schedule("disable_unnecessary_quant", stage="fuse", after="*")
def disable_unnecessary_quant(model: CapturedModel) -> list[str]:
    """Mark every activation that may join what is before it, and say where others read that too."""
    modules = dict(model.named_modules())
    notes = []
    for node in model.graph.nodes:
        kind = operator_of(node, modules)
        before = node.args[0] if node.args else None
        if kind is None or not kind.activation or not isinstance(before, fx.Node):
            continue
        if len(before.users) > 1:
            notes.append(f"not joined: {node.name} and {before.name}, which has {len(before.users)} users")
            continue
        set_facts(node, joins=True)
    return notes
