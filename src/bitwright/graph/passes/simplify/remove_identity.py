"""Remove what returns its input:  identity(x)  ->  x.

``nn.Identity`` and empty ``nn.Sequential`` modules go; those that have hooks stay, as somebody looks at them.
"""

from torch import nn

from bitwright.graph.build import has_hooks, module_of, replace
from bitwright.graph.model import CapturedModel
from bitwright.graph.rewriting.schedule import register_schedule


@register_schedule("remove_identity", stage="simplify")
def remove_identity(model: CapturedModel) -> list[str]:
    """Remove every identity; the modules stay in the tree, under their names."""
    notes = []
    for node in list(model.graph.nodes):
        module = module_of(node, model)
        empty = isinstance(module, nn.Sequential) and len(module) == 0
        if module is None or not (type(module) is nn.Identity or empty):
            continue
        if has_hooks(module):
            notes.append(f"not removed: {node.target}, it has hooks")
            continue
        replace(node, node.args[0] if node.args else node.kwargs["input"])
        notes.append(f"removed {node.target}")
    return notes
