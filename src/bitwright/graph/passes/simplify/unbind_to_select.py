"""Read the parts of a tensor one by one, not as a tuple.

    unbind(x, d)[i]  ->  select(x, d, i),      split(x, n, d)[i]  ->  narrow(x, d, i·n, n)

So every part is a tensor of its own that a quantizer can stand after. The parts of ``chunk`` and
``split`` are read in this way where their sizes are the same for all inputs.
"""

import operator
from typing import Any

import torch
from torch import fx

from bitwright.graph.build import NodeBuilder, argument, replace
from bitwright.graph.capture.sizes import Sizes
from bitwright.graph.facts import facts, shape_of
from bitwright.graph.model import CapturedModel
from bitwright.graph.rewriting.schedule import register_schedule

_UNBIND = {"unbind", torch.unbind}
_CHUNK = {"chunk", torch.chunk}
_SPLIT = {"split", torch.split, "split_with_sizes", torch.split_with_sizes}


@register_schedule("unbind_to_select", stage="simplify", after="fold_shape_arithmetic")
def unbind_to_select(model: CapturedModel) -> list[str]:
    """Rewrite every tuple of parts of which single ones are read, and say why not the others."""
    sizes = Sizes(model.graph, dict(model.named_modules()))
    notes = []
    for node in list(model.graph.nodes):
        if node.target not in _UNBIND | _CHUNK | _SPLIT or facts(node).written or not node.users:
            continue
        parts = _parts(node, sizes)
        if isinstance(parts, str):
            notes.append(f"not rewritten: {node.name}, {parts}")
            continue
        readers = list(node.users)
        if not all(_reads_one(user, len(parts)) for user in readers):
            notes.append(f"not rewritten: {node.name}, it is read as a whole")
            continue
        build = NodeBuilder(model, node)
        for user in readers:
            function, *place = parts[user.args[1]]  # pyrefly: ignore
            build.before = user
            made = build.function(function, argument(node, 0, "input"), *place)
            replace(user, made)
        model.graph.erase_node(node)
        notes.append(f"{node.name} is read in {len(readers)} parts")
    return notes


def _reads_one(user: fx.Node, count: int) -> bool:
    index = user.args[1] if user.target is operator.getitem and facts(user).tensor is not None else None
    return isinstance(index, int) and -count <= index < count and not facts(user).written


def _parts(node: fx.Node, sizes: Sizes) -> list[tuple[Any, ...]] | str:
    """How each part is read, or why the parts are not known."""
    source = argument(node, 0, "input", node.kwargs.get("tensor"))
    shape = shape_of(source)
    if shape is None or "tensor" in node.kwargs:
        return "what it takes apart is not known"
    position = 1 if node.target in _UNBIND else 2
    dimension = argument(node, position, "dim", 0)
    if not isinstance(dimension, int):
        return "its dimension is computed"
    if node.target in _UNBIND:
        return [(torch.select, dimension, i) for i in range(shape[dimension])]
    known = sizes.of(source) or (None,) * len(shape)
    lengths = _lengths(node, known[dimension])
    if isinstance(lengths, str):
        return lengths
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [(torch.narrow, dimension, start, length) for start, length in zip(starts, lengths, strict=True)]


def _lengths(node: fx.Node, size: int | None) -> list[int] | str:
    names = ("chunks",) if node.target in _CHUNK else ("split_size_or_sections", "split_size", "split_sizes")
    wish = next((node.kwargs[n] for n in names if n in node.kwargs), node.args[1] if len(node.args) > 1 else None)
    if isinstance(wish, tuple | list) and all(isinstance(w, int) for w in wish):
        return [int(w) for w in wish]  # pyrefly: ignore
    if not isinstance(wish, int):
        return "its sizes are computed"
    if size is None:
        return "the size it divides may change with the input"
    step = -(-size // wish) if node.target in _CHUNK else wish
    return [min(step, size - start) for start in range(0, size, step)] if step else "it divides nothing"
