"""Stand-ins for a BatchNorm: what a layer can fold in besides one, in the same words: statistics, weight and bias.

A layer applies what it folds after computing while its weight is float, and multiplies it into the weight once that is
quantized. So a stand-in is called like the operations it stands for, and computes them as they were, bit for bit; and
it has ``running_mean``, ``running_var``, ``eps``, ``weight`` and ``bias``, which say the same as one affine map:

    y = (x - mean)/√(var + eps) · weight + bias

It owns no parameters: it reads those of the modules that do, so the names in the ``state_dict`` stay.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from bitwright.graph.passes.fold.expression import Expression
from bitwright.nn.layer import BatchNorm, QuantLayer

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class StandIn(nn.BatchNorm2d):
    """Looks like a BatchNorm; subclasses say what its tensors are."""

    def __init__(self, channels: int, eps: float, momentum: float | None) -> None:
        nn.Module.__init__(self)
        self.num_features, self.eps, self.momentum = channels, eps, momentum
        self.affine = self.track_running_stats = True

    running_mean = running_var = weight = bias = num_batches_tracked = None  # pyrefly: ignore

    def _check_input_dim(self, input: Tensor) -> None:
        """Any number of dimensions."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """There is nothing to load."""


class FunctionNorm(StandIn):
    """A call of ``F.batch_norm``.

    Where the statistics belong to a BatchNorm of torch's kind (a subclass with a forward of its own, say) they move
    while training, as that would; those of others stay frozen, as in the captured call.
    """

    def __init__(
        self, tensors: dict[str, Expression | None], channels: int, eps: float, momentum: float | None
    ) -> None:
        super().__init__(channels, eps, momentum)
        mean = tensors["running_mean"]
        owner = None if mean is None else mean.owner()
        self._tensors = tensors
        self._tracked = (owner,) if isinstance(owner, NORMS) else ()
        self.training = False

    def train(self, mode: bool = True) -> Self:
        """Follow the model's mode, unless the statistics are frozen."""
        return super().train(mode and bool(self._tracked))

    running_mean = property(lambda self: _value(self._tensors["running_mean"]))  # pyrefly: ignore
    running_var = property(lambda self: _value(self._tensors["running_var"]))  # pyrefly: ignore
    weight = property(lambda self: _value(self._tensors["weight"]))  # pyrefly: ignore
    bias = property(lambda self: _value(self._tensors["bias"]))  # pyrefly: ignore
    num_batches_tracked = property(  # pyrefly: ignore
        lambda self: self._tracked[0].num_batches_tracked if self._tracked else None
    )


class ShuffledNorm(StandIn):
    """A BatchNorm on shuffled channels of a layer: channel ``order[j]`` of the layer is its j-th."""

    def __init__(self, norm: BatchNorm, order: list[int]) -> None:
        super().__init__(len(order), norm.eps, norm.momentum)
        self._norm = (norm,)  # in a tuple it is no submodule: it keeps its place in the model
        self.register_buffer("order", torch.tensor(order), persistent=False)
        self.register_buffer("inverse", torch.tensor(order).argsort(), persistent=False)

    @property
    def training(self) -> bool:  # pyrefly: ignore
        """Whether the norm that it stands for is in training mode."""
        return self._norm[0].training

    @training.setter
    def training(self, mode: bool) -> None:
        """The norm has a mode of its own."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the shuffled channels, and put them back."""
        (norm,) = self._norm
        return norm(input.index_select(1, self.order)).index_select(1, self.inverse)  # pyrefly: ignore

    def _unshuffled(self, name: str) -> Tensor | None:
        value = getattr(self._norm[0], name)
        return None if value is None else value[self.inverse]

    running_mean = property(lambda self: self._unshuffled("running_mean"))  # pyrefly: ignore
    running_var = property(lambda self: self._unshuffled("running_var"))  # pyrefly: ignore
    weight = property(lambda self: self._unshuffled("weight"))  # pyrefly: ignore
    bias = property(lambda self: self._unshuffled("bias"))  # pyrefly: ignore
    num_batches_tracked = property(lambda self: self._norm[0].num_batches_tracked)  # pyrefly: ignore


class Affine(StandIn):
    """Sums and products with constants after a layer, and after the norm that the layer has folded in already.

    Args:
        norm: what comes first, if anything.
        layer: the layer.
        channels: how many output channels the layer has.
    """

    def __init__(self, norm: BatchNorm | None, layer: QuantLayer, channels: int) -> None:
        super().__init__(channels, 0.0 if norm is None else norm.eps, None if norm is None else norm.momentum)
        self._norm = () if norm is None else (norm,)
        self._layer = (layer,)
        self._steps: list[Step] = []

    @property
    def training(self) -> bool:  # pyrefly: ignore
        """Whether the norm that it stands for is in training mode."""
        return bool(self._norm) and self._norm[0].training

    @training.setter
    def training(self, mode: bool) -> None:
        """The norm has a mode of its own."""

    def add(self, step: "Step") -> None:
        """Apply one more step, after all others."""
        self._steps.append(step)

    @property
    def shifts(self) -> bool:
        """Whether it adds anything, or only multiplies."""
        return bool(self._norm) or any(_KINDS[step.function] in ("add", "sub") for step in self._steps)

    def forward(self, input: Tensor) -> Tensor:
        """Compute the steps as they were written."""
        for norm in self._norm:
            input = norm(input)
        for step in self._steps:
            input = step.apply(input)
        return input

    def _map(self) -> tuple[Tensor, Tensor]:
        """All steps as x · factor + shift, one value per channel each."""
        like = self._layer[0].weight
        pairs = [step.map(self.num_features, like) for step in self._steps]
        factor, shift = pairs[0]
        for more, moved in pairs[1:]:
            factor, shift = factor * more, shift * more + moved
        return factor, shift

    @property
    def weight(self) -> Tensor:  # pyrefly: ignore
        """The factor of each channel."""
        factor, _ = self._map()
        own = self._norm[0].weight if self._norm else None
        return factor if own is None else own * factor

    @property
    def bias(self) -> Tensor:  # pyrefly: ignore
        """The shift of each channel."""
        factor, shift = self._map()
        own = self._norm[0].bias if self._norm else None
        return shift if own is None else own * factor + shift

    running_mean = property(  # pyrefly: ignore
        lambda self: self._norm[0].running_mean if self._norm else torch.zeros_like(self.weight)
    )
    running_var = property(  # pyrefly: ignore
        lambda self: self._norm[0].running_var if self._norm else torch.ones_like(self.weight)
    )
    num_batches_tracked = property(  # pyrefly: ignore
        lambda self: self._norm[0].num_batches_tracked if self._norm else None
    )


class Step:
    """One operation with a constant: how it is computed, and what it is as a map of each channel.

    Args:
        function: the operation of two operands.
        constant: a number or an expression of parameters and buffers.
        first: whether the constant is the first operand.
        axis: the axis that has the channels where the operation is computed, counted from the last as -1.
    """

    def __init__(self, function: Callable[..., Any], constant: Expression | float, first: bool, axis: int) -> None:
        self.function, self.constant, self.first, self.axis = function, constant, first, axis

    def value(self) -> Any:
        """The constant as it is now."""
        return self.constant() if isinstance(self.constant, Expression) else self.constant

    def apply(self, x: Tensor) -> Tensor:
        """Compute the operation on the layer's result."""
        value = self.value()
        if isinstance(value, Tensor) and value.numel() > 1:
            value = value.reshape(-1, *[1] * (-self.axis - 1))
        return self.function(value, x) if self.first else self.function(x, value)

    def map(self, channels: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Factor and shift for every channel, of the kind that ``like`` is."""
        value = self.value()
        flat = value.reshape(-1) if isinstance(value, Tensor) else like.new_tensor([float(value)])
        flat = flat.expand(channels) if flat.numel() == 1 else flat
        name = _KINDS[self.function]
        one, zero = torch.ones_like(flat), torch.zeros_like(flat)
        if name == "mul":
            return flat, zero
        if name == "div":
            return one / flat, zero
        sign = -1.0 if name == "sub" and not self.first else 1.0
        return (-one if name == "sub" and self.first else one), flat * sign


_KINDS: dict[Callable[..., Any], str] = {torch.add: "add", torch.sub: "sub", torch.mul: "mul", torch.div: "div"}


def _value(expression: Expression | None) -> Tensor | None:
    return None if expression is None else expression()
