"""Folds: maps x·c + d of each channel that a layer computes together with its operator, as values.

A quantized layer has two chains of folds, ``before`` on its input channels and ``after`` on its output channels. While
its weight is float, it applies them as written, bit for bit. Once the weight is quantized, they are part of it:

    after:   w' = w·c,   b' = b·c + d
    before:  w' = w·c,   b' = b + Σ w·d

A fold owns no parameters. It refers to the modules that do, so names in the ``state_dict`` do not change, and the
layer sees every value that is trained, loaded or moved.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.errors import ConfigError
from bitwright.numerics.snapshot import snapshot

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
Value = Callable[[], Tensor]
"""A tensor computed from parameters and buffers, each time it is asked for."""

FROZEN, BY_BATCH = "_statistics_frozen", "_statistics_by_batch"  # attributes that bitwright.nn.norm sets on a BatchNorm


@dataclass(frozen=True, eq=False)
class Fold:
    """A map of each channel, defined by subclasses."""

    @property
    def norm(self) -> BatchNorm | None:
        """The BatchNorm whose statistics define the map, if it can move them."""
        return None

    @property
    def by_batch(self) -> bool:
        """Whether a quantized layer must apply this after computing, to normalize by the batch."""
        norm = self.norm
        return norm is not None and norm.training and BY_BATCH in norm.__dict__

    def apply(self, x: Tensor) -> Tensor:
        """Compute the original operations."""
        raise NotImplementedError(f"{type(self).__name__} must define what it computes")

    def affine(self, channels: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """Factor and shift of each channel (None means no shift), with the device and type of ``like``."""
        raise NotImplementedError(f"{type(self).__name__} must define its factor for each channel")


@dataclass(frozen=True, eq=False)
class NormFold(Fold):
    """A BatchNorm:  c = γ/√(running var + eps),  d = β - running mean · c."""

    module: BatchNorm

    @property
    def norm(self) -> BatchNorm:
        return self.module

    def apply(self, x: Tensor) -> Tensor:
        return self.module(x)

    def affine(self, channels: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
        norm = self.module
        if norm.running_mean is None or norm.running_var is None:
            raise ConfigError(f"a {type(norm).__name__} without running statistics cannot be folded")
        tensors = norm.running_mean, norm.running_var, norm.weight, norm.bias
        return _normalization(tensors, norm.eps, moving=self.by_batch)


@dataclass(frozen=True, eq=False)
class FunctionFold(Fold):
    """A call of ``F.batch_norm``.

    If the statistics belong to a BatchNorm (a subclass with its own forward, say), they move in training as that
    module would move them. Those of any other module stay frozen, as in the captured call.
    """

    mean: Value
    var: Value
    weight: Value | None
    bias: Value | None
    momentum: float | None
    eps: float

    @property
    def norm(self) -> BatchNorm | None:
        """The BatchNorm that the statistics belong to."""
        owner = getattr(self.mean, "owner", None)
        return owner if isinstance(owner, NORMS) else None

    def apply(self, x: Tensor) -> Tensor:
        """Normalize, by the batch if the owner of the statistics is in training mode and not frozen."""
        mean, var, weight, bias = self._tensors()
        norm = self.norm
        if norm is None or not norm.training or FROZEN in norm.__dict__:
            return F.batch_norm(x, mean, var, weight, bias, False, self.momentum or 0.0, self.eps)
        rate = norm.momentum
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
            rate = 1.0 / float(norm.num_batches_tracked) if rate is None else rate
        return F.batch_norm(x, mean, var, weight, bias, True, rate or 0.0, self.eps)

    def affine(self, channels: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
        return _normalization(self._tensors(), self.eps, moving=self.by_batch)

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        weight = None if self.weight is None else self.weight()
        return self.mean(), self.var(), weight, None if self.bias is None else self.bias()


@dataclass(frozen=True, eq=False)
class ShuffledFold(Fold):
    """A fold of shuffled channels, whose channel j is channel ``order[j]`` of the layer."""

    fold: Fold
    order: Tensor

    @property
    def norm(self) -> BatchNorm | None:
        return self.fold.norm

    def apply(self, x: Tensor) -> Tensor:
        order = self.order.to(x.device)
        return self.fold.apply(x.index_select(1, order)).index_select(1, order.argsort())

    def affine(self, channels: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
        factor, shift = self.fold.affine(channels, like)
        back = self.order.to(factor.device).argsort()
        return factor[back], None if shift is None else shift[back]


@dataclass(frozen=True, eq=False)
class ArithmeticFold(Fold):
    """A sum, difference, product or quotient with a constant.

    Args:
        function: ``torch.add``, ``torch.sub``, ``torch.mul`` or ``torch.div``.
        constant: a number, or a tensor with one value or one per channel.
        first: whether the constant is the first operand.
        axis: the axis that has the channels, counted from the last as -1.
    """

    function: Callable[..., Tensor]
    constant: Value | float
    first: bool
    axis: int

    def apply(self, x: Tensor) -> Tensor:
        value = self.constant() if callable(self.constant) else self.constant
        if isinstance(value, Tensor) and value.numel() > 1:
            value = value.reshape(-1, *[1] * (-self.axis - 1))
        return self.function(value, x) if self.first else self.function(x, value)

    def affine(self, channels: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
        if callable(self.constant):
            value = self.constant().reshape(-1).expand(channels)
        else:
            value = like.new_full((channels,), self.constant)
        if self.function is torch.mul:
            return value, None
        if self.function is torch.div:
            return value.reciprocal(), None
        minus = self.function is torch.sub
        one = torch.ones_like(value)
        return (-one if minus and self.first else one), (-value if minus and not self.first else value)


def apply_all(folds: tuple[Fold, ...], x: Tensor) -> Tensor:
    """Compute a chain of folds as written."""
    for fold in folds:
        x = fold.apply(x)
    return x


def combine(folds: tuple[Fold, ...], channels: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Factor and shift of a non-empty chain, one value per channel."""
    factor, shift = folds[0].affine(channels, like)
    for fold in folds[1:]:
        more, moved = fold.affine(channels, like)
        factor = factor * more
        shift = moved if shift is None else shift * more if moved is None else shift * more + moved
    return factor, shift


def _normalization(
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor | None], eps: float, *, moving: bool
) -> tuple[Tensor, Tensor]:
    mean, var, weight, bias = tensors
    if moving and torch.compiler.is_compiling():
        mean, var = snapshot(mean), snapshot(var)
    factor = torch.rsqrt(var + eps)
    factor = factor if weight is None else factor * weight
    shift = -mean * factor
    return factor, shift if bias is None else shift + bias
