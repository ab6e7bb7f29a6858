"""OpenPPL on NVIDIA GPUs: affine uint8, weights per channel."""

from bitwright.backends.files import register_backend
from bitwright.backends.snpe import SNPE

PPLCUDA = register_backend(
    SNPE.with_(
        name="pplcuda",
        title="OpenPPL on NVIDIA GPUs",
        formats=("ppl", "onnx"),
        constraints=("ppl-*", "pplcuda-*"),
        weights={"spec": "uint8 affine channel:0", "formats": ("uint8",), "granularities": ("tensor", "channel")},
        activations={"observer": "MinMaxObserver"},
    )
)
