"""Fold a BatchNorm, or sums and products with constants, into the layer after them:  linear(bn(x))  ->  linear'(x).

With the map of each input channel written as  x·c + d:

    w' = w · c,   b' = b + Σ w · d

That is exact only if every output sees the shift in the same way. So a shift goes into linear layers and into
convolutions that pad with nothing or with their own values, not into those that pad with zeros (the padding would be
shifted too) or that are transposed; a factor alone goes into all of them. The layer computes the original form while
its weight is float, bit for bit.
"""

from collections import Counter

from torch import fx, nn

from bitwright.graph.build import argument, module_of, replace, shape_of
from bitwright.graph.fold.constants import ARITHMETIC, as_constant, read_constant, why_not_per_channel
from bitwright.graph.fold.input_norm import can_fold_input, fold_input, shift_stays_out
from bitwright.graph.fold.stand_in import NORMS, Affine, Step
from bitwright.graph.model import CapturedModel
from bitwright.graph.schedule import register_schedule
from bitwright.nn.functional import QuantFunction
from bitwright.nn.layer import QuantLayer


@register_schedule("fold_before", stage="fuse", after=("fold_batchnorm", "fold_scale"))
def fold_before(model: CapturedModel) -> list[str]:
    """Fold what stands before a layer, the nearest first, and say why what could not be stays."""
    calls = Counter(str(n.target) for n in model.graph.nodes if n.op == "call_module")
    notes = []
    for node in list(model.graph.nodes):
        layer = module_of(node, model)
        if not isinstance(layer, QuantLayer) or isinstance(layer, QuantFunction):
            continue
        while isinstance(before := argument(node, 0, "input"), fx.Node):
            norm, found = module_of(before, model), read_constant(before)
            if not isinstance(norm, NORMS) and found is None:
                break
            name = str(before.target) if norm is not None else before.name
            reason = _why_not(node, layer, before, norm, found, calls)
            if reason:
                notes.append(f"not folded: {name} into {node.target}, {reason}")
                break
            tensor = argument(before, 0, "input") if found is None else found[0]
            _fold(model, layer, norm, before, found)
            replace(before, tensor)
            notes.append(f"folded {name} into {node.target} after it")
    return notes


def _why_not(
    node: fx.Node,
    layer: QuantLayer,
    before: fx.Node,
    norm: nn.Module | None,
    found: tuple[fx.Node, object, bool] | None,
    calls: Counter[str],
) -> str | None:
    if calls[str(node.target)] > 1 or (norm is not None and calls[str(before.target)] > 1):
        return "it or the layer after it is called more than once"
    if len(before.users) > 1:
        return f"it has {len(before.users)} users"
    if before.meta.get("written") or node.meta.get("written"):
        return "it shares memory with a tensor that is written to in place"
    if not can_fold_input(layer):
        return f"{type(layer).__name__} is no layer of ours"
    axis = -1 if isinstance(layer, nn.Linear) else 1 - layer.weight.ndim
    if found is None:
        if norm is None or norm.running_mean is None:
            return "it has no running statistics"
        if len(shape_of(before) or ()) + axis != 1:
            return "it normalises another axis than the one the layer sums over"
        return shift_stays_out(layer)
    tensor, constant, first = found
    kind = ARITHMETIC[before.target].__name__
    if kind == "div" and first:
        return "it divides by the layer's input"
    if shape_of(before) != shape_of(tensor):
        return "the constant makes the result larger"
    return why_not_per_channel(constant, tensor, axis) or (shift_stays_out(layer) if kind in ("add", "sub") else None)


def _fold(
    model: CapturedModel,
    layer: QuantLayer,
    norm: nn.Module | None,
    before: fx.Node,
    found: tuple[fx.Node, object, bool] | None,
) -> None:
    if found is not None:
        axis = -1 if isinstance(layer, nn.Linear) else 1 - layer.weight.ndim
        channels = (shape_of(before) or ())[axis]
        norm = Affine(None, layer, channels)
        norm.add(Step(ARITHMETIC[before.target], as_constant(model, found[1]), found[2], axis))
    fold_input(layer, norm)  # pyrefly: ignore
