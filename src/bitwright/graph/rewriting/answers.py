"""Answers to questions that depend on weights, kept with the graph so that it can be rebuilt with other weights."""

from torch import nn

_KEPT = "bitwright_answers"  # in the __dict__ of a captured graph


def answers_of(model: nn.Module) -> dict[str, bool]:
    """The answers given when the graph was rewritten, by question; a schedule looks here first, and adds its own."""
    return model.__dict__.setdefault(_KEPT, {})
