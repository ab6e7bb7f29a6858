"""The setting of papers on transformers: linear layers and matrix products with the bits you choose."""

from bitwright.backends.academic import ACADEMIC
from bitwright.backends.files import register_backend

ACADEMIC_NLP = register_backend(
    ACADEMIC.with_(
        name="academic_nlp",
        title="as in papers on transformers: you choose the specs, for linear layers and matrix products",
        first_last_bits=None,
        operators={"integer": dict.fromkeys(("linear", "matmul"), "inputs"), "split_attention": True},
    )
)
