"""Small helpers by MQBench's names."""

import copy

import torch
from torch import Tensor, fx, nn

from bitwright.compat.refused import refuse
from bitwright.spec import QuantSpec


def deepcopy_graphmodule(gm: nn.Module) -> nn.Module:
    """A copy of a prepared model."""
    return copy.deepcopy(gm)


def deepcopy_mixedmodule(mm: nn.Module, module_list: object = None) -> nn.Module:
    """A copy of a model, parts of which are prepared."""
    return copy.deepcopy(mm)


def is_symmetric_quant(qscheme: QuantSpec | str) -> bool:
    """Whether a spec has no zero point."""
    return QuantSpec.parse(qscheme).symmetric


def pot_quantization(tensor: Tensor, mode: str = "round") -> Tensor:
    """The nearest powers of two, or those below with ``mode="floor"``; the gradient passes straight through."""
    log2 = torch.log2(tensor.detach())
    return (torch.exp2(torch.round(log2) if mode == "round" else torch.floor(log2)) - tensor.detach()) + tensor


def sync_tensor(tensor: Tensor) -> Tensor:
    """The mean over all processes, in place; without any others, the tensor."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        tensor.data /= torch.distributed.get_world_size()
        torch.distributed.all_reduce(tensor)
    return tensor


def topology_order(model: fx.GraphModule) -> dict[fx.Node, int]:
    """The position of every node of a graph in execution order."""
    return {node: place for place, node in enumerate(model.graph.nodes)}


__getattr__ = refuse(__name__, {"getitem2node": "a node's users and args say what reads its parts"})
