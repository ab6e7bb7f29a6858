"""Plain Q/DQ ONNX, symmetric int8: for any program that reads QuantizeLinear and DequantizeLinear."""

from bitwright.backends.files import register_backend
from bitwright.backends.tensorrt import TENSORRT

QDQ = register_backend(
    TENSORRT.with_(
        name="qdq",
        title="any reader of Q/DQ ONNX, symmetric int8",
        integer_bias=True,
        operators={"absorbed": {}},
        formats=("onnx",),
        constraints=(),
        notes=("Nothing is assumed of the reader but QuantizeLinear and DequantizeLinear; onnxruntime is one.",),
    )
)
