"""Shared by the schedules that fold: notes on refusals, arithmetic with constants, and channel shuffles."""
