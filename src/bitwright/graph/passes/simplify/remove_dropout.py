"""Remove dropout that drops nothing:  dropout(x, p=0)  ->  x,  dropout(x, p, training=False)  ->  x.

A dropout module with p > 0 stays, as training the prepared model needs it; quantizers see through it. The option
``trained`` removes these too, for models that will not be trained any more:  ``remove_dropout: {trained: true}``.
"""

from torch import fx, nn

from bitwright.graph.build import argument, has_hooks, module_of, replace
from bitwright.graph.facts import facts
from bitwright.graph.model import CapturedModel
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.nn.operators import operator_of


@register_schedule("remove_dropout", stage="simplify")
def remove_dropout(model: CapturedModel, trained: bool = False) -> list[str]:
    """Remove dropout where it does nothing, and say where it stays for training.

    Args:
        model: the model.
        trained: the model will not be trained again, so that dropout modules can go too.
    """
    notes = []
    modules = dict(model.named_modules())
    for node in list(model.graph.nodes):
        kind = operator_of(node, modules)
        if kind is None or kind.name != "dropout":
            continue
        module = module_of(node, model)
        name = node.target if module is not None else node.name
        if reason := _why_not(node, module, trained):
            notes.append(f"not removed: {name}, {reason}")
            continue
        replace(node, argument(node, 0, "input"))
        notes.append(f"removed {name}")
    return notes


def _why_not(node: fx.Node, module: nn.Module | None, trained: bool) -> str | None:
    if facts(node).written:
        return "it writes into a tensor that others read"
    if module is None:
        drops = argument(node, 2, "training", True) is not False and argument(node, 1, "p", 0.5) != 0
        return "it drops in evaluation too" if drops else None
    if has_hooks(module):
        return "it has hooks"
    return None if trained or module.p == 0 else "training needs it"
