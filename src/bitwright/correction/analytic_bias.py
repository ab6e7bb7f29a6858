"""Analytic bias correction: remove from each layer's bias the mean error that BatchNorm statistics predict.

    b -= (Wq - W)·E[x],  summed over what the kernel covers, averaged over positions

E[x] is that of the float model (:mod:`bitwright.correction.moments`). Padding counts as the zeros that it is. The
layer's whole affine map is compared with the one before any corrector, so a second time changes nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from bitwright.calibration import make_room_for_bias
from bitwright.correction.channel_maps import add_to_result, over_channels, shared_norms, why_fixed
from bitwright.correction.moments import Expected
from bitwright.correction.outcome import Correction
from bitwright.correction.reference import correcting
from bitwright.correction.running import Layer, quantized_layers
from bitwright.errors import ConfigError
from bitwright.graph.facts import shape_of
from bitwright.graph.walks import calls_of_modules, first_input
from bitwright.nn.channels import channel_axis, input_channels


class _Wish(NamedTuple):
    """The expected input of a layer for one sample, and the mean result of each channel in float."""

    x: Tensor
    mean: Tensor


def correct_bias_analytically(model: nn.Module) -> Correction:
    """Correct biases by the inputs that BatchNorm statistics predict; needs no data.

    It reaches layers whose input comes from BatchNorms through activations, sums and averages over planes. If you have
    data, ``bw.correct_bias`` reaches all layers, and measures.

    Args:
        model: a prepared and calibrated model; it is changed in place.

    Returns:
        What was done; ``changed`` has the largest shift of a channel, in the unit of the layer's result.
    """
    if not isinstance(model, fx.GraphModule):
        raise ConfigError("analytic bias correction needs the graph of the model, which could not be captured")
    done = Correction("correct_bias_analytically")
    layers = quantized_layers(model, done)
    shared = shared_norms(layers.values())
    with torch.no_grad(), correcting(model) as original:
        with original.restored(model):
            expected = Expected(model)
            wishes = {name: _wish(model, layer, expected) for name, layer in layers.items()}
        for name, layer in layers.items():
            wish, fixed = wishes[name], why_fixed(layer, shared)
            if isinstance(wish, str) or fixed is not None:
                done.skipped[name] = fixed or str(wish)
                continue
            weight, bias = layer.folded_weight()
            shift = _mean(layer, wish.x, layer.weight_quantizer.fake_quantize(weight), bias) - wish.mean
            add_to_result(layer, -shift.to(layer.weight))
            make_room_for_bias(layer)
            done.changed[name] = float(shift.abs().max())
    return done


def _wish(model: fx.GraphModule, layer: Layer, expected: Expected) -> _Wish | str:
    """The mean result that a layer should have, or why that is unknown."""
    calls = calls_of_modules(model).get(layer, [])
    if len(calls) != 1:
        return f"it is called {len(calls)} times"
    source = first_input(calls[0])
    known, shape = expected.of(source), None if source is None else shape_of(source)
    if known is None or shape is None:
        return "no BatchNorm says what its input is on average"
    if known.axis != channel_axis(layer) or len(known.mean) != input_channels(layer):
        return "its channels do not match those of the BatchNorm before it"
    mean = known.mean.reshape(-1, *[1] * (-known.axis - 1)).to(layer.weight)
    x = layer.arrange(mean.expand(1, *shape[1:]))
    return _Wish(x, _mean(layer, x, *layer.folded_weight()))


def _mean(layer: Layer, x: object, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The mean of each channel of a layer's result."""
    return over_channels(layer, layer.compute(x, weight, bias)).double().mean(1)
