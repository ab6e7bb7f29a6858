"""Side effects of nodes: whether one writes into its input, draws random numbers, or can be left out."""

import functools
import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from bitwright.graph.capture.guards import is_guard
from bitwright.graph.capture.proxy import IN_PLACE_OPERATORS, set_item
from bitwright.graph.capture.tracer import store
from bitwright.graph.facts import facts, has_facts
from bitwright.graph.match.find import is_in_graph
from bitwright.graph.names import attribute_of, module_of
from bitwright.graph.walks import back_through, first_input
from bitwright.torch_internals import has_hooks

WRITERS = {*IN_PLACE_OPERATORS, set_item, operator.delitem}
# Methods of containers that change nothing; methods of other objects may do anything.
_READERS = {"get", "keys", "values", "items", "copy", "count", "index"}
# Functions from here do nothing but return a value, unless they write.
_HOMES = ("torch", "_operator", "operator", "math", "builtins", "bitwright")
_EFFECTS = (print, input, open, setattr, delattr, store)
_RANDOM = ("rand", "normal", "bernoulli", "multinomial", "dropout", "gumbel", "poisson", "rrelu", "seed", "assert")
_WITH_STATE = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.RReLU, nn.RNNBase),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def writes(node: fx.Node, model: nn.Module) -> bool:
    """Whether a node writes into its input."""
    if node.op == "call_module":
        return getattr(module_of(node, model), "inplace", False) is True
    if node.op == "call_method":
        return ends_in_one_underscore(str(node.target))
    if node.op != "call_function":
        return False
    return node.target in WRITERS or twin(node.target) is not None or inplace_argument(node) is not None


def twin(function: object) -> Callable[..., Any] | None:
    """``torch.relu`` for ``torch.relu_``."""
    name = getattr(function, "__name__", "")
    if not ends_in_one_underscore(name):
        return None
    for home in (F, torch):
        if getattr(home, name, None) is function:
            return getattr(home, name[:-1], None)
    return None


def inplace_argument(node: fx.Node) -> str | int | None:
    """The keyword or position that tells a function to work in place, if any."""
    if node.kwargs.get("inplace") is True:
        return "inplace"
    if getattr(node.target, "__module__", None) != "torch.nn.functional" or not callable(node.target):
        return None
    position = _inplace_position(node.target)
    return position if position is not None and node.args[position : position + 1] == (True,) else None


@functools.cache
def _inplace_position(function: Callable[..., Any]) -> int | None:
    names = list(inspect.signature(function).parameters)
    return names.index("inplace") if "inplace" in names else None


def ends_in_one_underscore(name: str) -> bool:
    """Whether a name is that of an in-place operation."""
    return name.endswith("_") and not name.endswith("__")


def has_effect(node: fx.Node, model: nn.Module) -> bool:
    """Whether a node is known to do more than return a value, or is an input or output of the graph."""
    if node.op in ("placeholder", "output") or node.kwargs.get("out") is not None or is_guard(node):
        return True
    return node.target in _EFFECTS or _may_change_object(node) or writes(node, model)


def _may_change_object(node: fx.Node) -> bool:
    """Whether a node calls a method of a container or another object, which may change it."""
    owner = first_input(node) if node.op == "call_method" and node.target not in _READERS else None
    return owner is not None and has_facts(owner) and facts(owner).tensor is None and not facts(owner).plain


def is_pure(node: fx.Node, model: nn.Module) -> bool:
    """Whether a node without users can certainly be removed without anybody noticing."""
    if has_effect(node, model):
        return False
    if node.op == "call_module":
        return _is_from(type(model.get_submodule(str(node.target))), ("torch.nn", "bitwright"))
    return node.op != "call_function" or _is_from(node.target, _HOMES)


def only_computes(node: fx.Node, model: nn.Module) -> bool:
    """Whether a node can be removed if nothing reads its result, now and in training; if in doubt, no."""
    if node.op == "get_attr":
        return True
    if facts(node).written or not is_pure(node, model):
        return False
    module = module_of(node, model)
    if module is not None:
        own = type(module).__module__.startswith("torch.nn.modules")
        return own and not has_hooks(module) and not isinstance(module, _WITH_STATE)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return not any(word in name for word in _RANDOM)


def written_attributes(model: fx.GraphModule) -> set[str]:
    """The attributes that a graph reads and writes into, directly or by calling the module that owns them."""
    called = {str(node.target) for node in model.graph.nodes if node.op == "call_module"}
    found: set[str] = set()
    for node in model.graph.nodes:
        if node.op == "get_attr" and _is_buffer_of(str(node.target), called, model):
            found.add(str(node.target))
        elif facts(node).written or node.target is store or writes(node, model):
            *_, source = back_through(node, lambda _: True)
            found.update([str(source.target)] if source.op == "get_attr" else [])
    return found


def _is_buffer_of(target: str, called: set[str], model: nn.Module) -> bool:
    """Whether a buffer belongs to one of the modules that are called, which may write into it."""
    parts = target.split(".")
    within = any(".".join(parts[:i]) in called for i in range(1, len(parts)))
    return within and not isinstance(attribute_of(model, target), nn.Parameter)


def remove_unused(model: fx.GraphModule, nodes: Iterable[fx.Node], *, replaced: Iterable[fx.Node] = ()) -> None:
    """Erase those of ``nodes`` that nothing reads or needs, then those that only these read, and so on.

    Nodes in ``replaced`` have a substitute, so only a known effect keeps them.
    """
    known, waiting = set(replaced), list(nodes)
    while waiting:
        node = waiting.pop()
        if not is_in_graph(node) or node.users:
            continue
        if is_pure(node, model) or (node in known and not has_effect(node, model)):
            before = node.all_input_nodes
            model.graph.erase_node(node)
            waiting += before


def _is_from(thing: object, homes: tuple[str, ...]) -> bool:
    home = getattr(thing, "__module__", None) or type(thing).__module__
    return any(home == h or home.startswith(h + ".") for h in homes)
