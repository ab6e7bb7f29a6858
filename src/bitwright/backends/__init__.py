"""Backends: what targets really do, one file each. A new one is one file with ``register_backend``, or a YAML file."""

from bitwright.backends.academic import ACADEMIC
from bitwright.backends.academic_nlp import ACADEMIC_NLP
from bitwright.backends.base import Backend
from bitwright.backends.files import BACKENDS, find_backend, load_backend, register_backend
from bitwright.backends.nnie import NNIE
from bitwright.backends.onnx_qnn import ONNX_QNN
from bitwright.backends.onnxruntime import ONNXRUNTIME
from bitwright.backends.openvino import OPENVINO
from bitwright.backends.pplcuda import PPLCUDA
from bitwright.backends.pplw8a16 import PPLW8A16
from bitwright.backends.qdq import QDQ
from bitwright.backends.snpe import SNPE
from bitwright.backends.stpu import STPU
from bitwright.backends.tengine_u8 import TENGINE_U8
from bitwright.backends.tensorrt import TENSORRT
from bitwright.backends.tensorrt_nlp import TENSORRT_NLP
from bitwright.backends.virtual import VIRTUAL
from bitwright.backends.vitis import VITIS

__all__ = [
    "ACADEMIC",
    "ACADEMIC_NLP",
    "BACKENDS",
    "NNIE",
    "ONNXRUNTIME",
    "ONNX_QNN",
    "OPENVINO",
    "PPLCUDA",
    "PPLW8A16",
    "QDQ",
    "SNPE",
    "STPU",
    "TENGINE_U8",
    "TENSORRT",
    "TENSORRT_NLP",
    "VIRTUAL",
    "VITIS",
    "Backend",
    "find_backend",
    "load_backend",
    "register_backend",
]
