"""NVIDIA TensorRT for transformers: linear layers, matrix products and residual sums."""

from torch import fx

from bitwright.backends.files import register_backend
from bitwright.backends.tensorrt import TENSORRT
from bitwright.graph.facts import facts


def _adds_embeddings(node: fx.Node) -> str | None:
    """Sums of embeddings are the input of a network: they stay float."""
    fed = any(facts(source).operator == "embedding" for source in node.all_input_nodes)
    return "an embedding goes in" if fed else None


TENSORRT_NLP = register_backend(
    TENSORRT.with_(
        name="tensorrt_nlp",
        title="NVIDIA TensorRT for transformers (Q/DQ ONNX)",
        operators={
            "integer": dict.fromkeys(("linear", "matmul", "add"), "inputs"),
            "conditions": {"add": _adds_embeddings},
            "merged": {"add": ("mul", "div")},  # an attention mask is added to scaled scores
            "numbers": (),
            "reasons": {},
            "split_attention": True,
        },
    )
)
