"""Sites: the places where a model quantizes a tensor, marked so that a file can say which tensor is which.

Names do not survive an exporter's rewriting, an argument of an operator does: the deployed model passes each quantized
tensor through ``bitwright::mark(x, site)``, which a format translates into its record and leaves out of the file.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from bitwright.numerics.kernel_operator import LIBRARY

LIBRARY.define("mark(Tensor x, int site) -> Tensor")

mark = torch.ops.bitwright.mark


def _mark(x: Tensor, site: int) -> Tensor:
    return x.clone()


LIBRARY.impl("mark", _mark, "CompositeExplicitAutograd")


@torch.library.register_fake("bitwright::mark", lib=LIBRARY)
def _(x: Tensor, site: int) -> Tensor:
    return torch.empty_like(x)


@dataclass(frozen=True)
class Site:
    """One place where a tensor is quantized.

    Attributes:
        quantizer: the qualified name of the quantizer in the model.
        name: what users call the tensor: the node, layer or input that it is the value of.
        kind: whether it is computed, or a weight that is stored.
        spec: how it is quantized, as text.
        signed: whether its integers are.
        placed: whether it stands in a graph, so that each run of the model must pass it.
    """

    quantizer: str
    name: str
    kind: Literal["activation", "weight"]
    spec: str
    signed: bool
    placed: bool = False


@dataclass(frozen=True)
class Origin:
    """What a part of the deployed model stands for: the user's module or node, and Bitwright's name of its operator."""

    name: str
    operator: str = ""


@dataclass
class Origins:
    """Where the parts of a deployed model come from.

    Attributes:
        sites: the places of quantizers; ``mark`` speaks of them by their position here.
        calls: an Origin by the qualified name of a module in the deployed model.
    """

    sites: list[Site] = field(default_factory=list)
    calls: dict[str, Origin] = field(default_factory=dict)

    def add(self, site: Site) -> int:
        """Enter a site and return its number."""
        self.sites.append(site)
        return len(self.sites) - 1
