"""Remove what nothing reads: calls without users that change nothing else.

These stay: in-place writes, calls that draw random numbers (later calls would draw others), checks of inputs, modules
with hooks or their own statistics, and everything not known to only compute a result.
"""

from bitwright.graph.effects import only_computes
from bitwright.graph.facts import facts
from bitwright.graph.model import CapturedModel
from bitwright.graph.rewriting.schedule import register_schedule


@register_schedule("remove_dead_code", stage="simplify", after="*")
def remove_dead_code(model: CapturedModel) -> list[str]:
    """Remove all dead code, and report what was computed for nothing."""
    removed = []
    for node in reversed(list(model.graph.nodes)):
        if not node.users and only_computes(node, model):
            model.graph.erase_node(node)
            removed.append(node)
    calls = [n.name for n in reversed(removed) if n.op != "get_attr" and facts(n).tensor is not None]
    rest = len(removed) - len(calls)
    notes = [f"removed {name}, which nothing reads" for name in calls]
    return notes + ([f"removed {rest} sizes and attributes that nothing reads"] if rest else [])
