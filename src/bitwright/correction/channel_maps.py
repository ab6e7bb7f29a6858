"""Folds as maps of channels: how a BatchNorm shapes a layer's result, and how to shift that result."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from bitwright.correction.running import Layer
from bitwright.nn.channels import channel_axis, output_channels
from bitwright.nn.fold import BatchNorm, Fold, NormFold, ShuffledFold, combine


class NormPlace(NamedTuple):
    """The BatchNorm's position among a layer's folds: the result is p·factor + shift, where p is normalized."""

    norm: BatchNorm
    fold: Fold
    factor: Tensor
    shift: Tensor
    later: Tensor  # the part of the factor that comes after the norm

    def of_layer(self, values: Tensor) -> Tensor:
        """Reorder values of the norm's channels for the layer."""
        order = _order(self.fold)
        return values if order is None else values[order.to(values.device).argsort()]

    def of_norm(self, values: Tensor) -> Tensor:
        """Reorder values of the layer's channels for the norm."""
        order = _order(self.fold)
        return values if order is None else values[order.to(values.device)]


def norm_place(layer: Layer) -> NormPlace | None:
    """The position of the BatchNorm with running statistics after a layer's operator, if there is one."""
    norms = [i for i, fold in enumerate(layer.after) if fold.norm is not None]
    if len(norms) != 1:
        return None
    fold, rest, channels = layer.after[norms[0]], layer.after[norms[0] + 1 :], output_channels(layer)
    if fold.norm is None or fold.norm.running_mean is None or fold.norm.running_var is None:
        return None
    factor, shift = combine((fold, *rest), channels, layer.weight)
    later = combine(rest, channels, layer.weight)[0] if rest else torch.ones_like(factor)
    shift = torch.zeros_like(factor) if shift is None else shift
    return NormPlace(fold.norm, fold, factor.detach(), shift.detach(), later.detach())


def norm_alone(norm: BatchNorm) -> NormPlace:
    """The position of a BatchNorm that is not folded."""
    fold = NormFold(norm)
    factor, shift = fold.affine(norm.num_features, torch.empty(0))
    shift = torch.zeros_like(factor) if shift is None else shift
    return NormPlace(norm, fold, factor.detach(), shift.detach(), torch.ones_like(factor))


def shared_norms(layers: Iterable[Layer]) -> set[BatchNorm]:
    """The BatchNorms that several layers share."""
    users = Counter(fold.norm for layer in layers for fold in layer.after if fold.norm is not None)
    return {norm for norm, count in users.items() if count > 1}


def why_fixed(layer: Layer, shared: set[BatchNorm]) -> str | None:
    """Why no constant can be added to a layer's result, if so."""
    place = norm_place(layer)
    if _takes_bias(layer):
        return None
    if place is None:
        return "it has no bias, and no BatchNorm after it"
    if place.norm in shared:
        return "other layers share its BatchNorm"
    return "its BatchNorm is multiplied by zero" if bool((place.later == 0).any()) else None


def add_to_result(layer: Layer, amount: Tensor) -> None:
    """Add a constant to each channel of a layer's result, unless :func:`why_fixed`.

    It goes into the layer's bias, or else that of its BatchNorm, or else the mean that the norm subtracts.
    """
    place = norm_place(layer)
    with torch.no_grad():
        if _takes_bias(layer):
            layer.bias += amount / combine(layer.after, output_channels(layer), amount)[0] if layer.after else amount
        elif place is not None and place.norm.bias is not None:
            place.norm.bias.add_(place.of_norm(amount / place.later))
        elif place is not None and place.norm.running_mean is not None:
            place.norm.running_mean.sub_(place.of_norm(torch.where(place.factor != 0, amount / place.factor, 0.0)))


def _takes_bias(layer: Layer) -> bool:
    if layer.bias is None or not layer.after:
        return layer.bias is not None
    return bool((combine(layer.after, output_channels(layer), layer.weight)[0] != 0).all())


def over_channels(layer: Layer, values: Tensor) -> Tensor:
    """Move the channels of a layer's result to the front: (channels, values)."""
    first = values.movedim(channel_axis(layer), 0)
    return first.reshape(len(first), -1)


def along_channels(layer: Layer, values: Tensor) -> Tensor:
    """Shape one value per channel to compute with a layer's result."""
    return values.reshape(-1, *[1] * (-channel_axis(layer) - 1))


def _order(fold: Fold) -> Tensor | None:
    return fold.order if isinstance(fold, ShuffledFold) else None
