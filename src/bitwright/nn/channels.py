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
    return _grouped(layer, values) if _transposed(layer) else _leading(layer, values)


def per_input(layer: Any, values: Tensor) -> Tensor:  # noqa: ANN401
    """Shape one value per input channel to multiply the weight."""
    return _leading(layer, values) if _transposed(layer) else _grouped(layer, values)


def largest_per_output(layer: Any) -> Tensor:  # noqa: ANN401
    """The largest magnitude among the weights of each output channel."""
    return _largest_grouped(layer) if _transposed(layer) else _largest_leading(layer)


def largest_per_input(layer: Any) -> Tensor:  # noqa: ANN401
    """The largest magnitude among the weights of each input channel."""
    return _largest_leading(layer) if _transposed(layer) else _largest_grouped(layer)


def _transposed(layer: Any) -> bool:  # noqa: ANN401
    return getattr(layer, "transposed", False)


def _leading(layer: Any, values: Tensor) -> Tensor:  # noqa: ANN401
    return values.reshape(-1, *[1] * (layer.weight.ndim - 1))


def _grouped(layer: Any, values: Tensor) -> Tensor:  # noqa: ANN401
    """Values for the second axis of the weight: each group of the first axis has its own."""
    groups, rest = getattr(layer, "groups", 1), [1] * (layer.weight.ndim - 2)
    if groups == 1:
        return values.reshape(1, -1, *rest)
    first = layer.weight.shape[0]
    return values.reshape(groups, 1, -1).expand(-1, first // groups, -1).reshape(first, -1, *rest)


def _largest_leading(layer: Any) -> Tensor:  # noqa: ANN401
    return layer.weight.abs().flatten(1).amax(1)


def _largest_grouped(layer: Any) -> Tensor:  # noqa: ANN401
    groups, (first, second) = getattr(layer, "groups", 1), layer.weight.shape[:2]
    return layer.weight.abs().reshape(groups, first // groups, second, -1).amax((1, 3)).flatten()
