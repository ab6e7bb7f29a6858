"""What a unit learns: the rounding of weights and the scales of activations, and how to undo it."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from bitwright.calibration import make_room_for_bias
from bitwright.graph.evaluate import Evaluator
from bitwright.graph.names import module_of
from bitwright.methods import Method
from bitwright.methods.adaround import AdaRoundFakeQuantize
from bitwright.methods.qdrop import QDropFakeQuantize
from bitwright.nn.functional import QuantFunction
from bitwright.nn.weight_sites import WeightSite, weight_sites
from bitwright.numerics import quantize
from bitwright.quantizer import TensorQuantizer
from bitwright.spec import PerTensor

MOST_STRETCH = 2.0  # the factor by which a learned weight scale may grow or shrink


@dataclass(eq=False)
class Learned:
    """A quantizer that learns, with its former state, under the name of its layer if it is a weight's."""

    name: str
    quantizer: TensorQuantizer
    _before: tuple[Method, str, dict[str, Any]] | None = field(default=None, init=False)

    def remember(self) -> None:
        """Remember the current range and method."""
        q = self.quantizer
        self._before = q.method, q.method_name, dict(q._buffers)

    def restore(self) -> None:
        """Restore what was remembered."""
        if self._before is not None:
            self.quantizer.method, self.quantizer.method_name, buffers = self._before
            self.quantizer._buffers.update(buffers)
            self.quantizer.method.start(*self.quantizer._known())


@dataclass(eq=False)
class LearnedWeight(Learned):
    """A weight whose rounding is learned.

    Attributes:
        site: its place in the layer; None for the argument of a function.
        own: the layer's own weight before GPTQ rounded it, if it did; learning starts there.
    """

    weight: Tensor
    layer: nn.Module
    site: WeightSite | None = None
    own: Tensor | None = None
    _rounded: Tensor | None = field(default=None, init=False)

    def remember(self) -> None:
        """Remember the current weight, too, and take the one before GPTQ."""
        super().remember()
        if self.own is not None and self.site is not None:
            self._rounded = self._set(self.own)

    def restore(self) -> None:
        """Restore the weight, too."""
        if self._rounded is not None:
            self._set(self._rounded)
            self._rounded = None
        super().restore()

    def _set(self, own: Tensor) -> Tensor:
        """Set the layer's own weight, and return the former one."""
        layer: Any = self.layer
        former = layer.weight.detach().clone()
        with torch.no_grad():
            layer.weight.copy_(own)
        if self.site is not None:
            self.weight = self.site.weight().detach()
        return former

    @property
    def rounding(self) -> nn.Parameter:
        """V, one value per weight."""
        made = self.quantizer.method.rounding
        if not isinstance(made, nn.Parameter):
            raise TypeError(f"the rounding of {self.name!r} has not begun")
        return made

    @property
    def method(self) -> AdaRoundFakeQuantize:
        """The method while it learns, and afterwards."""
        method = self.quantizer.method
        if not isinstance(method, AdaRoundFakeQuantize):
            raise TypeError(f"the weight of {self.name!r} is rounded by {type(method).__name__}")
        return method

    def begin(self) -> None:
        """Make the quantizer round by V, starting from the float weight."""
        self.remember()
        self._adopt()
        self.method.init(self.weight, *self.quantizer.qparams())

    def begin_scale(self) -> None:
        """Also learn the scale, as a factor of its current value."""
        if not self.quantizer.spec.power_of_two:
            self.method.learn("stretch", torch.ones_like(self.quantizer.qparams()[0]))
            self.method.stretching = True

    def harden(self) -> None:
        """Fix the rounding, up or down."""
        self.method.harden()
        self.rounding.requires_grad_(False).copy_(self.ups().float() * 2.0 - 1.0)  # as a checkpoint gives it back
        if self.method.stretching and self.method.stretch is not None:
            self.stretch_by(self.method.stretch.detach().clamp(1 / MOST_STRETCH, MOST_STRETCH))

    def stretch_by(self, stretch: Tensor) -> None:
        """Permanently multiply the scale by a factor, keeping the integers."""
        scale, zero_point = self.quantizer.qparams()
        self.method.stretching = False
        self.method.learn("stretch", stretch.to(scale))
        self.method.stretch.requires_grad_(False)  # pyrefly: ignore
        self.quantizer.set_qparams(scale * stretch.to(scale), zero_point)

    def ups(self) -> Tensor:
        """Where it rounds up."""
        return self.rounding.detach() >= 0

    def round_by(self, ups: Tensor) -> None:
        """Permanently round up where ``ups`` says."""
        self.remember()
        self._adopt()
        self.method.learn("rounding", ups.to(self.weight.device).float() * 2.0 - 1.0)
        self.harden()

    def hold(self) -> None:
        """Return the hardened weight without rounding it again, wherever gradients are required."""
        with torch.no_grad():
            self.method.soft = self.method(self.weight, *self.quantizer.qparams())

    def let_go(self) -> None:
        """Round again."""
        self.method.soft = None

    def make_room(self) -> None:
        """Raise scales that are too small for the layer's int32 bias; a function has its bias only when it runs."""
        if not isinstance(self.layer, QuantFunction):
            make_room_for_bias(self.layer)

    def _adopt(self) -> None:
        scale, zero_point = self.quantizer.qparams()
        self.quantizer.method = AdaRoundFakeQuantize(self.quantizer.spec)
        self.quantizer.method_name = "AdaRoundFakeQuantize"
        if "_amax" not in self.quantizer._buffers:
            self.quantizer.set_qparams(scale, zero_point)


@dataclass(eq=False)
class LearnedScale(Learned):
    """An activation whose scale is learned."""

    def begin(self, keep: float) -> None:
        """Make the scale a Parameter; each value is quantized with probability ``keep``."""
        self.remember()
        method = QDropFakeQuantize(self.quantizer.spec, prob=keep)
        method.start(*self.quantizer.qparams())
        self.quantizer.method = method.to(self.quantizer.qparams()[0].device).train()

    def quantize_by_chance(self, keep: float) -> None:
        """From now on, quantize each value with probability ``keep``."""
        self.quantizer.method.prob = keep  # pyrefly: ignore

    @property
    def scale(self) -> nn.Parameter:
        """The scale while it learns."""
        return self.quantizer.method.scale  # pyrefly: ignore

    def finish(self) -> None:
        """Store what was learned, and switch back to the former method."""
        if self._before is None:
            raise TypeError(f"the scale of {self.name!r} has not begun")
        scale, zero_point = self.quantizer.qparams()
        self.quantizer.method = self._before[0]
        self.quantizer.set_qparams(scale, zero_point)


def learnable_weights(model: fx.GraphModule, node: fx.Node) -> list[LearnedWeight]:
    """The weights that a call quantizes, if their rounding can be learned."""
    module = module_of(node, model)
    if isinstance(module, QuantFunction):
        weight = _argument(model, node)
        found = [] if weight is None else [LearnedWeight(node.name, module.weight_quantizer, weight, module)]
    elif module is None:
        found = []
    else:
        found = weights_of(module, str(node.target))
    return [each for each in found if _rounds_to_nearest(each)]


def start_from(state: Mapping[str, Tensor], model: nn.Module, weights: Iterable[LearnedWeight]) -> None:
    """Make weights that GPTQ has rounded start from those in ``state``, unless other layers have them, too."""
    names = {id(p): name for name, p in model.named_parameters()}
    owners = Counter(id(p) for m in set(model.modules()) for p in m._parameters.values() if p is not None)
    for weight in weights:
        own = getattr(weight.layer, "weight", None)
        if own is not None and weight.site is not None and weight.site.plain and owners[id(own)] == 1:
            exact = state.get(names.get(id(own), ""), own)
            if exact.shape == own.shape and not torch.equal(exact, own):
                weight.own = exact


def weights_of(module: nn.Module, path: str = "") -> list[LearnedWeight]:
    """The weights of the layers in a module."""
    return [
        LearnedWeight(f"{path}.{site.name}".strip("."), site.quantizer, site.weight().detach(), site.layer, site)
        for site in weight_sites(module)
    ]


def _argument(model: fx.GraphModule, node: fx.Node) -> Tensor | None:
    """The weight that a function is given, if it does not depend on the model's inputs."""
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    try:
        value = Evaluator(model)(given) if isinstance(given, fx.Node) else None
    except LookupError:
        return None
    return value.detach() if isinstance(value, Tensor) else None


def _rounds_to_nearest(learned: LearnedWeight) -> bool:
    """Whether the weight's integers come from nearest or learned rounding on a uniform grid."""
    q, weight = learned.quantizer, learned.weight
    if not (q.quantizes and q.calibrated and q.uniform) or q.spec.format.floating or not weight.is_floating_point():
        return False
    if isinstance(q.method, AdaRoundFakeQuantize):
        return True
    spec, params = q.spec, q.qparams()
    where = (spec.qmin, spec.qmax, q.method.axis, q.method.group)
    return torch.equal(q.integers(weight), quantize(weight, *params, *where, dtype=spec.format.storage))


def learns_scale(quantizer: TensorQuantizer, most: int) -> bool:
    """Whether an activation's quantizer has at most this many bits, and a stored scale that may be any number."""
    spec = quantizer.spec
    if spec.bits > most:
        return False
    stored = quantizer.quantizes and quantizer.uniform and quantizer._stored()[0].numel() > 0
    return (
        stored
        and isinstance(spec.granularity, PerTensor)
        and not (spec.format.floating or spec.power_of_two or quantizer.fixed)
    )
