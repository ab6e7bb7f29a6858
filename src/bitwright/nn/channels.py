"""Channels of a layer's weight: how many there are, where they are, and one value for each of them.

The weight of a linear layer or a convolution is (out, in / groups, …), that of a transposed convolution
(in, out / groups, …). The functions here take float and quantized layers alike.
"""

from typing import Any

from torch import Tensor, nn

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def output_channels(layer: Any) -> int:  # noqa: ANN401
    """How many channels come out of a layer."""
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def input_channels(layer: Any) -> int:  # noqa: ANN401
    """How many channels go into a layer."""
    return layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels


def channel_axis(layer: Any) -> int:  # noqa: ANN401
    """The axis of a layer's input and output that has the channels, counted from the last as -1."""
    return -1 if isinstance(layer, nn.Linear) else 1 - layer.weight.ndim


def per_output(layer: Any, values: Tensor) -> Tensor:  # noqa: ANN401
    """Shape one value per output channel to multiply the weight."""
    return _shaped(layer, values, first=not _transposed(layer))


def per_input(layer: Any, values: Tensor) -> Tensor:  # noqa: ANN401
    """Shape one value per input channel to multiply the weight."""
    return _shaped(layer, values, first=_transposed(layer))


def largest_per_output(layer: Any) -> Tensor:  # noqa: ANN401
    """The largest magnitude among the weights of each output channel."""
    return _largest(layer, first=not _transposed(layer))


def largest_per_input(layer: Any) -> Tensor:  # noqa: ANN401
    """The largest magnitude among the weights of each input channel."""
    return _largest(layer, first=_transposed(layer))


def _transposed(layer: Any) -> bool:  # noqa: ANN401
    return getattr(layer, "transposed", False)


def _shaped(layer: Any, values: Tensor, *, first: bool) -> Tensor:  # noqa: ANN401
    """Shape values for the first axis of the weight, or for the second, where each group of the first has its own."""
    size, ones = layer.weight.shape[0], [1] * (layer.weight.ndim - 2)
    if first:
        return values.reshape(-1, 1, *ones)
    groups = getattr(layer, "groups", 1)
    if groups == 1:
        return values.reshape(1, -1, *ones)
    return values.reshape(groups, 1, -1).expand(-1, size // groups, -1).reshape(size, -1, *ones)


def _largest(layer: Any, *, first: bool) -> Tensor:  # noqa: ANN401
    if first:
        return layer.weight.abs().flatten(1).amax(1)
    groups, (size, second) = getattr(layer, "groups", 1), layer.weight.shape[:2]
    return layer.weight.abs().reshape(groups, size // groups, second, -1).amax((1, 3)).flatten()
