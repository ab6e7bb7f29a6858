"""Xilinx Vitis AI (DPU): symmetric int8 in steps that are powers of two; results are quantized, not inputs."""

from bitwright.backends.base import Backend
from bitwright.backends.files import register_backend
from bitwright.backends.words import RELUS, average_pools, convolutions
from bitwright.spec import QuantSpec

VITIS = register_backend()(
    Backend(
        name="vitis",
        title="Xilinx Vitis AI (DPU)",
        weight=QuantSpec.parse("int8 symmetric pot tensor"),
        activation=QuantSpec.parse("int8 symmetric pot tensor"),
        integer=dict.fromkeys(
            (
                *convolutions((2,)),
                "linear",
                *average_pools((2,)),
                "batch_norm",
                "relu",
                "prelu",
                "interpolate",
                "add",
                "mul",
                "cat",
            ),
            "outputs",
        ),
        fused=RELUS,
        unfused=frozenset({"add", "mul", "cat"}),
        numbers=frozenset({"add", "mul"}),
        integer_bias=False,
        weight_formats=frozenset({"int8"}),
        activation_formats=frozenset({"int8"}),
        weight_grains=frozenset({"tensor"}),
        activation_schemes=frozenset({"symmetric"}),
        power_of_two=True,
        observer="PoTModeObserver",
        weight_observer="MinMaxFloorObserver",
        method="TqtFakeQuantize",
        notes=("The network's own input has no quantizer: only results have one.",),
    )
)
