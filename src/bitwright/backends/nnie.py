"""HiSilicon's NNIE: 8 bits on a logarithmic grid, one scale per tensor."""

from dataclasses import replace

from bitwright.backends.files import register_backend
from bitwright.backends.tensorrt import TENSORRT
from bitwright.spec import QuantSpec

NNIE = register_backend()(
    replace(
        TENSORRT,
        name="nnie",
        title="HiSilicon NNIE (logarithmic)",
        weight=QuantSpec.parse("int8 symmetric tensor"),
        activation=QuantSpec.parse("int8 symmetric tensor"),
        weight_formats=frozenset({"int8"}),
        weight_grains=frozenset({"tensor"}),
        integer_bias=False,
        runtimes=(),
        method="NNIEFakeQuantize",
        notes=("ONNX has no logarithmic grid: models are trained and evaluated here, and not exported.",),
    )
)
