"""Backends: what targets really do, one file each. A new one is one file with ``register_backend``."""

from bitwright.backends.base import BACKENDS, Backend, register_backend
from bitwright.backends.onnxruntime import ONNXRUNTIME
from bitwright.backends.openvino import OPENVINO

__all__ = ["BACKENDS", "ONNXRUNTIME", "OPENVINO", "Backend", "register_backend"]
