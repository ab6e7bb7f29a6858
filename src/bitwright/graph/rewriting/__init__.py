"""Rewriting: schedules, their order, and the engine that runs their patterns."""
