"""Gram matrices of a layer's inputs: Σ x·xᵀ gives the error of its result for any error of its weight.

With D the weight's error as a matrix, one row for each output channel, Σ over all positions of |D·x|² = Σ rows D·G·Dᵀ
with G = Σ x·xᵀ. A grouped convolution has one G for each group, a depthwise one for each channel. The columns of a
convolution are what its kernel covers at each position.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitwright.correction.outcome import Correction
from bitwright.correction.running import Layer, Stop, calls, in_order, quantized_layers, run, seeing_inputs
from bitwright.nn.conv import padding_edges
from bitwright.progress import track

CHUNK = 1 << 24  # values of columns at a time


class Gram:
    """Σ x·xᵀ of one layer, (groups, columns, columns) in float64, and the number of positions."""

    def __init__(self, layer: Any) -> None:  # noqa: ANN401
        self.layer = layer
        size = layer.weight[0].numel()
        groups = getattr(layer, "groups", 1)
        self.total = torch.zeros(groups, size, size, dtype=torch.float64, device=layer.weight.device)
        self.count = 0

    def add(self, x: Tensor) -> None:
        """Add an input of the layer's operator."""
        layer, groups = self.layer, len(self.total)
        if isinstance(layer, nn.Linear):
            parts = [x.detach().reshape(1, -1, x.shape[-1]).transpose(1, 2)]
        else:
            x = F.pad(x, padding_edges(layer)) if layer.padding_mode == "zeros" else x
            step = max(1, CHUNK // max(1, x[0].numel() * self.total.shape[1]))
            parts = [_columns(layer, part, groups) for part in x.detach().split(step)]
        for part in parts:
            wide = part.double() if part.dtype == torch.float64 else part.float()
            self.total += (wide @ wide.transpose(1, 2)).double()
            self.count += part.shape[2]

    def matrix(self, weight: Tensor) -> Tensor:
        """A weight, or anything shaped like it, as (groups, rows, columns)."""
        return weight.reshape(len(self.total), -1, self.total.shape[1])

    def error(self, difference: Tensor) -> Tensor:
        """The squared error of each output channel, (groups, rows), for (groups, rows, columns) of weight errors."""
        return ((difference.double() @ self.total) * difference.double()).sum(2)


def _columns(layer: Any, x: Tensor, groups: int) -> Tensor:  # noqa: ANN401
    """What the kernel covers, (groups, columns, places), of a padded input."""
    dims = len(layer.kernel_size)
    for d in range(dims):
        reach = layer.dilation[d] * (layer.kernel_size[d] - 1) + 1
        x = x.unfold(2 + d, reach, layer.stride[d])[..., :: layer.dilation[d]]
    # (batch, channels, *places, *kernel) -> (groups, channels / groups, *kernel, batch, *places)
    x = x.unflatten(1, (groups, -1))
    order = (1, 2, *range(3 + dims, 3 + 2 * dims), 0, *range(3, 3 + dims))
    return x.permute(order).reshape(groups, -1, x.shape[0] * x[0, 0, 0].numel() // _size(layer.kernel_size))


def _size(kernel: tuple[int, ...]) -> int:
    return torch.Size(kernel).numel()


def fit_layers(model: nn.Module, done: Correction) -> dict[str, Layer]:
    """The layers whose weight error a Gram matrix can measure; the others are noted as skipped."""
    layers, fit = quantized_layers(model, done), {}
    for name, layer in layers.items():
        reason = _why_not(layer)
        if reason is None:
            fit[name] = layer
        else:
            done.skipped[name] = reason
    return fit


def _why_not(layer: Layer) -> str | None:
    quantizer, weight = layer.weight_quantizer, layer.folded_weight()[0].detach()
    if not isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return f"a {type(layer).__name__} is not a linear layer or convolution"
    if not quantizer.uniform or quantizer.spec.format.floating:
        return f"{quantizer.method_name} has no uniform grid of integers"
    if getattr(quantizer.method, "rounding", None) is not None:
        return "its rounding was learned"
    on_grid = quantizer.fake_quantize(weight).detach()
    return None if torch.equal(quantizer.fake_quantize(on_grid), on_grid) else "its method moves values on the grid"


def collected(
    model: nn.Module, layers: Iterable[Layer], batches: Iterable[Any], progress: bool | None, passes: int = 1
) -> Iterator[tuple[Layer, Gram]]:
    """Each layer that data reaches, with its Gram matrix, in so many passes through the quantized model.

    With more than one, layers come in execution order, each pass ends with its last layer, and it runs with what the
    caller has done to the layers of earlier passes.
    """
    if passes == 1:
        yield from _one_pass(model, list(layers), batches, None, progress)
        return
    data = list(batches)
    counts = in_order(model, next(calls(model, data[:1], "running")), layers)
    order = list(counts)
    size = -(-len(order) // passes)
    for first in track(range(0, len(order), max(size, 1)), "collecting inputs", show=progress):
        chosen = order[first : first + size]
        yield from _one_pass(model, chosen, data, counts[chosen[-1]], False)


def _one_pass(
    model: nn.Module, chosen: list[Layer], batches: Iterable[Any], called: int | None, progress: bool | None
) -> Iterator[tuple[Layer, Gram]]:
    """One pass, which ends where the last of the layers was called so many times."""
    grams = {layer: Gram(layer) for layer in chosen}
    numbers = itertools.count(1)

    def see(layer: Layer, x: Tensor) -> None:
        grams[layer].add(x)
        if called is not None and layer is chosen[-1] and next(numbers) % called == 0:
            raise Stop

    with seeing_inputs(grams, see):
        for inputs in calls(model, batches, "collecting inputs", progress):
            run(model, inputs)
    yield from ((layer, gram) for layer, gram in grams.items() if gram.count)
