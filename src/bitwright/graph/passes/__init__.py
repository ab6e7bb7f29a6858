"""Passes: the schedules that ship with Bitwright, by stage, and what they share."""
