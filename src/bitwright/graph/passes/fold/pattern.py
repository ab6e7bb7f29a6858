"""FoldPattern: what schedules that fold something into a layer know about the model, and how they note refusals."""

from functools import cached_property

from torch import fx, nn

from bitwright.graph.effects import written_attributes
from bitwright.graph.rewriting.replace import ReplacePatternBase
from bitwright.graph.walks import calls_of_modules
from bitwright.nn.channels import LAYERS
from bitwright.nn.layer import QuantLayer


class FoldPattern(ReplacePatternBase):
    """A rewrite that folds one node into a layer; reasons name both, as in "mul into conv1, conv1 has 2 users"."""

    done = "folded"

    def begin(self, model: fx.GraphModule) -> None:
        """Remember the model, to look at it once something could be folded."""
        self.model = model
        self.__dict__.pop("calls", None), self.__dict__.pop("written", None)

    @cached_property
    def calls(self) -> dict[nn.Module, list[fx.Node]]:
        """The calls of each module."""
        return calls_of_modules(self.model)

    @cached_property
    def written(self) -> set[str]:
        """The tensors that the model writes into."""
        return written_attributes(self.model)

    def near_miss(self, node: fx.Node, reason: str) -> None:
        self.note(f"not folded: {reason}")


def is_layer(module: object) -> bool:
    """Whether a module is a quantized layer that something can be folded into."""
    return isinstance(module, QuantLayer) and isinstance(module, LAYERS)
