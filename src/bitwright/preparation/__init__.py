"""Preparation: from a float model to one that can be calibrated, trained and exported for a backend."""

from bitwright.preparation.decisions import Decision, Verdict, decision_on, decisions_of
from bitwright.preparation.ledger import Entry, Ledger, ledger_of
from bitwright.preparation.pipeline import prepare
from bitwright.preparation.planning import plan
from bitwright.preparation.resolve import resolve_recipe

__all__ = [
    "Decision",
    "Entry",
    "Ledger",
    "Verdict",
    "decision_on",
    "decisions_of",
    "ledger_of",
    "plan",
    "prepare",
    "resolve_recipe",
]
