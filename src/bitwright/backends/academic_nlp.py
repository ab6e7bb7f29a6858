"""The setting of papers on transformers: linear layers and matrix products with the bits you choose."""

from dataclasses import replace

from bitwright.backends.academic import ACADEMIC
from bitwright.backends.files import register_backend

ACADEMIC_NLP = register_backend()(
    replace(
        ACADEMIC,
        name="academic_nlp",
        title="as in papers on transformers: you choose the specs, for linear layers and matrix products",
        integer=dict.fromkeys(("linear", "matmul"), "inputs"),
        ends=None,
        splits_attention=True,
    )
)
