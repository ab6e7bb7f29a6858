"""Which nodes only compute a result from their inputs: they draw no random numbers and check nothing."""

from torch import fx, nn

from bitwright.graph.build import module_of
from bitwright.graph.capture.tracer import store
from bitwright.graph.effects import is_pure, writes
from bitwright.graph.facts import facts
from bitwright.graph.names import attribute_of
from bitwright.graph.walks import back_through
from bitwright.torch_internals import has_hooks

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
    """The attributes that a graph reads and writes into, itself or by calling the module that has them."""
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
