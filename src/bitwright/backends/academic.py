"""The setting of most papers: convolutions and linear layers in bits of your choice, BatchNorm apart, ends in 8."""

from bitwright.backends.base import Backend
from bitwright.backends.files import register_backend
from bitwright.backends.words import LEARNED, MOVING_RANGE, convolutions

ACADEMIC = register_backend()(
    Backend(
        name="academic",
        title="as in papers: you choose the specs, first and last layers have 8 bits",
        weight=None,
        activation=None,
        integer=dict.fromkeys((*convolutions(), "linear"), "inputs"),
        reasons={"batch_norm": "it is kept as it is, not multiplied into weights"},
        ends=8,
        folds_norms=False,
        integer_bias=False,
        weight_grains=frozenset({"tensor", "channel", "group"}),
        activation_grains=frozenset({"tensor", "channel", "group"}),
        weight_schemes=frozenset({"symmetric", "affine"}),
        observer=MOVING_RANGE,
        method=LEARNED,
        notes=("It simulates: no hardware is meant, and what is exported may run nowhere in integers.",),
    )
)
