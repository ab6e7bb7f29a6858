"""HiSilicon's NNIE: 8 bits on a logarithmic grid, one scale per tensor."""

from bitwright.backends.files import register_backend
from bitwright.backends.tensorrt import TENSORRT

_TENSORS = {"spec": "int8 symmetric tensor", "method": "NNIEFakeQuantize"}

NNIE = register_backend(
    TENSORRT.with_(
        name="nnie",
        title="HiSilicon NNIE (logarithmic)",
        weights={**_TENSORS, "formats": ("int8",), "granularities": ("tensor",)},
        activations=_TENSORS,
        operators={"absorbed": {}},
        formats=("nnie", "onnx"),
        constraints=("nnie-*",),
        runtimes=(),
        notes=("ONNX has no logarithmic grid: a Q/DQ file holds tables of the levels instead, and computes in float.",),
    )
)
