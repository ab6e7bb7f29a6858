"""Capture: from a model and example inputs to a graph of its operations."""
