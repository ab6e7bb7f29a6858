"""OpenPPL with weights of 8 bits and activations of 16, affine, one scale per tensor."""

from bitwright.backends.files import register_backend
from bitwright.backends.snpe import SNPE

PPLW8A16 = register_backend(
    SNPE.with_(
        name="pplw8a16",
        title="OpenPPL, weights of 8 bits and activations of 16",
        formats=("ppl", "onnx"),
        constraints=("ppl-*", "pplw8a16-*"),
        weights={"formats": ("uint8",)},
        activations={"spec": "uint16 affine tensor", "formats": ("uint16",)},
        notes=("A bias stays float: in steps of input scale times weight scale, int32 would overflow.",),
    )
)
