"""Which calls only compute a result: they write nothing, draw no random numbers and check nothing."""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from bitwright.graph.build import has_hooks
from bitwright.graph.proxy import IN_PLACE_OPERATORS, set_item

_HOMES = {"torch", "torch.nn.functional", "math", "operator", "_operator", "builtins", "torch._C._nn"}
_WITH_EFFECT = {setattr, delattr, print, exec, eval, next, iter, operator.setitem, operator.delitem, set_item}
_CONTAINERS = (int, float, bool, tuple, list, slice)
_RANDOM = ("rand", "normal", "bernoulli", "multinomial", "dropout", "gumbel", "poisson", "rrelu", "seed", "assert")
_WITH_STATE = (nn.modules.batchnorm._NormBase, nn.RReLU, nn.modules.dropout._DropoutNd, nn.RNNBase)


def only_computes(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a node could be left out if nobody read its result; in doubt it could not."""
    if node.op == "get_attr":
        return True
    if node.meta.get("written") or writes_in_place(node, modules):
        return False
    if node.op == "call_method":
        return not _has_effect(str(node.target))
    if node.op == "call_module":
        module = modules[str(node.target)]
        own = type(module).__module__.startswith("torch.nn.modules")
        return own and not has_hooks(module) and not isinstance(module, _WITH_STATE)
    return node.op == "call_function" and _is_pure_function(node.target)


def writes_in_place(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether a node writes into a tensor that goes in."""
    if node.op == "call_module":
        return getattr(modules[str(node.target)], "inplace", False) is True
    if node.op == "call_method":
        return _ends_in_one_underscore(str(node.target)) or node.target == "__setitem__"
    if node.op != "call_function":
        return False
    function: Any = node.target
    if function in IN_PLACE_OPERATORS or function in (set_item, operator.setitem):
        return True
    told = node.kwargs.get("inplace") is True or node.kwargs.get("out") is not None
    return told or _ends_in_one_underscore(getattr(function, "__name__", ""))


def _is_pure_function(function: Any) -> bool:
    if function in _WITH_EFFECT:
        return False
    if isinstance(function, type):
        return function in _CONTAINERS
    name = getattr(function, "__name__", "")
    home = getattr(function, "__module__", None) or "torch"
    known = home in _HOMES or getattr(torch, name, None) is function or getattr(F, name, None) is function
    return known and not _has_effect(name)


def _has_effect(name: str) -> bool:
    return _ends_in_one_underscore(name) or name in ("backward", "register_hook") or any(w in name for w in _RANDOM)


def _ends_in_one_underscore(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")
