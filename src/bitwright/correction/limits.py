"""Limits: factors move past a ReLU6 that gets a limit for each channel.

    min(max(x, 0), 6) / s  =  min(max(x / s, 0), 6 / s)

No runtime limits channels separately in its integer kernels. The factors are therefore bounded, such that no channel's
largest value exceeds any channel's limit: a quantizer with the range of these values saturates within all limits, and
files need none of them.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx, nn

from bitwright.graph.names import add_internal, module_of, put_submodule
from bitwright.graph.walks import calls_of_modules, first_input, operator_called
from bitwright.nn.channel_limit import ChannelLimit
from bitwright.quantizer import TensorQuantizer, saturates
from bitwright.torch_internals import has_hooks

_KIND = "limits"  # in a model's namespace


def is_limited(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether a call is a ReLU with an upper limit, which may differ among channels."""
    if isinstance(module, ChannelLimit):
        return True
    kind = operator_called(node, module)
    low, high = (None, None) if kind is None else kind.limits_of(node, module) or (None, None)
    return low == 0.0 and high is not None and high > 0.0 and not (module is not None and has_hooks(module))


class Limit:
    """A limited ReLU between the source and the readers of a link.

    Attributes:
        module: what the node calls now.
        fill: the largest value seen in each channel, as a share of its limit; factors do not change it.
    """

    def __init__(self, model: fx.GraphModule, node: fx.Node, channels: int, axis: int) -> None:
        self.model, self.node = model, node
        self.before = node.op, node.target, node.args, node.kwargs
        module: Any = module_of(node, model)
        self.is_new = not isinstance(module, ChannelLimit)
        if self.is_new:
            kind: Any = operator_called(node, module)
            limit = kind.limits_of(node, module)[1]
            like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
            high = torch.full((channels, *[1] * (-axis - 1)), limit, dtype=like.dtype, device=like.device)
            module = put_limit(model, node, add_internal(model, _KIND, node.name, nn.Identity()), high)
        self.module: ChannelLimit = module
        self.fill = torch.zeros_like(self.module.high)

    @property
    def name(self) -> str:
        """The name of the tensor that holds the limits."""
        return f"{self.node.target}.high"

    def see(self, _module: nn.Module, _args: object, result: Tensor) -> None:
        """Look at the values of all channels: a hook."""
        first = result.detach().movedim(-self.fill.ndim, 0)
        most = first.reshape(len(first), -1).amax(1)
        self.fill = torch.maximum(self.fill, most.reshape(self.fill.shape) / self.module.high)

    def bounded(self, factor: Tensor) -> Tensor:
        """The factor, larger where a channel's largest value would exceed some channel's limit."""
        high = self.module.high.flatten()
        return torch.maximum(factor, self.fill.flatten() * high / (high / factor).min())

    def covered(self, quantizers: Iterable[TensorQuantizer]) -> bool:
        """Whether quantizers saturate within all limits."""
        return all(saturates(q, (None, self.module.lowest)) for q in quantizers if q.quantizes)

    def put_back(self) -> None:
        """Let the node call what it did before."""
        home, _, name = str(self.node.target).rpartition(".")
        owner = self.model.get_submodule(home)
        delattr(owner, name)
        if not owner._modules:
            delattr(self.model.get_submodule(home.removesuffix(f".{_KIND}")), _KIND)
        self.node.op, self.node.target, self.node.args, self.node.kwargs = self.before
        self.model.recompile()


def put_limit(model: fx.GraphModule, node: fx.Node, path: str, high: Tensor) -> ChannelLimit:
    """Let a node call a module at that path, which limits each channel."""
    module = ChannelLimit(high)
    put_submodule(model, path, module)
    node.op, node.target, node.args, node.kwargs = "call_module", path, (first_input(node),), {}
    model.recompile()
    return module


def limits_in(model: nn.Module) -> dict[str, str]:
    """The paths of modules that limit each channel, and the names of the nodes that call them."""
    calls = calls_of_modules(model) if isinstance(model, fx.GraphModule) else {}
    return {path: calls[m][0].name for path, m in model.named_modules() if isinstance(m, ChannelLimit)}


def restore_limits(model: nn.Module, limits: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Limit the channels of a model that was prepared again as before."""
    nodes = {n.name: n for n in model.graph.nodes} if isinstance(model, fx.GraphModule) else {}
    for path, name in limits.items():
        put_limit(model, nodes[name], path, tensors[f"{path}.high"].clone())  # pyrefly: ignore


def fill_limits(limits: Iterable[Limit], run: Callable[[], object]) -> None:
    """Find out how much of their limits the channels reach in float."""
    with ExitStack() as undo:
        for limit in limits:
            undo.callback(limit.module.register_forward_hook(limit.see).remove)
        run()
