"""Empirical bias correction: remove the mean error of each layer's result from its bias.

    b -= mean over batches and positions of (quantized result - float result),  for each channel

One pass per batch, layers in order: each result is immediately corrected by the batch's own mean error, so later layers
see corrected inputs. The bias takes the average over all batches.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from bitwright.calibration import make_room_for_bias
from bitwright.correction.channel_maps import add_to_result, along_channels, over_channels, shared_norms, why_fixed
from bitwright.correction.outcome import Correction
from bitwright.correction.reference import correcting
from bitwright.correction.running import Layer, calls, quantized_layers, run, seeing_outputs


def correct_bias(model: nn.Module, batches: Iterable[Any], *, progress: bool | None = None) -> Correction:
    """Set the bias of every quantized layer so that its result has the same mean as in float.

    Args:
        model: a prepared and calibrated model; it is changed in place.
        batches: as for ``calibrate``; a few hundred images.
        progress: show a progress bar; by default only on a terminal.

    Returns:
        What was done; ``changed`` has the largest shift of a channel, in the unit of the layer's result.
    """
    done = Correction("correct_bias")
    layers = quantized_layers(model, done)
    shared = shared_norms(layers.values())
    why = {name: why_fixed(layer, shared) for name, layer in layers.items()}
    done.skipped |= {name: reason for name, reason in why.items() if reason is not None}
    fit = {layer: name for name, layer in layers.items() if why[name] is None}
    shifts: dict[Layer, Tensor] = {}
    seen: dict[Layer, int] = {}
    wanted: dict[Layer, list[Tensor]] = {}

    def remember(layer: Layer, result: Tensor) -> None:
        wanted.setdefault(layer, []).append(over_channels(layer, result).double().mean(1))

    def correct(layer: Layer, result: Tensor) -> Tensor:
        shift = over_channels(layer, result).double().mean(1) - wanted[layer].pop(0)
        count = result.numel() // len(shift)
        seen[layer] = seen.get(layer, 0) + count
        known = shifts.get(layer, torch.zeros_like(shift))
        shifts[layer] = known + (shift - known) * (count / seen[layer])
        return result - along_channels(layer, shift).to(result)

    with correcting(model) as original:
        for inputs in calls(model, batches, "correcting biases", progress):
            wanted.clear()
            with seeing_outputs(fit, remember):
                original.run(model, inputs)
            with seeing_outputs(fit, correct):
                run(model, inputs)
        for layer, shift in shifts.items():
            add_to_result(layer, -shift.to(layer.weight))
            make_room_for_bias(layer)
            done.changed[fit[layer]] = float(shift.abs().max())
    return done
