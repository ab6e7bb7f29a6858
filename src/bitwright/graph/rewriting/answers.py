"""Answers to questions that depend on weights: kept with the graph, so that it can be made again with other weights."""

from torch import nn

_KEPT = "bitwright_answers"  # in the __dict__ of a captured graph


def answers_of(model: nn.Module) -> dict[str, bool]:
    """By question, how it was answered when the graph was rewritten; a schedule asks here first, and adds its own."""
    return model.__dict__.setdefault(_KEPT, {})
