"""The setting of most papers: convolutions and linear layers in the bits you choose, BatchNorm apart, ends in 8."""

from bitwright.backends.base import Backend
from bitwright.backends.files import register_backend
from bitwright.backends.words import CONVOLUTIONS, LEARNED, MOVING_RANGE

_ANYTHING = {"granularities": ("tensor", "channel", "group"), "schemes": ("symmetric", "affine"), "method": LEARNED}

ACADEMIC = register_backend(
    Backend.of(
        name="academic",
        title="as in papers: you choose the specs, first and last layers have 8 bits",
        weights=_ANYTHING,
        activations={**_ANYTHING, "observer": MOVING_RANGE},
        integer_bias=False,
        first_last_bits=8,
        operators={
            "integer": dict.fromkeys((*CONVOLUTIONS, "linear"), "inputs"),
            "reasons": {"batch_norm": "it is kept as it is, not multiplied into weights"},
        },
        folding={"batchnorm": False},
        notes=("It simulates: no hardware is meant, and what is exported may run nowhere in integers.",),
    )
)
