"""Which nodes only compute a result from their inputs: they draw no random numbers and check nothing."""

from torch import fx, nn

from bitwright.graph.build import has_hooks, module_of
from bitwright.graph.capture.tracer import store
from bitwright.graph.effects import is_pure, writes
from bitwright.graph.facts import facts

_RANDOM = ("rand", "normal", "bernoulli", "multinomial", "dropout", "gumbel", "poisson", "rrelu", "seed", "assert")
_WITH_STATE = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.RReLU, nn.RNNBase),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def only_computes(node: fx.Node, model: nn.Module) -> bool:
    """Whether a node could be left out if nobody read its result, now and in training; in doubt it could not."""
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
    """The attributes that a graph writes into, itself or through a view, or that belong to a module it calls."""
    found: set[str] = set()
    seen: set[fx.Node] = set()
    for node in model.graph.nodes:
        if node.op == "call_module":
            buffers = model.get_submodule(str(node.target)).named_buffers()
            found.update(f"{node.target}.{name}" for name, _ in buffers)
        if facts(node).written or node.target is store or writes(node, model):
            before = node
            while isinstance(before, fx.Node) and before not in seen:
                seen.add(before)
                before = before.args[0] if before.args else None
    return found | {str(n.target) for n in seen if n.op == "get_attr"}
