"""OpenPPL with weights of 8 bits and activations of 16, affine, one scale per tensor."""

from dataclasses import replace

from bitwright.backends.files import register_backend
from bitwright.backends.snpe import SNPE
from bitwright.spec import QuantSpec

PPLW8A16 = register_backend()(
    replace(
        SNPE,
        name="pplw8a16",
        title="OpenPPL, weights of 8 bits and activations of 16",
        activation=QuantSpec.parse("uint16 affine tensor"),
        activation_formats=frozenset({"uint16"}),
        notes=("A bias stays float: in steps of input scale times weight scale, int32 would overflow.",),
    )
)
