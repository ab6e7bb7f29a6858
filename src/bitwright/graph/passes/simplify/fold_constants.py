"""Compute once what no input can change:  f(c)  ->  a buffer that holds f(c).

A constant is a tensor that forward made or a buffer that the model's files do not hold (``persistent=False``), and
that nothing writes into. Parameters train, and buffers with a name in the ``state_dict`` may be loaded later, so what
is computed of them stays as it is; the option ``persistent`` folds buffers like those too:
``fold_constants: {persistent: true}``.
"""

import torch
from torch import fx, nn

from bitwright.graph.evaluate import Evaluator
from bitwright.graph.facts import copy_facts, facts
from bitwright.graph.model import CapturedModel
from bitwright.graph.names import attribute_of, container, namespace
from bitwright.graph.purity import only_computes, written_attributes
from bitwright.graph.rewriting.schedule import register_schedule

LARGEST = 2**24  # values: larger results are left to be computed


@register_schedule("fold_constants", stage="simplify", after=("fold_shape_arithmetic", "unbind_to_select"))
def fold_constants(model: CapturedModel, persistent: bool = False) -> list[str]:
    """Fold every constant expression, and say why those of named buffers are not.

    Args:
        model: the model.
        persistent: fold what is computed of named buffers too; loading other values for them has no effect then.
    """
    written = written_attributes(model)
    reasons = {n: _why_changing(model, n, written, persistent) for n in model.graph.nodes if n.op == "get_attr"}
    constant: set[fx.Node] = {n for n, reason in reasons.items() if reason is None}
    held_back: dict[fx.Node, str] = {n: reason for n, reason in reasons.items() if reason}
    for node in model.graph.nodes:
        inputs = node.all_input_nodes
        if node.op not in ("call_function", "call_method") or not inputs or not only_computes(node, model):
            continue
        if all(n in constant for n in inputs):
            constant.add(node)
        elif all(n in constant or n in held_back for n in inputs):
            held_back[node] = next(held_back[n] for n in inputs if n in held_back)
    evaluate = Evaluator(model)
    notes = []
    for node in list(model.graph.nodes):
        if node.op == "get_attr" or facts(node).tensor is None:
            continue
        leads_on = [user for user in node.users if user not in constant]
        if node in constant and leads_on:
            notes.append(_fold(model, node, evaluate))
        elif held_back.get(node, "").startswith("buffer") and any(u not in held_back for u in node.users):
            notes.append(f"not folded: {node.name}, {held_back[node]}")
    return notes


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


def _why_changing(model: CapturedModel, node: fx.Node, written: set[str], persistent: bool) -> str | None:
    """Why a tensor that the graph reads is no constant."""
    target = str(node.target)
    value = attribute_of(model, target)
    owner_name, _, name = target.rpartition(".")
    owner = model.get_submodule(owner_name)
    if isinstance(value, nn.Parameter):
        return "parameters train"
    if target in written:
        return "the model writes into it"
    saved = name in owner._buffers and name not in owner._non_persistent_buffers_set
    return f"buffer {target} may be loaded anew" if saved and not persistent else None
