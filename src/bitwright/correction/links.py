"""Links: where a factor per channel can move from a tensor's producer to the layers that read it.

    layer(x)  with  x / s  produced by the source and  w·s  in every reader

The source is a layer (its folded BatchNorm, if it has one), a norm with a weight, or a product with a Parameter, such
as a norm that the model writes out. Between source and readers there are only quantizers, activations with f(s·x) =
s·f(x), pools, reshapes that leave channels in place, and at most one ReLU6 (see :mod:`limits`). In float the model
computes the same up to rounding; quantizers see channels whose ranges differ less.
"""

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn

from bitwright.correction.channel_maps import norm_place
from bitwright.correction.limits import Limit, is_limited
from bitwright.correction.outcome import Correction
from bitwright.correction.products import Product, product_at
from bitwright.graph.evaluate import call_target
from bitwright.graph.facts import facts, shape_of
from bitwright.graph.names import attribute_of, module_of, node_name
from bitwright.graph.walks import calls_of_modules, first_input, operator_called
from bitwright.nn.channels import (
    LAYERS,
    channel_axis,
    largest_per_input,
    largest_per_output,
    output_channels,
    per_input,
    per_output,
)
from bitwright.nn.fold import NORMS
from bitwright.nn.functional import QuantFunction
from bitwright.nn.layer import QuantLayer
from bitwright.quantizer import TensorQuantizer

DEVIATIONS = 3  # from its mean, which a BatchNorm's result rarely leaves
NORM_WEIGHTS = (*NORMS, nn.LayerNorm, nn.RMSNorm)


@dataclass(eq=False)
class Reader:
    """A layer that takes the factor into its weight, or a function with its weight argument."""

    name: str
    layer: Any
    weight: Tensor

    def largest(self) -> Tensor:
        """The largest magnitude among the weights of each input channel."""
        if isinstance(self.layer, QuantFunction):
            return self.weight.detach().abs().amax(0)
        return largest_per_input(_as_folded(self.layer))

    def multiply(self, factor: Tensor) -> None:
        """Multiply each input channel."""
        function = isinstance(self.layer, QuantFunction)
        self.weight *= factor if function else per_input(self.layer, factor)


@dataclass(eq=False)
class Link:
    """A source, its readers, and the quantizers between them.

    Attributes:
        name: source and readers.
        node: the call of the source.
        source: the layer, norm or product that divides by the factor.
        readers: the layers that multiply by it.
        quantizers: those in between, and those of weights that are arguments, which find their ranges from data.
        limited: the call of the ReLU6 in between, if there is one.
        limit: the same with a limit for each channel.
    """

    name: str
    node: fx.Node
    source: Any
    readers: list[Reader] = field(default_factory=list)
    quantizers: list[TensorQuantizer] = field(default_factory=list)
    limited: fx.Node | None = None
    limit: Limit | None = None

    @property
    def channels(self) -> int:
        """How many factors there are."""
        return output_channels(self.source) if isinstance(self.source, LAYERS) else self.source.weight.numel()

    @property
    def axis(self) -> int:
        """The axis of the tensor that has the channels, counted from the last as -1."""
        if isinstance(self.source, LAYERS):
            return channel_axis(self.source)
        return 1 - len(shape_of(self.node) or (0, 0)) if isinstance(self.source, NORMS) else -1

    @property
    def layers(self) -> list[Any]:
        """The layers whose weights change."""
        own = [self.source] if isinstance(self.source, QuantLayer) else []
        return [*own, *(r.layer for r in self.readers if not isinstance(r.layer, QuantFunction))]

    def parameters(self) -> list[Tensor]:
        """All parameters that change."""
        return [*self.own_parameters(), *(reader.weight for reader in self.readers)]

    def own_parameters(self) -> list[Tensor]:
        """The parameters that change in the source."""
        taker, _ = self._taker()
        return [p for p in (taker.weight, getattr(taker, "bias", None)) if p is not None]

    def largest(self) -> tuple[Tensor, Tensor]:
        """The largest weight of each channel in the source (of a BatchNorm, the result), and in the readers."""
        if isinstance(self.source, NORMS):
            return (DEVIATIONS * self.source.weight.abs() + self.source.bias.abs()).detach(), self.largest_read()
        return largest_per_output(_as_folded(self.source)), self.largest_read()

    def largest_read(self) -> Tensor:
        """The largest weight of each channel in the readers."""
        return torch.stack([reader.largest() for reader in self.readers]).amax(0)

    def bounded(self, factor: Tensor) -> Tensor:
        """The factor, as far as a limit on the way allows."""
        return factor if self.limit is None else self.limit.bounded(factor)

    @property
    def covered(self) -> bool:
        """Whether quantizers on the way make a limit superfluous, if there is one."""
        return self.limit is None or self.limit.covered(self.quantizers)

    def scale(self, factor: Tensor) -> None:
        """Divide by the factor in the source, and multiply by it in the readers."""
        with torch.no_grad():
            if self.limit is not None:
                self.limit.module.high /= factor.reshape(self.limit.module.high.shape)
            taker, place = self._taker()
            own = factor if place is None else place.of_norm(factor)
            taker.weight /= per_output(taker, own) if isinstance(taker, LAYERS) else own
            if getattr(taker, "bias", None) is not None:
                taker.bias /= own
            for reader in self.readers:
                reader.multiply(factor)

    def _taker(self) -> tuple[Any, Any]:
        """What divides: the source, or the norm folded into it, with its position."""
        place = norm_place(self.source) if isinstance(self.source, QuantLayer) else None
        return (self.source, None) if place is None else (place.norm, place)

    def why_unfit(self) -> str | None:
        """Why the source cannot divide, or a quantizer cannot follow."""
        weights = [m.weight_quantizer for m in self.layers] + [r.layer.weight_quantizer for r in self.readers]
        if any(getattr(q.method, "rounding", None) is not None for q in weights):
            return "a rounding was learned"
        if any(q.quantizes and not (q.calibratable or q.dynamic) for q in self.quantizers):
            return "a range on the way is fixed"
        if self.limited is not None and any(q.quantizes and q.dynamic for q in self.quantizers):
            return "a range after a ReLU6 is found as the model runs"
        folds = self.source.after if isinstance(self.source, QuantLayer) else ()
        taker, place = self._taker()
        if folds and (place is None or place.fold is not folds[-1]):
            return "something other than a BatchNorm is folded into the source"
        return None if isinstance(taker, LAYERS) else _why_no_divisor(taker)


def _why_no_divisor(norm: Any) -> str | None:  # noqa: ANN401
    """Why a norm cannot divide its result by a factor per channel."""
    if norm.weight is None:
        return "the norm has no weight to take the factor"
    if isinstance(norm, NORMS) and norm.bias is None:
        return "the norm has no bias to take the factor"
    return "the norm is over more than channels" if norm.weight.ndim != 1 else None


def _as_folded(layer: Any) -> SimpleNamespace:  # noqa: ANN401
    """A stand-in for a layer whose weight has all folds applied."""
    groups, transposed = getattr(layer, "groups", 1), getattr(layer, "transposed", False)
    return SimpleNamespace(weight=layer.folded_weight()[0].detach(), groups=groups, transposed=transposed)


class _Finder:
    """Finds the links of one graph."""

    def __init__(self, model: fx.GraphModule) -> None:
        self.model, self.calls = model, calls_of_modules(model)
        self.owners = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
        self.read = Counter(str(n.target) for n in model.graph.nodes if n.op == "get_attr" for _ in n.users)

    def follow(self, node: fx.Node, link: Link) -> str | None:
        """Collect readers and quantizers, or say why there is no link."""
        waiting = [node]
        while waiting:
            now = waiting.pop()
            for user in now.users:
                if facts(user).plain:
                    continue
                module = module_of(user, self.model)
                if isinstance(module, TensorQuantizer):
                    link.quantizers.append(module)
                elif isinstance(module, QuantLayer):
                    reader = self._reader(user, now, module)
                    if isinstance(reader, str):
                        return reader
                    link.readers.append(reader)
                    link.quantizers += [module.weight_quantizer] if isinstance(module, QuantFunction) else []
                    continue
                elif is_limited(user, module) and link.limited is None:
                    link.limited = user
                elif user.op == "output" or not self._passes(user, module, link.axis):
                    return f"{user.name} reads its result"
                waiting.append(user)
        return None if link.readers else "no quantized layer reads its result"

    def _reader(self, node: fx.Node, given: fx.Node, module: Any) -> Reader | str:  # noqa: ANN401
        name = node_name(node)
        if first_input(node) is not given or node.all_input_nodes.count(given) != 1 or len(self.calls[module]) != 1:
            return f"{name} is called more than once, or reads it twice"
        if isinstance(module, QuantFunction):
            return self._function(node, module)
        if module.before:
            return f"something is folded into {name} before it computes"
        if not isinstance(module, LAYERS):
            return f"{name} is not a linear layer or convolution"
        return Reader(name, module, module.weight)

    def _function(self, node: fx.Node, module: QuantFunction) -> Reader | str:
        source = node.args[1] if len(node.args) > 1 else None
        if module.function is not torch.nn.functional.linear or getattr(source, "op", "") != "get_attr":
            return f"{node.name} computes its weight"
        target = str(getattr(source, "target", ""))
        weight = attribute_of(self.model, target)
        if not isinstance(weight, nn.Parameter) or self.read[target] != 1:
            return f"{target} is read by something else"
        return Reader(target, module, weight)

    def _passes(self, node: fx.Node, module: object, axis: int) -> bool:
        kind = operator_called(node, module)
        if kind is None:
            return False
        if kind.pool:
            return kind.homogeneous and axis < -1
        if kind.homogeneous:
            return True
        return kind.rearranges and _keeps_channels(node, module, axis)

    def why_shared(self, link: Link) -> str | None:
        """Say what else uses a parameter that takes the factor."""
        if not isinstance(link.source, Product) and len(self.calls[link.source]) != 1:
            return "the source is called more than once"
        ids = [id(p) for p in link.parameters()]
        if len(set(ids)) < len(ids) or any(self.owners[i] != 1 for i in ids):
            return "parameters are shared"
        names = {id(p): n for n, p in self.model.named_parameters()}
        own = {id(r.weight) for r in link.readers if isinstance(r.layer, QuantFunction)}
        own |= {id(p) for p in link.own_parameters() if isinstance(link.source, Product)}
        if any(self.read[names.get(i, "")] != (i in own) for i in ids):
            return "a parameter is read by something else"
        return None if _correspond(link) else "channels do not correspond"


def _keeps_channels(node: fx.Node, module: Any, axis: int) -> bool:  # noqa: ANN401
    """Whether a reshape leaves every channel in place, found by applying it to channel numbers."""
    shape = shape_of(first_input(node)) or ()
    if len(node.all_input_nodes) != 1 or len(shape) < -axis:
        return False
    numbers = torch.arange(shape[axis]).reshape(-1, *[1] * (-axis - 1))
    try:
        args = (numbers.expand(shape), *node.args[1:])
        kwargs = {k: v for k, v in node.kwargs.items() if k != "input"}
        moved = module(args[0]) if module is not None else call_target(node.target, args, kwargs)
    except (RuntimeError, TypeError, IndexError):
        return False
    return moved.ndim >= -axis and moved.shape[axis] == shape[axis] and bool((moved == numbers).all())


def _correspond(link: Link) -> bool:
    """Whether all readers have the source's channels, on the same axis."""
    axes = {-1 if isinstance(r.layer, QuantFunction) else channel_axis(r.layer) for r in link.readers}
    return axes == {link.axis} and {len(reader.largest()) for reader in link.readers} == {link.channels}


def _source(node: fx.Node, model: fx.GraphModule, norms: tuple[type, ...], products: bool) -> Link | None:
    """A link without readers yet, if a call can be a source."""
    module: Any = module_of(node, model)
    layer = isinstance(module, QuantLayer) and isinstance(module, LAYERS)
    if layer or isinstance(module, norms):
        return Link(node_name(node), node, module)
    product = product_at(node, model) if products else None
    return None if product is None else Link(product.name, product.node, product, [], [*product.quantizers])


def find_links(
    model: fx.GraphModule, done: Correction, *, norms: tuple[type, ...] = NORM_WEIGHTS, products: bool = True
) -> list[Link]:
    """All links whose source is a quantized layer, a norm, or a product if wanted; notes why others are not links."""
    finder, found = _Finder(model), []
    for node in model.graph.nodes:
        link = _source(node, model, norms, products)
        if link is None:
            continue
        reason = finder.follow(link.node, link)
        reason = reason or link.why_unfit() or finder.why_shared(link)
        if reason is None:
            link.name = f"{link.name} to {', '.join(reader.name for reader in link.readers)}"
            found.append(link)
        else:
            done.skipped[link.name] = reason
    return found
