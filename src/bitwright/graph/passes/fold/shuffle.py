"""Channel shuffles between a layer and a norm, found by sending channel numbers through the nodes in between."""

import torch
from torch import fx, nn

from bitwright.graph.evaluate import Evaluator
from bitwright.graph.facts import facts, shape_of
from bitwright.graph.walks import operator_called, value_readers


def rearranges(node: fx.Node, instance: object) -> bool:
    """Whether a node only rearranges values, and one other node reads them."""
    kind = operator_called(node, instance)
    return kind is not None and kind.rearranges and not facts(node).written and len(value_readers(node)) == 1


def channel_order(layer: fx.Node, shuffled: fx.Node, model: nn.Module) -> list[int] | None:
    """For each channel of ``shuffled``, the channel of ``layer``; None if other axes move too, or nothing moves.

    The nodes between the two only move values. Two batch sizes are tried.
    """
    shape = shape_of(layer)
    if shape is None or len(shape) < 3 or shape_of(shuffled) != shape or len(value_readers(layer)) != 1:
        return None
    first, second = (_order_at(layer, shuffled, (batch, *shape[1:]), model) for batch in (2, 3))
    plain = list(range(shape[1]))  # not a shuffle, but other axes may have moved, and memory with them
    return first if first == second != plain else None


def _order_at(layer: fx.Node, shuffled: fx.Node, shape: tuple[int, ...], model: nn.Module) -> list[int] | None:
    spread = (1, -1, *[1] * (len(shape) - 2))
    numbers = torch.arange(shape[1]).reshape(spread).expand(shape).contiguous()
    try:
        moved = Evaluator(model, {layer: numbers})(shuffled)
    except (RuntimeError, ValueError, LookupError, TypeError):
        return None
    if tuple(moved.shape) != shape:
        return None
    order = moved.select(0, 0).flatten(1)[:, 0]
    whole = torch.equal(moved, order.reshape(spread).expand(shape))
    return order.tolist() if whole and sorted(order.tolist()) == list(range(shape[1])) else None
