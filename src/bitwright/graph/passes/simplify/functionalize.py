"""Turn in-place operations into functional ones:  x.add_(y); f(x)   becomes   z = x + y; f(z).

A quantizer on an edge returns a new tensor, so an operation that writes into its input would bypass it. If other
tensors share the memory and are read later, the operation stays in place, and all tensors that share it are marked
``written``, so that none of them is quantized. Writes into parameters, buffers and graph inputs stay in place too.
"""

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx, nn

from bitwright.graph.capture.proxy import IN_PLACE_OPERATORS, set_item
from bitwright.graph.effects import inplace_argument, twin, writes
from bitwright.graph.facts import dtype_of, facts, set_facts, shape_of
from bitwright.graph.model import CapturedModel
from bitwright.graph.names import module_of
from bitwright.graph.rewriting.schedule import register_schedule
from bitwright.graph.walks import first_input, reached_from

# Methods whose name without the underscore means something else.
_NO_TWIN = {"bernoulli_", "requires_grad_", "resize_", "resize_as_"}


def _with_item(x: torch.Tensor, key: object, value: object) -> torch.Tensor:
    return set_item(x.clone(), key, value)


_FUNCTIONAL: dict[Any, Callable[..., Any]] = {**IN_PLACE_OPERATORS, set_item: _with_item}


@register_schedule("functionalize", stage="simplify", before=("*",))
def functionalize(model: CapturedModel) -> list[str]:
    """Rewrite every in-place operation whose memory nothing else reads."""
    order = {node: i for i, node in enumerate(model.graph.nodes)}
    notes: list[str] = []
    free: set[Any] = set()
    bound: set[Any] = set()  # modules that must stay in place in some call
    for node in [n for n in model.graph.nodes if writes(n, model) and shape_of(first_input(n)) is not None]:
        written, module = cast("fx.Node", first_input(node)), module_of(node, model)
        _read_result(written, node, order)
        reason = _why_in_place(node, written, module, order)
        (bound if reason else free).add(module)
        notes.append(f"{node.name} stays in place: {reason}" if reason else f"{node.name} is functional")
    for module in free - bound - {None}:
        module.inplace = False
    _forget_sharing(model)
    return notes


def _forget_sharing(model: CapturedModel) -> None:
    for node in model.graph.nodes:
        if facts(node).shares:
            set_facts(node, shares=())


def _read_result(written: fx.Node, node: fx.Node, order: dict[fx.Node, int]) -> None:
    """Make what follows the in-place operation read its result, which is the tensor written to."""
    for user in [u for u in written.users if order[u] > order[node]]:
        user.replace_input_with(written, node)
        set_facts(user, shares=tuple(node if n is written else n for n in facts(user).shares))


def _mark_written(*nodes: fx.Node) -> None:
    for node in nodes:
        set_facts(node, written=True)


def _why_in_place(node: fx.Node, written: fx.Node, module: nn.Module | None, order: dict[fx.Node, int]) -> str | None:
    """Make one operation functional, or mark all that share its memory and say why it stays."""
    family = _sharing_memory(written, node)  # after ``node``, nothing reads ``written`` itself any more
    readers = [member for member in family if _is_read_after(member, node, order)]
    if readers and not _is_put_back(node, written, family, order):
        _mark_written(*family, node)
        return f"{readers[0].name} shares the memory it writes to"
    if {member.op for member in family} & {"placeholder", "get_attr"}:
        return "it writes to an input, a parameter or a buffer"
    if _changes_dtype(node, written) or (module is None and not _make_functional(node)):
        return "it has no functional form"
    set_facts(node, shares=())
    return None


def _is_put_back(node: fx.Node, written: fx.Node, family: list[fx.Node], order: dict[fx.Node, int]) -> bool:
    """Whether the result replaces what it was computed from before anything reads that:  x[key] += y."""
    back = [user for user in node.users if user.target is set_item and user.args[2] is node]
    if len(back) != 1 or written.target is not operator.getitem or back[0].args[:2] != written.args:
        return False
    after = [order[user] for member in family for user in member.users if order[user] > order[node]]
    return min(after) == order[back[0]]


def _is_read_after(member: fx.Node, node: fx.Node, order: dict[fx.Node, int]) -> bool:
    return any(order[user] > order[node] for user in member.users)


def _sharing_memory(start: fx.Node, without: fx.Node) -> list[fx.Node]:
    """Every node whose value shares memory with ``start``, except ``without`` and its descendants."""

    def sharing(node: fx.Node) -> list[fx.Node]:
        views = [user for user in node.users if node in facts(user).shares]
        return [other for other in (*facts(node).shares, *views) if other is not without]

    return reached_from(start, sharing)


def _changes_dtype(node: fx.Node, written: fx.Node) -> bool:
    """Whether the functional form would return a wider type: in place, the tensor written to keeps its type."""
    own, others = dtype_of(written), filter(None, map(dtype_of, node.all_input_nodes))
    return own is not None and any(torch.promote_types(own, other) != own for other in others)


def _make_functional(node: fx.Node) -> bool:
    """Change a function or method call to one that does not write; say whether there is one."""
    if node.op == "call_method":
        name = str(node.target)
        plain = name[:-1]
        if name in _NO_TWIN or not callable(getattr(torch.Tensor, plain, None)):
            return False
        node.target = plain
        return True
    argument = inplace_argument(node)
    if isinstance(argument, str):
        node.update_kwarg(argument, False)
    elif isinstance(argument, int):
        node.update_arg(argument, False)
    else:
        node.target = _FUNCTIONAL.get(node.target) or twin(node.target) or node.target
    return True
