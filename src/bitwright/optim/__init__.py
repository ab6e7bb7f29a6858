"""Helpers for training quantized models."""
