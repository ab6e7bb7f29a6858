"""Compute once what no input can change:  f(c)  ->  a buffer that holds f(c).

A constant is a tensor that forward created, or a buffer that is not in the ``state_dict`` (``persistent=False``), if
nothing writes into it. Parameters train, and buffers in the ``state_dict`` may be loaded later, so results computed
from them are not folded. The option ``persistent`` folds such buffers too:
``fold_constants: {persistent: true}``.
"""

import torch
from torch import fx, nn

from bitwright.graph.effects import only_computes, written_attributes
from bitwright.graph.evaluate import Evaluator
from bitwright.graph.facts import copy_facts, facts
from bitwright.graph.model import CapturedModel
from bitwright.graph.names import attribute_of, container, namespace
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.torch_internals import is_saved

_CALLS = ("call_function", "call_method")
LARGEST = 2**24  # values: larger results are not folded


@register_schedule("fold_constants", stage="simplify", after=("fold_shape_arithmetic", "unbind_to_select"))
def fold_constants(model: CapturedModel, persistent: bool = False) -> list[str]:
    """Fold every constant expression, and say why those of named buffers are kept.

    Args:
        model: the model.
        persistent: also fold results computed from named buffers; loading other values then has no effect.
    """
    found = _computed_from_attributes(model, persistent)
    evaluate = Evaluator(model)
    notes = []
    for node, reason in found.items():
        if node.op == "get_attr" or facts(node).tensor is None:
            continue
        if not reason and any(found.get(user, "is not constant") for user in node.users):
            notes.append(_fold(model, node, evaluate))
        elif reason.startswith("buffer") and any(user not in found for user in node.users):
            notes.append(f"not folded: {node.name}, {reason}")
    return notes


def _computed_from_attributes(model: CapturedModel, persistent: bool) -> dict[fx.Node, str]:
    """The nodes that no input reaches, each with a reason if it may change anyway."""
    reads = [node for node in model.graph.nodes if node.op == "get_attr"]
    if not reads:
        return {}
    written = written_attributes(model)
    found = {node: _why_changing(model, str(node.target), written, persistent) for node in reads}
    for node in model.graph.nodes:
        inputs = node.all_input_nodes
        if inputs and found.keys() >= set(inputs) and node.op in _CALLS and only_computes(node, model):
            found[node] = next(filter(None, map(found.__getitem__, inputs)), "")
    return found


def _fold(model: CapturedModel, node: fx.Node, evaluate: Evaluator) -> str:
    """Replace one node by a buffer."""
    with torch.no_grad():
        value = evaluate(node)
    if value.numel() > LARGEST:
        return f"not folded: {node.name}, its result has {value.numel()} values"
    path = [namespace(model), "constants"]
    container(model, path).register_buffer(node.name, value.detach().clone(), persistent=False)
    with model.graph.inserting_before(node):
        buffer = model.graph.create_node("get_attr", ".".join([*path, node.name]), name=f"constant_{node.name}")
    copy_facts(node, buffer)
    node.replace_all_uses_with(buffer)
    return f"computed {node.name} once"


def _why_changing(model: CapturedModel, target: str, written: set[str], persistent: bool) -> str:
    """Why a tensor that the graph reads may change."""
    owner_name, _, name = target.rpartition(".")
    owner = model.get_submodule(owner_name)
    if isinstance(attribute_of(model, target), nn.Parameter):
        return "parameters train"
    if target in written:
        return "the model writes into it"
    saved = is_saved(owner, name)
    return f"buffer {target} may be loaded again" if saved and not persistent else ""
