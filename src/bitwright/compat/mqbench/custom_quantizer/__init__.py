"""Model quantizers, which say what a target quantizes: in Bitwright that is a backend, as data."""

from bitwright.compat.refused import refuse

_KINDS = (
    *("Academic", "AcademicNLP", "Model", "ONNXQNN", "OPENVINO", "TRTModel", "TengineU8", "TensorrtNLP", "TotalINT"),
    "Vitis",
)
_INSTEAD = "write a backend (docs/how-to/custom-backend.md), or say what is quantized in extra_quantizer_dict"
__getattr__ = refuse(__name__, {f"{kind}Quantizer": _INSTEAD for kind in _KINDS})
