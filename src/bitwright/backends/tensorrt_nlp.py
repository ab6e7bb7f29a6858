"""NVIDIA TensorRT for transformers: linear layers, matrix products and residual sums."""

from torch import fx

from bitwright.backends.files import register_backend
from bitwright.backends.tensorrt import TENSORRT
from bitwright.graph.names import module_of
from bitwright.nn.operators import operator_of_module, operator_of_source


def _adds_embeddings(node: fx.Node) -> str | None:
    """Sums of embeddings are the input of a network: they stay float."""
    return "an embedding goes in" if any(_is_embedding(source) for source in node.all_input_nodes) else None


def _is_embedding(node: fx.Node) -> bool:
    module = module_of(node, node.graph.owning_module) if node.graph.owning_module is not None else None
    operator = operator_of_module(module) if module is not None else operator_of_source(node.target)  # pyrefly: ignore
    return operator is not None and operator.name == "embedding"


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
