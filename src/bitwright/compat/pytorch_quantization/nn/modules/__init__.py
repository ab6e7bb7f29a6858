"""Quantized modules, one file for each kind as the old toolkit had it."""
