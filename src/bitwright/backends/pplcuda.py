"""OpenPPL on NVIDIA GPUs: affine uint8, weights per channel."""

from dataclasses import replace

from bitwright.backends.files import register_backend
from bitwright.backends.snpe import SNPE
from bitwright.spec import QuantSpec

PPLCUDA = register_backend()(
    replace(
        SNPE,
        name="pplcuda",
        title="OpenPPL on NVIDIA GPUs",
        weight=QuantSpec.parse("uint8 affine channel:0"),
        weight_grains=frozenset({"tensor", "channel"}),
        observer="MinMaxObserver",
    )
)
