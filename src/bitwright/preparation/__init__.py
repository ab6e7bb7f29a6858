"""Preparation: from a float model to one that can be calibrated, trained and exported for a backend."""

from bitwright.preparation.ledger import Entry, Ledger, Verdict, ledger_of
from bitwright.preparation.pipeline import check_wishes, prepare
from bitwright.preparation.planning import Plan, plan

__all__ = ["Entry", "Ledger", "Plan", "Verdict", "check_wishes", "ledger_of", "plan", "prepare"]
